"""The generator: Yambda's formats and distributions, repeatable files, and a best AUC that is right."""

import numpy as np
import polars as pl
import pytest

from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.prepare import prepare
from generative_recommenders.data.synthetic import (
    SyntheticSpec,
    generate,
    synthetic_yambda,
    true_probability,
    yambda_like,
)
from generative_recommenders.data.synthetic.__main__ import main
from generative_recommenders.data.yambda.files import yambda_source
from generative_recommenders.errors import UserError
from generative_recommenders.ranking import auc


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    generate(folder, yambda_like(1_500_000, seed=3), truth=False)
    return folder, pl.read_parquet(folder / "flat" / "50m" / "multi_event.parquet")


def test_files_have_yambdas_columns(large):
    folder, events = large
    kinds = dict(zip(events.columns, events.dtypes, strict=True))
    assert kinds == {
        "uid": pl.UInt32, "timestamp": pl.UInt32, "item_id": pl.UInt32, "is_organic": pl.UInt8,
        "played_ratio_pct": pl.UInt16, "track_length_seconds": pl.UInt32, "event_type": pl.Categorical,
    }  # fmt: skip
    assert (events["timestamp"] % 5 == 0).all()
    listen = events["event_type"].cast(pl.String) == "listen"
    assert not events.filter(~listen)["played_ratio_pct"].is_not_null().any()
    assert (events.filter(listen)["played_ratio_pct"].is_null().mean()) < 0.01
    for name in ("artist", "album"):
        mapping = pl.read_parquet(folder / f"{name}_item_mapping.parquet")
        assert mapping.columns == ["item_id", f"{name}_id"] and mapping["item_id"].is_duplicated().any()
        assert not events["item_id"].is_in(mapping["item_id"].implode()).all()


def test_distributions_are_yambdas(large):
    _, events = large
    share = dict(events.group_by(pl.col("event_type").cast(pl.String)).len().iter_rows())
    share = {kind: count / len(events) for kind, count in share.items()}
    assert share["listen"] == pytest.approx(0.972, abs=0.002) and share["like"] == pytest.approx(0.019, abs=0.001)
    assert (events["played_ratio_pct"] >= 50).sum() / len(events) == pytest.approx(0.613, abs=0.02)
    per_user = events.group_by("uid").len()["len"]
    assert 2_000 < per_user.median() < 3_500 and 3_500 < per_user.mean() < 6_000 and per_user.max() <= 27_738
    # Popularity is heavy-tailed: a hundredth of the items has more than a tenth of the events.
    per_item = events.group_by("item_id").len()["len"].sort(descending=True)
    assert per_item[: len(per_item) // 100].sum() > 0.1 * len(events)


def test_ties_happen_but_not_between_listens(large):
    _, events = large
    assert events.select(pl.struct("uid", "timestamp").is_duplicated().sum()).item() > 0
    listens = events.filter(pl.col("event_type").cast(pl.String) == "listen")
    assert not listens.select(pl.struct("uid", "timestamp").is_duplicated().any()).item()


def test_seed_decides_the_files(tmp_path):
    spec = SyntheticSpec(users=20, seed=1)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        generate(tmp_path / name, SyntheticSpec(users=20, seed=seed))
    read = lambda name: [(tmp_path / name / f).read_bytes() for f in ("truth.parquet", "flat/50m/multi_event.parquet")]  # noqa: E731
    assert spec.users == 20 and read("a") == read("b") and read("a")[1] != read("c")[1]


def test_labels_follow_the_true_probabilities(tmp_path):
    generate(tmp_path, SyntheticSpec(seed=5))
    prepare(yambda_source(tmp_path, "50m"), tmp_path / "cache", min_history=0)
    cache = EventCache.open(tmp_path / "cache")
    events = cache.anchors.astype(np.int64)
    truth = true_probability(tmp_path / "truth.parquet", cache, events)
    labels = cache.bits[events] == 1
    for low in np.arange(0.1, 0.9, 0.1):
        chosen = (truth >= low) & (truth < low + 0.1)
        spread = 4 / np.sqrt(chosen.sum())
        assert abs(labels[chosen].mean() - truth[chosen].mean()) < spread
    assert 0.78 < auc(labels, truth) < 0.9
    other = tmp_path / "other"
    generate(other, SyntheticSpec(seed=6))
    with pytest.raises(ValueError, match="belongs to other data"):
        true_probability(other / "truth.parquet", cache, events)


def test_dataset_knows_its_best_auc(tmp_path):
    options = dict(users=30, days=6, events_median=100, events_mean=110, history_length=30, holdout_days=1)
    data = synthetic_yambda(str(tmp_path), **options)
    batches = list(data.batches([data.holdout], 64))
    labels = np.concatenate([batch.candidates["item_action_weight"].values().numpy() & 1 for batch in batches])
    numbers = np.concatenate([batch.sample_ids.numpy() for batch in batches])
    folder = next(tmp_path.iterdir())
    truth = true_probability(folder / "truth.parquet", data.cache, data.cache.anchors[numbers].astype(np.int64))
    assert len(labels) == data.holdout.num_samples
    assert data.best_auc == pytest.approx(auc(labels, truth), abs=1e-12)
    assert all(window.end <= data.holdout.start for window in data.windows)
    stamp = (folder / "truth.parquet").stat().st_mtime_ns
    assert synthetic_yambda(str(tmp_path), **options).best_auc == data.best_auc
    assert (folder / "truth.parquet").stat().st_mtime_ns == stamp


def test_simple_model_comes_near_the_best_auc(tmp_path):
    """The default problem can be learnt: smoothed means of (user, artist) and item from training get within 0.04."""
    data = synthetic_yambda(str(tmp_path))
    cache, cut = data.cache, data.windows[-1].end
    events = cache.anchors.astype(np.int64)
    label = (cache.bits[events] == 1).astype(float)
    user, item = cache.user_of(events), cache.item[events].astype(np.int64)
    train, held = cache.time[events] < cut, cache.time[events] >= data.holdout.start
    pair = user * cache.vocab["artist_id"] + cache.attributes["artist_id"][item]
    score = np.zeros(held.sum())
    for key, weight in ((pair, 5.0), (item, 5.0)):
        count = np.bincount(key[train], minlength=key.max() + 1)
        positive = np.bincount(key[train], label[train], minlength=key.max() + 1)
        mean = (positive + weight * label[train].mean()) / (count + weight)
        score += np.log(mean / (1 - mean))[key[held]]
    reached = auc(label[held], score)
    assert 0.5 < data.best_auc - 0.04 < reached < data.best_auc + 0.01


def test_bad_specs():
    for options, word in (
        (dict(users=0), "users is 0"),
        (dict(seed=-1), "seed is -1"),
        (dict(events_mean=1.0), "events_mean 1.0"),
        (dict(days=60_000), "32 bits"),
    ):
        with pytest.raises(UserError, match=word):
            SyntheticSpec(**options)
    with pytest.raises(UserError, match="-5 events"):
        yambda_like(-5)


def test_a_folder_that_would_hide_the_file_is_noticed_first(tmp_path, capsys):
    (tmp_path / "flat" / "50m" / "multi_event").mkdir(parents=True)
    assert main(["--path", str(tmp_path)]) == 2
    assert "hides the generated" in capsys.readouterr().err
    assert not (tmp_path / "truth.parquet").exists()


def test_a_path_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--path", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error:") and error.count("\n") == 1
