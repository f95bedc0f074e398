"""MovieLens: small files made here, and the published figures where the data are present."""

import csv
import importlib.metadata
import os
import pathlib
import re

import numpy as np
import pytest

from generative_recommenders.data.movielens import movielens_100k, movielens_small, read_100k, read_small
from generative_recommenders.errors import UserError

REPO = pathlib.Path(__file__).resolve().parents[2]
SMALL = pathlib.Path(os.environ.get("MOVIELENS_SMALL", REPO.parent / "shared" / "data" / "ml-latest-small"))


def has_recbole():
    try:
        importlib.metadata.distribution("recbole")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


need_100k = pytest.mark.skipif(not has_recbole(), reason="MovieLens-100K: the recbole wheel is not installed")
need_small = pytest.mark.skipif(not SMALL.is_dir(), reason=f"ml-latest-small: {SMALL} is absent, set MOVIELENS_SMALL")


def write_small(folder, ratings=None, movies=None):
    lines = [
        f"{u},{m},{2.5 + (u + m) % 3},{1000 + 10 * k}" for k, (u, m) in enumerate((k % 4, k % 7) for k in range(60))
    ]
    default = "movieId,title,genres\n" + "\n".join(f'{m},"Film, the {m} ({1990 + m})",Drama|War' for m in range(6))
    (folder / "ratings.csv").write_text(ratings or "userId,movieId,rating,timestamp\n" + "\n".join(lines) + "\n")
    (folder / "movies.csv").write_text(movies or default + "\n6,Untitled,(no genres listed)\n")
    return folder


def test_small_files_are_read(tmp_path):
    ratings = read_small(write_small(tmp_path))
    assert ratings.user[:3].tolist() == [0, 1, 2] and ratings.rating[0] == 2.5 and ratings.time[1] == 1010
    assert ratings.item_attributes["year"] == {m: 1990 + m for m in range(6)}
    assert len(set(ratings.item_attributes["genres"].values())) == 2
    assert ratings.genres[0] == ["Drama", "War"]


def test_ratings_of_four_and_more_are_the_positive_class(tmp_path):
    dataset = movielens_small(str(write_small(tmp_path)), min_history=0)
    ratings = read_small(tmp_path)
    assert (dataset.cache.bits == 1).sum() == (ratings.rating >= 4).sum()
    assert set(dataset.cache.bits.tolist()) == {1, 4}
    (batch,) = dataset.batches([dataset.holdout], 100)
    assert batch.batch_size == 6
    assert batch.candidates["item_action_weight"].values().tolist() == [
        1 if rating >= 4 else 4 for rating in ratings.rating[-6:]
    ]


def test_the_rating_is_a_label_and_no_feature(tmp_path):
    dataset = movielens_small(str(write_small(tmp_path)), min_history=0)
    ratings = read_small(tmp_path)
    wanted = {
        (user, time): round(100 * rating)
        for user, time, rating in zip(
            ratings.user.tolist(), ratings.time.tolist(), ratings.rating.tolist(), strict=True
        )
    }
    seen = 0
    for batch in dataset.batches([*dataset.windows, dataset.holdout], 7, shuffle_seed=1):
        times = batch.candidates["item_query_time"].values().tolist()
        labels = batch.candidates["item_rating"].values().tolist()
        assert labels == [wanted[key] for key in zip(batch.user_ids.tolist(), times, strict=True)]
        seen += len(labels)
    assert seen == 60
    assert "item_rating" not in dataset.cache.context and "item_rating" not in dataset.cache.vocab
    for option in ("item_features", "contextual_features"):
        with pytest.raises(UserError, match="no feature 'item_rating'"):
            movielens_small(str(tmp_path), **{option: ["item_id", "item_rating"]})


def test_features_are_chosen_by_name(tmp_path):
    dataset = movielens_small(
        str(write_small(tmp_path)),
        item_features=["item_id", "year", "item_mean"],
        contextual_features=["user_recent", "user_mean_x_item_mean"],
        table_rows_limit=100,
    )
    assert dataset.schema.table_rows["user_mean_x_item_mean"] == 100
    assert any("hashed down" in note for note in dataset.notes)
    batch = next(dataset.batches(dataset.windows, 8))
    assert batch.uih.keys()[:2] == ["user_recent", "user_mean_x_item_mean"]


def test_min_history_counts_strictly_earlier_ratings(tmp_path):
    dataset = movielens_small(str(write_small(tmp_path)), min_history=5)
    lengths = [n for b in dataset.batches(dataset.windows, 9) for n in b.uih["item_id"].lengths().tolist()]
    assert min(lengths) == 5


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ratings": "userId,movieId,rating\n1,2,3\n"}, "has no column 'timestamp'"),
        (
            {"ratings": "userId,movieId,rating,timestamp\n1,2,good,5\n"},
            "column 'rating', line 2: 'good' is not a number",
        ),
        ({"ratings": "userId,movieId,rating,timestamp\n1,2,3,5\n1,2,3,-5\n"}, "column 'timestamp', line 3: -5"),
        ({"ratings": "userId,movieId,rating,timestamp\n1,2.5,3,5\n"}, "column 'movieId', line 2: 2.5"),
        ({"ratings": "userId,movieId,rating,timestamp\n"}, "ratings.csv holds a header and no line"),
        ({"ratings": "userId,movieId,rating,timestamp\n1,2,3,99999999999\n"}, "time runs"),
        ({"ratings": "userId,movieId,rating,timestamp\n1,2,3,5\n1,3,3,5\n"}, "has no training sample"),
        ({"ratings": "userId,movieId,rating,timestamp\n1,2,3,5\n1,2,3\n"}, "ratings.csv, line 3: 3 fields, but .* 4"),
        ({"ratings": "userId,movieId,rating,timestamp\n1,2,50,5\n"}, "column 'rating', line 2: 50 is no rating"),
        ({"ratings": "userId,movieId,rating,timestamp\n1,2,-1,5\n"}, "column 'rating', line 2: -1 is no rating"),
    ],
)
def test_bad_files_are_named(tmp_path, files, message):
    write_small(tmp_path, **files)
    with pytest.raises(UserError, match=message) as caught:
        movielens_small(str(tmp_path), min_history=0)
    assert "ratings.csv" in str(caught.value) or "training sample" in message
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1,A (1990),War", "2,B (1991)"], "movies.csv, line 3: 2 fields, but the header has 3"),
        (['1,"A\n(1990)",War', "2"], "movies.csv, line 4: 1 fields, but the header has 3"),
        (["1,A (1990),War", "1,B (1991),Drama"], "movies.csv, column 'movieId', line 3: 1 stands in line 2 already"),
    ],
)
def test_a_cut_off_or_repeated_movie_is_an_error(tmp_path, lines, message):
    write_small(tmp_path, movies="movieId,title,genres\n" + "\n".join(lines))
    with pytest.raises(UserError, match=message):
        read_small(tmp_path)


def test_a_hold_out_of_one_class_has_no_baseline_auc(tmp_path):
    """nan is no JSON, and compares as beaten."""
    ratings = "userId,movieId,rating,timestamp\n" + "".join(f"{k % 4},{k % 7},5,{1000 + k}\n" for k in range(60))
    assert movielens_small(str(write_small(tmp_path, ratings=ratings))).baseline_auc is None


def write_100k(folder, users=None, items=None, ratings=None):
    """Three users, four items, nine ratings; ``users`` and so on: lines in place of the usual ones."""
    files = {
        "user": (
            "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
            users or ["1\t24\tM\ttechnician\t85711", "2\t53\tF\tother\t94043", "3\t23\tM\twriter\t32067"],
        ),
        "item": (
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
            items or [f"{n}\tFilm {n}\t199{n}\tDrama War" for n in range(1, 5)],
        ),
        "inter": (
            "user_id:token\titem_id:token\trating:float\ttimestamp:float",
            ratings or [f"{n % 3 + 1}\t{n % 4 + 1}\t{n % 5 + 1}\t{1000 + n}" for n in range(9)],
        ),
    }
    for name, (header, lines) in files.items():
        (folder / f"ml-100k.{name}").write_text("\n".join([header, *lines]) + "\n")
    return str(folder)


FEATURES = {"item_features": ["item_id", "genres", "year"], "contextual_features": ["age", "gender", "occupation"]}


@pytest.mark.parametrize("empty", ["", " ", '""'])
@pytest.mark.parametrize("column", ["age", "gender", "occupation"])
def test_a_user_without_an_attribute_has_the_unknown_id(tmp_path, column, empty):
    fields = {"user_id": "2", "age": "53", "gender": "F", "occupation": "other", "zip_code": ""}
    if empty == '""':  # quotes count where the header has them
        write_100k(tmp_path)
        quoted = "\n".join(
            "\t".join(f'"{field}"' for field in line.split("\t"))
            for line in (tmp_path / "ml-100k.user").read_text().splitlines()
        )
        position = list(fields).index(column)
        lines = [line.split("\t") for line in quoted.splitlines()]
        lines[2][position] = empty
        (tmp_path / "ml-100k.user").write_text("\n".join("\t".join(line) for line in lines) + "\n")
    else:
        fields[column] = empty
        write_100k(tmp_path, users=["1\t24\tM\ttechnician\t", "\t".join(fields.values()), "3\t23\tM\twriter\t"])
    cache = movielens_100k(str(tmp_path), min_history=0, **FEATURES).cache
    for name in ("age", "gender", "occupation"):
        of_user = [
            set(cache.context[name][cache.user_offsets[u] : cache.user_offsets[u + 1]].tolist()) for u in (0, 1, 2)
        ]
        whole = {"age": [1, 2, 1], "gender": [2, 1, 2], "occupation": [2, 1, 3]}[name]
        less = {"age": [1, 0, 1], "gender": [1, 0, 1], "occupation": [1, 0, 2]}[name]
        assert of_user == [{number} for number in (less if name == column else whole)], name


def test_an_item_without_genres_or_year_has_the_unknown_id(tmp_path):
    write_100k(tmp_path, items=["1\tOne\t1991\tWar", "2\tTwo\t\tWar", "3\tThree\t1993\t", "4\t\t1991\tDrama"])
    cache = movielens_100k(str(tmp_path), min_history=0, **FEATURES).cache
    assert cache.attributes["genres"].tolist() == [0, 2, 2, 0, 1]
    assert cache.attributes["year"].tolist() == [0, 1, 0, 2, 1]
    folder = tmp_path / "small"
    folder.mkdir()
    movies = "movieId,title,genres\n" + "".join(f"{m},Film ({1990 + m}),War\n" for m in range(5)) + "5,,\n6,Film,\n"
    cache = movielens_small(str(write_small(folder, movies=movies)), min_history=0).cache
    assert cache.attributes["genres"].tolist() == [0, 1, 1, 1, 1, 1, 0, 0]
    assert cache.attributes["year"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"users": ["x\t24\tM\tother\t1"]}, "ml-100k.user, column 'user_id:token', line 2: 'x' is not a number"),
        ({"users": ["\t24\tM\tother\t1"]}, "ml-100k.user, column 'user_id:token', line 2: an empty field is not"),
        ({"users": ["1\told\tM\tother\t1"]}, "ml-100k.user, column 'age:token', line 2: 'old' is not a number"),
        ({"users": ["1\t24\tM\tother\t1"]}, r"ml-100k.user has no line of user 2, who has ratings in \S+ml-100k.inter"),
        ({"items": ["\tOne\t1991\tWar"]}, "ml-100k.item, column 'item_id:token', line 2: an empty field"),
        ({"ratings": ["1\t1\t5\t1", "1\t1\t\t2"]}, "ml-100k.inter, column 'rating:float', line 3: an empty field"),
        ({"ratings": ["1\t1\tnan\t1"]}, "ml-100k.inter, column 'rating:float', line 2: 'nan' is not a number"),
        ({"ratings": ["1\t\t5\t1"]}, "ml-100k.inter, column 'item_id:token', line 2: an empty field"),
        ({"ratings": ["1\t1\t5\t"]}, "ml-100k.inter, column 'timestamp:float', line 2: an empty field"),
        ({"items": ["1\tOne\t1991"]}, "ml-100k.item, line 2: 3 fields, but the header has 4"),
        ({"users": ["1\t24\tM\tother\t1", "2\t24"]}, "ml-100k.user, line 3: 2 fields, but the header has 5"),
        ({"users": ["1\t24\tM\tother\t1"] * 2}, "'user_id:token', line 3: 1 stands in line 2 already: leave one"),
        ({"items": ["1\tA\t1991\tWar", "1\tB\t1992\tWar"]}, "'item_id:token', line 3: 1 stands in line 2"),
        ({"ratings": ["1\t1\t9e18\t1"]}, "ml-100k.inter, column 'rating:float', line 2: 9e\\+18 is no rating"),
        ({"ratings": ["1\t1\t5\t8e9"]}, "ml-100k.inter, column 'timestamp:float', line 2: 8000000000, but time runs"),
    ],
)
def test_errors_of_100k_name_file_column_and_line(tmp_path, files, message):
    with pytest.raises(UserError, match=message) as caught:
        movielens_100k(write_100k(tmp_path, **files), min_history=0)
    assert "\n" not in str(caught.value)


def test_files_with_every_field_quoted_are_read(tmp_path):
    write_small(tmp_path)
    want = read_small(tmp_path)
    (tmp_path / "quoted").mkdir()
    for name in ("ratings.csv", "movies.csv"):
        rows = list(csv.reader((tmp_path / name).read_text().splitlines()))
        with (tmp_path / "quoted" / name).open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    found = read_small(tmp_path / "quoted")
    for name in ("user", "item", "rating", "time"):
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name))
    assert found.item_attributes == want.item_attributes and found.genres == want.genres


def test_a_quote_in_a_title_of_100k_is_a_letter(tmp_path):
    write_100k(tmp_path, items=['1\t"Junior"\t1991\tWar', '2\t"Two\t1992\tWar', "3\t3\t1993\tWar", "4\t4\t1994\tWar"])
    assert read_100k(tmp_path).item_attributes["year"] == {1: 1991, 2: 1992, 3: 1993, 4: 1994}


def test_empty_and_absent_files_are_named(tmp_path):
    for path in (None, str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match=r"grouplens.org/datasets/movielens.*--bind 'movielens_small.path=\"…\"'"):
            movielens_small(path)
    with pytest.raises(UserError, match=r"ratings\.csv does not exist"):
        movielens_small(str(tmp_path))
    write_small(tmp_path)
    (tmp_path / "movies.csv").write_text("")
    with pytest.raises(UserError, match=r"movies\.csv is empty"):
        movielens_small(str(tmp_path))


def test_a_folder_is_no_pattern(tmp_path):
    folder = tmp_path / "ml**small"
    folder.mkdir()
    assert movielens_small(str(write_small(folder))).cache.num_events == 60
    with pytest.raises(UserError, match="window_seconds 0"):
        movielens_small(str(folder), window_days=0)


def test_unknown_features_are_named(tmp_path):
    with pytest.raises(UserError, match=r"^movielens_small\.item_features: .*no feature 'director'.*item_mean"):
        movielens_small(str(write_small(tmp_path)), item_features=["item_id", "director"])


def test_a_missing_wheel_says_what_to_install(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(UserError, match="pip install --no-deps recbole==1.2.1"):
        movielens_100k()


@need_100k
def test_100k_has_the_published_figures():
    dataset = movielens_100k(min_history=0)
    assert dataset.cache.num_events == 100_000
    assert dataset.holdout.num_samples == 10_000
    assert sum(w.num_samples for w in dataset.windows) == 90_000
    assert round(positive_rate(dataset), 3) == 0.563
    assert round(dataset.baseline_auc, 4) == 0.7401


@need_100k
def test_100k_can_be_read_from_a_path():
    wheel = importlib.metadata.distribution("recbole")
    ratings = read_100k(pathlib.Path(str(wheel.locate_file("recbole/dataset_example/ml-100k"))))
    assert len(np.unique(ratings.user)) == 943 and ratings.item_attributes["year"][1] == 1995
    assert ratings.genres[2] == ["Action", "Adventure", "Thriller"]


@need_small
def test_small_has_the_published_figures():
    dataset = movielens_small(str(SMALL), min_history=0)
    assert dataset.cache.num_events == 100_004
    assert dataset.holdout.num_samples == 10_001
    assert round(positive_rate(dataset), 3) == 0.489
    assert round(dataset.baseline_auc, 4) == 0.8313


@need_100k
def test_the_example_of_the_documentation_runs(capsys):
    text = (REPO / "docs" / "data.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/data.md", "exec"), {})
    assert capsys.readouterr().out.startswith("128 ['uid', 'item_id', 'genres', 'year', 'action_weight'")


def positive_rate(dataset):
    labels = [b.candidates["item_action_weight"].values() & 1 for b in dataset.batches([dataset.holdout], 4096)]
    return float(np.concatenate(labels).mean())
