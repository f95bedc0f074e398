"""Own events from parquet and CSV: every column role, text ids, attributes and context, and clear errors."""

import datetime
import os
import pathlib
import random
import subprocess
import sys
import textwrap

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from generative_recommenders.data.cache import EventCache, cache_from_events
from generative_recommenders.data.events import events
from generative_recommenders.data.events.__main__ import main
from generative_recommenders.data.events.files import EventColumns, events_source
from generative_recommenders.data.prepare import prepare
from generative_recommenders.errors import UserError


def frame(seed=0, count=400):
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "user": rng.integers(1, 12, count),
            "item": rng.integers(1, 30, count),
            "time": rng.integers(0, 100, count) * 3600,
            "action": rng.choice([0, 1, 2, 4], count),
            "device": rng.integers(1, 4, count),
        }
    )


def prepared(tmp_path, table, columns, name="cache", suffix="parquet", min_history=2, **options):
    file = tmp_path / f"{name}.{suffix}"
    table.write_parquet(file) if suffix == "parquet" else table.write_csv(file)
    prepare(events_source(file, columns, **options), tmp_path / name, min_history=min_history)
    return EventCache.open(tmp_path / name)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_files_equal_the_cache_in_memory(tmp_path, suffix):
    table = frame()
    items = pl.DataFrame({"item": [n for n in range(1, 30) if n % 5], "genre": [n % 3 for n in range(1, 30) if n % 5]})
    items.write_csv(tmp_path / "items.csv")
    cache = prepared(
        tmp_path, table, EventColumns(action="action"), suffix=suffix,
        items=tmp_path / "items.csv", attributes=["genre"], context=["device"],
    )  # fmt: skip
    want = cache_from_events(
        *(table[name].to_numpy() for name in ("user", "item", "time", "action")),
        min_history=2,
        attributes={"genre": dict(items.iter_rows())},
        context={"device": table["device"].to_numpy()},
    )
    for name in ("user_ids", "user_offsets", "item", "time", "bits", "organic", "item_count", "anchors"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(want, name), err_msg=name)
    np.testing.assert_array_equal(cache.attributes["genre"], want.attributes["genre"])
    np.testing.assert_array_equal(cache.context["device"], want.context["device"])
    assert dict(cache.vocab) == dict(want.vocab)


def test_labels_ratings_and_timestamps(tmp_path):
    table = frame(1).with_columns(rating=pl.Series(random.Random(1).choices([0.5, 3.5, 4.0, 5.0, None], k=400)))
    plain = prepared(tmp_path, table, EventColumns(label="rating", positive_at=4), name="a", min_history=0)
    expected = pl.Series(np.where(table["rating"].is_null(), 0, np.where(table["rating"].fill_null(0) >= 4, 1, 4)))
    want = cache_from_events(
        *(table[name].to_numpy() for name in ("user", "item", "time")), expected.to_numpy(), min_history=0
    )
    np.testing.assert_array_equal(plain.bits, want.bits)
    start = datetime.datetime(1970, 1, 1)
    dated = table.with_columns(
        time=pl.Series([start + datetime.timedelta(seconds=int(t)) for t in table["time"]]),
        rating=table["rating"] >= 4,
    )
    for number, suffix in enumerate(("parquet", "csv")):
        other = prepared(tmp_path, dated, EventColumns(label="rating"), name=f"b{number}", suffix=suffix, min_history=0)
        np.testing.assert_array_equal(other.time, plain.time)
        np.testing.assert_array_equal(other.bits, plain.bits)


def test_text_ids_keep_their_order_in_the_vocabularies(tmp_path):
    numbers = frame(2)
    text = numbers.with_columns(
        user=pl.format("u{}", pl.col("user") + 10), item=pl.format("é{}", pl.col("item") + 10), device=pl.lit("phone")
    )
    text = text.rename({"item": "original", "device": "events"})  # names that the engine's own tables must not mind
    columns = EventColumns(item="original", action="action")
    cache = prepared(tmp_path, text, columns, context=["events"])
    want = prepared(tmp_path, numbers.with_columns(device=1), EventColumns(action="action"), name="numbers")
    for name in ("user_offsets", "item", "time", "bits", "anchors"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(want, name))
    assert cache.user_ids.tolist() == list(range(cache.num_users))
    users = pq.read_table(tmp_path / "cache" / "vocabulary_uid.parquet")["original"].to_pylist()
    assert users == sorted(set(text["user"]))
    assert pq.read_table(tmp_path / "cache" / "vocabulary_events.parquet")["original"].to_pylist() == ["phone"]


def test_null_item_and_context_are_unknown(tmp_path):
    table = frame(3).with_columns(
        item=pl.when(pl.col("item") < 5).then(None).otherwise(pl.col("item")),
        device=pl.when(pl.col("device") == 2).then(None).otherwise(pl.col("device")),
    )
    cache = prepared(tmp_path, table, EventColumns(action="action"), context=["device"])
    assert (cache.item == 0).sum() == table["item"].null_count() == cache.counters["null_item"]
    assert (cache.context["device"] == 0).sum() == table["device"].null_count() == cache.counters["null_device"]


def test_command_line_and_batches(tmp_path, capsys):
    frame(4, 2000).rename({"user": "userId"}).write_csv(tmp_path / "log.csv")
    cache = str(tmp_path / "cache")
    command = ["prepare", "--events", str(tmp_path / "log.csv"), "--cache", cache, "--context", "device"]
    assert main([*command, "--columns", "user=userId,action=action", "--min-history", "3", "--threads", "2"]) == 0
    assert "2,000 events" in capsys.readouterr().out
    assert main(["verify", "--cache", cache]) == 0 and main(["info", "--cache", cache]) == 0
    data = events(cache, min_history=3, contextual_features=("uid", "device", "user_x_hour"))
    batch = next(data.batches([data.holdout], 8))
    assert batch.batch_size == 8 and data.schema.table_rows["device"] == 4
    capsys.readouterr()
    assert main([*command, "--columns", "customer=userId,action=action"]) == 2
    assert capsys.readouterr().err.startswith("error: --columns 'customer=userId'")
    with pytest.raises(UserError, match="min_history=3"):
        events(cache, min_history=5)
    for option in ("item_features", "contextual_features"):
        with pytest.raises(UserError, match=rf"^events\.{option}: events has no feature 'genre'"):
            events(cache, **{option: ("item_id", "genre")})
    with pytest.raises(UserError, match=r"^events\.table_rows names 'genre'"):
        events(cache, table_rows={"genre": 9})


def test_a_cache_that_is_not_there_comes_with_the_whole_command(tmp_path):
    cache = tmp_path / "none"
    with pytest.raises(UserError, match=rf"prepare --events FILE --columns user=…,item=…,\S+ --cache {cache}\)"):
        events(str(cache))


def test_the_command_line_says_a_missing_file_before_what_is_wrong_with_the_columns(tmp_path, capsys):
    command = ["prepare", "--events", str(tmp_path / "none.csv"), "--cache", str(tmp_path / "cache")]
    assert main([*command, "--columns", "customer=userId"]) == 2
    assert "none.csv does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "options", "word"),
    [
        (dict(user="customer", action="action"), {}, "no column 'customer'"),
        (dict(), {}, "add action=COLUMN or label=COLUMN to --columns$"),
        (dict(action="action", label="device"), {}, "names action=action and label=device: the outcome is one"),
        (dict(action="action", positive_at=4), {}, "--positive-at 4 needs label=COLUMN"),
        (dict(action="device"), {}, "action 3"),
        (dict(label="device"), {}, r"label 2(.0)?, expected 0 or 1 \(a rating\? --positive-at 4\)"),
        (dict(action="action", organic="device"), {}, "'organic'|'device' holds 2"),
        (dict(action="action"), dict(attributes=["genre"]), "--attributes genre: needs --items"),
        (dict(action="action"), dict(context=["city"]), "no column 'city'"),
        (dict(action="action"), dict(items="none.csv"), "none.csv does not exist"),
        (dict(time="price", action="action"), {}, "'price' has type DOUBLE"),
    ],
)
def test_errors_name_the_column(tmp_path, columns, options, word):
    with pytest.raises(UserError, match=word):
        prepared(tmp_path, frame().with_columns(price=1.5), EventColumns(**columns), **options)
    assert not (tmp_path / "cache" / "COMPLETE").exists()


def test_errors_name_the_file(tmp_path):
    for path, word in ((tmp_path, "no .parquet and no .csv"), (tmp_path / "log.txt", "does not exist")):
        with pytest.raises(UserError, match=word):
            events_source(path, EventColumns(action="action"))
    (tmp_path / "log.txt").write_text("x")
    with pytest.raises(UserError, match="expected a .parquet"):
        events_source(tmp_path / "log.txt", EventColumns(action="action"))


@pytest.mark.slow
def test_worked_example_of_the_documentation(tmp_path):
    guide = pathlib.Path(__file__).parents[3] / "docs" / "bring_your_own_events.md"
    example = guide.read_text().split("## A worked example")[1].split("## Errors")[0]
    blocks = [textwrap.dedent(block) for block in example.split("\n\n") if block.startswith("    ")]
    shell = "\n".join(block for block in blocks if block.startswith(("mkdir", "python -m")))
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(guide.parents[1])
    done = subprocess.run(["bash", "-ec", shell], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = [line for block in blocks if block.startswith("shop/cache") for line in block.splitlines()]
    assert len(shown) == 8
    assert [line for line in shown if line.strip() != "…" and line not in done.stdout.splitlines()] == []
    python = "\n".join(
        [*(block for block in blocks if block.startswith(("from ", "data = "))), "assert batch.batch_size == 32"]
    )
    subprocess.run([sys.executable, "-c", python], cwd=tmp_path, env=environment, check=True)


@pytest.mark.parametrize(
    "context",
    [
        ["uid"], ["item_id"], ["id"], ["action_weight"], ["a_x_b"], ["p/q"], ["a", "a"], [""], ["Genre", "genre"],
        ["UID"], ["item_candidate_genre"], ["item_candidate_id"], ["x" * 201],
        ["é" * 101], ["a\nb"], ["a\0"], ["é", "e\u0301"],
    ],
)  # fmt: skip
def test_names_that_cannot_be_features_are_refused(context):
    with pytest.raises(UserError, match="is not possible: rename the column"):
        events_source("log.csv", EventColumns(action="action"), context=context)
    with pytest.raises(UserError, match="is not possible: rename the column"):
        events_source("log.csv", EventColumns(action="action"), items="items.csv", attributes=context)


def test_a_cache_with_a_name_that_clashes_is_refused_when_it_is_opened(tmp_path, monkeypatch):
    from generative_recommenders.data.events import files

    monkeypatch.setattr(files, "impossible_name", lambda names: None)  # as earlier preparations had it
    table = frame().rename({"device": "item_candidate_genre"})
    prepared(tmp_path, table, EventColumns(action="action"), context=["item_candidate_genre"])
    with pytest.raises(UserError, match="has a feature named 'item_candidate_genre', which is not possible any more"):
        events(str(tmp_path / "cache"))


def test_names_of_the_engine_s_patterns_survive_a_kill(tmp_path, monkeypatch):
    from generative_recommenders.data.prepare import pipeline

    names = ["a[1]", "st*r", "{x}", "qu'o\"te", "a?"]
    frame().with_columns(**{name: pl.lit(name) for name in names}).write_parquet(tmp_path / "log.parquet")
    source = events_source(tmp_path / "log.parquet", EventColumns(action="action"), context=names)
    sort = pipeline.sort_events
    monkeypatch.setattr(pipeline, "sort_events", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(source, tmp_path / "cache", min_history=2)
    monkeypatch.setattr(pipeline, "sort_events", sort)
    prepare(source, tmp_path / "cache", min_history=2)
    cache = EventCache.open(tmp_path / "cache")
    assert all((cache.context[name] == 1).all() for name in names)


def test_the_outcome_is_no_context():
    with pytest.raises(UserError, match="'bought' is the outcome itself"):
        events_source("log.csv", EventColumns(label="bought"), context=["bought"])


@pytest.mark.parametrize(
    ("change", "columns", "word"),
    [
        (dict(label=float("nan")), dict(label="label", positive_at=4), "label nan"),
        (dict(label=float("nan")), dict(label="label"), "label nan"),
        (dict(user=[1]), dict(action="action"), r"BIGINT\[\], expected whole numbers or text"),
        (dict(time=datetime.datetime(9999, 1, 1)), dict(action="action"), "holds the time"),
        (dict(organic=2**40), dict(action="action", organic="organic"), f"'organic' holds {2**40}"),
    ],
)
def test_values_that_slip_through_comparisons(tmp_path, change, columns, word):
    table = frame().with_columns(**{name: pl.lit(value) for name, value in change.items()})
    if "label" in change:  # statistics of a parquet file leave nan out
        table = table.with_columns(label=pl.when(pl.int_range(pl.len()) == 3).then(pl.col("label")).otherwise(1.0))
    with pytest.raises(UserError, match=word):
        prepared(tmp_path, table, EventColumns(**columns))


def test_positive_at_is_finite():
    with pytest.raises(UserError, match="--positive-at nan"):
        EventColumns(label="label", positive_at=float("nan"))


@pytest.mark.parametrize("folder", ["user=77", "a[1]", "{user}", "st*r"])
def test_paths_are_no_patterns_and_no_columns(tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / "star").mkdir()
    frame(seed=1).write_parquet(tmp_path / "star" / "cache.parquet")
    cache = prepared(tmp_path / folder, frame(), EventColumns(action="action"))
    assert cache.num_events == 400 and cache.user_ids.tolist() == sorted(frame()["user"].unique())
    with pytest.raises(UserError, match="holds -1, outside"):
        prepared(tmp_path / folder, frame().with_columns(user=-1), EventColumns(action="action"), name="bad")


def test_quotes_may_come_late_in_a_csv(tmp_path):
    plain = "".join(f"u{n % 7},x,{n},1\n" for n in range(25_000))
    (tmp_path / "log.csv").write_text(f'user,item,time,label\n{plain}"u,1","it""em",5,1\n"two\nlines",y,7,0\n')
    prepare(events_source(tmp_path / "log.csv", EventColumns(label="label")), tmp_path / "cache", min_history=1)
    users = pq.read_table(tmp_path / "cache" / "vocabulary_uid.parquet")["original"].to_pylist()
    assert users == ["two\nlines", "u,1", *(f"u{n}" for n in range(7))]


def test_files_may_have_their_columns_in_another_order(tmp_path):
    table = frame().with_columns(item=pl.format("i{}", "item"))
    for name, part, order in (("a", table[:150], [0, 1, 2, 3, 4]), ("b", table[150:], [1, 3, 4, 0, 2])):
        part.select([table.columns[n] for n in order]).write_csv(tmp_path / f"{name}.csv")
    prepare(events_source(tmp_path, EventColumns(action="action")), tmp_path / "split", min_history=2)
    whole = prepared(tmp_path, table, EventColumns(action="action"), name="whole")
    split = EventCache.open(tmp_path / "split")
    for name in ("user_ids", "item", "time", "bits", "anchors"):
        np.testing.assert_array_equal(getattr(split, name), getattr(whole, name), err_msg=name)


def test_folders_hold_one_kind_of_file(tmp_path):
    (tmp_path / "log.tsv").write_text("user\titem\ttime\tlabel\n1\t2\t3\t1\n")
    assert events_source(tmp_path, EventColumns(label="label")).files == [tmp_path / "log.tsv"]
    frame().write_parquet(tmp_path / "log.parquet")
    with pytest.raises(UserError, match="both .parquet and .csv"):
        events_source(tmp_path, EventColumns(label="label"))


def test_a_relative_path_is_the_same_input(tmp_path, monkeypatch):
    prepared(tmp_path, frame(), EventColumns(action="action"))
    monkeypatch.chdir(tmp_path)
    again = events_source("cache.parquet", EventColumns(action="action"))
    assert prepare(again, tmp_path / "cache", min_history=2)["events"] == 400


def test_disk_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["info", "--cache", str(tmp_path / "file" / "x\0y")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
