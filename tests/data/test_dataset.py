"""Batches against the slow oracle; every sample exactly once; order, resume and workers; nothing leaks."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generative_recommenders.data.cache import cache_from_events
from generative_recommenders.data.crosses import CROSSES
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.data.reader import BatchReader, HistoryOptions
from generative_recommenders.data.schema import FeatureSchema
from generative_recommenders.data.windows import split_last_fraction
from generative_recommenders.errors import UserError
from tests.data.sample_oracle import Rules, random_attributes, random_events, samples

ROWS = {name: 50 + 13 * i for i, name in enumerate(CROSSES)}
ITEM_FEATURES = ("item_id", "artist_id", "album_id")


def make_rules(**changes):
    rules = Rules(length=12, strategy="interleaved", ties="exclude", scan_limit=20_000, min_history=2, rows=ROWS)
    return dataclasses.replace(rules, **changes)


def make_cache(events, attributes, min_history=2):
    column = lambda name: np.array([getattr(e, name) for e in events])
    return cache_from_events(
        column("user"),
        column("item"),
        column("time"),
        column("bits"),
        organic=column("organic"),
        attributes=attributes,
        context={"mood": column("mood")},
        min_history=min_history,
    )


def make_dataset(events, attributes, rules, window_seconds=600, **options):
    cache = make_cache(events, attributes, rules.min_history)
    schema = FeatureSchema(ITEM_FEATURES, ("uid", "mood", *CROSSES), {**cache.vocab, **rules.rows})
    history = HistoryOptions(rules.length, rules.strategy, rules.ties, rules.scan_limit)
    return RankingDataset("test", cache, schema, split_last_fraction(cache, 0.2, window_seconds), history, **options)


def flatten(batches):
    """Every sample of the batches as ``{"user", "id", "values": {feature: list}}``."""
    found = []
    for batch in batches:
        if not batch.batch_size:  # TorchRec's to_dict needs at least one sample
            continue
        parts = {}
        for tensor in (batch.uih, batch.candidates):
            for key, jagged in tensor.to_dict().items():
                parts[key] = [values.tolist() for values in jagged.to_dense()]
        for row in range(batch.batch_size):
            values = {key: rows[row] for key, rows in parts.items()}
            found.append({"user": int(batch.user_ids[row]), "id": int(batch.sample_ids[row]), "values": values})
    return found


def everything(dataset, batch_size=17, **options):
    return flatten(dataset.batches([*dataset.windows, dataset.holdout], batch_size, **options))


@pytest.fixture(scope="module")
def dataset():
    return make_dataset(random_events(1, count=700), random_attributes(1), make_rules())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["interleaved", "last_n"])
@pytest.mark.parametrize("ties", ["exclude", "order"])
@pytest.mark.parametrize(("length", "scan_limit", "min_history"), [(12, 20_000, 2), (3, 9, 0), (300, 20_000, 5)])
def test_batches_equal_the_oracle(seed, strategy, ties, length, scan_limit, min_history):
    rules = make_rules(strategy=strategy, ties=ties, length=length, scan_limit=scan_limit, min_history=min_history)
    events, attributes = random_events(seed), random_attributes(seed)
    expected = samples(events, attributes, rules)
    found = everything(make_dataset(events, attributes, rules))
    assert [s["id"] for s in found] == list(range(len(expected)))
    for one, other in zip(found, expected, strict=True):
        assert one["user"] == other["user"]
        assert one["values"] == other["values"]


def test_types_and_keys(dataset):
    batch = next(dataset.batches(dataset.windows, 8))
    assert batch.uih.keys() == list(dataset.schema.uih_keys)
    assert batch.candidates.keys() == list(dataset.schema.candidate_keys)
    for tensor in (batch.uih, batch.candidates):
        assert tensor.values().dtype == torch.int64
        assert tensor.lengths().dtype == torch.int32
    assert batch.batch_size == 8 and batch.user_ids.dtype == batch.sample_ids.dtype == torch.int64
    moved = batch.to("cpu")
    assert torch.equal(moved.uih.values(), batch.uih.values()) and torch.equal(moved.sample_ids, batch.sample_ids)


@pytest.mark.parametrize("shuffle_seed", [None, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 10_000])
def test_every_holdout_sample_exactly_once(dataset, shuffle_seed, world_size, batch_size):
    seen, steps = [], set()
    for rank in range(world_size):
        batches = list(dataset.batches([dataset.holdout], batch_size, rank, world_size, shuffle_seed=shuffle_seed))
        steps.add(len(batches))
        seen += [i for batch in batches for i in batch.sample_ids.tolist()]
    lo, hi = dataset.cache.anchor_range(dataset.holdout.start, dataset.holdout.end)
    assert sorted(seen) == list(range(lo, hi))
    assert len(steps) == 1


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 5), (2, 4), (4, 16), (3, 500)])
def test_ranks_and_batch_size_only_cut_the_order(dataset, world_size, batch_size):
    order = [s["id"] for s in everything(dataset, shuffle_seed=11)]
    windows = [*dataset.windows, dataset.holdout]
    ranks = [dataset.batches(windows, batch_size, r, world_size, shuffle_seed=11) for r in range(world_size)]
    joined = [i for step in zip(*ranks, strict=True) for batch in step for i in batch.sample_ids.tolist()]
    assert joined == order


def test_a_sample_does_not_depend_on_its_batch(dataset):
    alone = everything(dataset, batch_size=1, shuffle_seed=3)
    assert alone == everything(dataset, batch_size=33, shuffle_seed=3)


def test_empty_batches_of_idle_ranks(dataset):
    last = dataset.windows[-1:]
    batches = [list(dataset.batches(last, 10_000, rank, 3)) for rank in range(3)]
    assert [[b.batch_size for b in each] for each in batches] == [[last[0].num_samples], [0], [0]]
    empty = batches[2][0]
    assert empty.uih.keys() == list(dataset.schema.uih_keys) and empty.uih.values().numel() == 0
    assert empty.candidates.stride() == 0


@pytest.mark.parametrize("consumed", [0, 1, 4, 9])
def test_resume_continues_the_order(dataset, consumed):
    whole = list(dataset.batches(dataset.windows, 16, 1, 2, shuffle_seed=2))
    rest = list(dataset.batches(dataset.windows, 16, 1, 2, shuffle_seed=2, start_sample=consumed * 32))
    assert flatten(rest) == flatten(whole[consumed:])


def test_resume_past_the_end_yields_nothing(dataset):
    assert list(dataset.batches([dataset.holdout], 8, start_sample=10**6)) == []


def test_drop_last_leaves_out_what_is_not_full(dataset):
    sizes = [b.batch_size for b in dataset.batches(dataset.windows, 16, drop_last=True)]
    total = sum(window.num_samples for window in dataset.windows)
    assert sizes == [16] * (total // 16)


def test_shuffling_stays_inside_a_window(dataset):
    plain = [s["id"] for s in everything(dataset)]
    mixed = [s["id"] for s in everything(dataset, shuffle_seed=1)]
    assert plain == sorted(plain) and mixed != plain and mixed != [s["id"] for s in everything(dataset, shuffle_seed=2)]
    at = 0
    for window in [*dataset.windows, dataset.holdout]:
        stop = at + window.num_samples
        assert sorted(mixed[at:stop]) == plain[at:stop]
        at = stop


def test_a_window_has_one_order_wherever_it_stands(dataset):
    alone = [i for b in dataset.batches(dataset.windows[2:3], 9, shuffle_seed=4) for i in b.sample_ids.tolist()]
    among = [i for b in dataset.batches(dataset.windows[1:4], 9, shuffle_seed=4) for i in b.sample_ids.tolist()]
    first = dataset.windows[1].num_samples
    assert among[first : first + len(alone)] == alone


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_workers_change_nothing(dataset, num_workers):
    threaded = make_dataset(random_events(1, count=700), random_attributes(1), make_rules(), num_workers=num_workers)
    assert everything(threaded, shuffle_seed=8) == everything(dataset, shuffle_seed=8)


def test_stopping_early_leaves_no_thread(dataset):
    import threading

    threaded = make_dataset(random_events(1), random_attributes(1), make_rules(), num_workers=2)
    batches = threaded.batches(threaded.windows, 4)
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]


def test_an_error_in_a_worker_reaches_the_consumer(monkeypatch):
    threaded = make_dataset(random_events(1), random_attributes(1), make_rules(), num_workers=2)
    monkeypatch.setattr(threaded.reader, "read", lambda ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(threaded.batches(threaded.windows, 4))


UNIQUE_ITEM = 99_999


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    which=st.integers(0, 10_000),
    strategy=st.sampled_from(["interleaved", "last_n"]),
    delete=st.booleans(),
)
def test_nothing_at_or_after_an_anchor_reaches_its_sample(seed, which, strategy, delete):
    """Change or delete every other event at or after an anchor's time, and its outcome: only the label changes."""
    rng = np.random.default_rng(seed)
    events, attributes = random_events(seed, count=150, users=4), random_attributes(seed)
    anchor = dataclasses.replace(events[which % len(events)], item=UNIQUE_ITEM, bits=1)
    events[which % len(events)] = anchor
    changed = []
    for event in events:
        if event is anchor:
            changed.append(dataclasses.replace(event, bits=4))
        elif event.time < anchor.time:
            changed.append(event)
        elif not delete:
            later = event.time + int(rng.integers(0, 50))
            changed.append(dataclasses.replace(event, time=later, bits=int(rng.choice([0, 1, 2, 4]))))
    # Ids are numbered over the whole data: an event of no action for each keeps the numbers where they are.
    keep = [dataclasses.replace(e, time=5, bits=0) for e in events]
    # … and samples of several times, so that few that are left can still be split.
    keep += [dataclasses.replace(e, time=6 + n % 5, bits=1) for n, e in enumerate(events[:20])]
    rules = make_rules(strategy=strategy, length=30, min_history=0)
    before, after = (_sample_of_unique_item(keep + found, attributes, rules) for found in (events, changed))
    assert (before.pop("item_action_weight"), after.pop("item_action_weight")) == ([1], [4])
    assert before == after


def _sample_of_unique_item(events, attributes, rules):
    dataset = make_dataset(events, attributes, rules)
    item = 1 + sorted({e.item for e in events}).index(UNIQUE_ITEM)
    found = [s["values"] for s in everything(dataset) if s["values"]["item_candidate_id"] == [item]]
    found = [values for values in found if values["item_query_time"] > [10]]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank 2"),
        ({"batch_size": 4, "start_sample": -1}, "start_sample -1"),
    ],
)
def test_impossible_batches_are_refused(dataset, arguments, message):
    with pytest.raises(UserError, match=message):
        next(iter(dataset.batches(dataset.windows, **arguments)))


@pytest.mark.parametrize(
    ("items", "context", "rows", "message"),
    [
        (("item_id", "label_id"), (), {"label_id": 5}, "item feature 'label_id'"),
        (("artist_id", "item_id"), (), {}, "first item feature is 'artist_id'"),
        (("item_id",), ("age",), {"age": 5}, "contextual feature 'age'"),
        (("item_id",), ("user_x_artist",), {"user_x_artist": 5}, "part of the cross 'user_x_artist' 'artist'"),
        (("item_id",), ("uid",), {"uid": 3}, r"table_rows\['uid'\] is 3"),
        (("item_id",), ("a_x_b_x_c_x_d",), {"a_x_b_x_c_x_d": 3}, "has 4 parts"),
    ],
)
def test_features_that_do_not_exist_are_refused(items, context, rows, message):
    cache = make_cache(random_events(0), random_attributes(0))
    schema = FeatureSchema(items, context, {**cache.vocab, **rows})
    with pytest.raises(UserError, match=message):
        BatchReader(cache, schema, HistoryOptions(12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 2}, "history_length 2"),
        ({"length": 9, "strategy": "newest"}, "strategy 'newest'"),
        ({"length": 9, "ties": "keep"}, "history_ties 'keep'"),
        ({"length": 9, "scan_limit": 0}, "scan_limit 0"),
    ],
)
def test_impossible_histories_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        HistoryOptions(**options)


def test_negative_workers_are_refused():
    with pytest.raises(UserError, match="num_workers -1"):
        make_dataset(random_events(0), random_attributes(0), make_rules(), num_workers=-1)


def test_context_columns_serve_as_item_features_too():
    """A history row carries the column's value at its event, the candidate the value at the anchor."""
    events = random_events(3)
    cache = make_cache(events, random_attributes(3))
    schema = FeatureSchema(("item_id", "mood"), ("mood_x_hour",), {**cache.vocab, "mood_x_hour": 10**6})
    batch = BatchReader(cache, schema, HistoryOptions(30, "last_n")).read(np.arange(cache.num_anchors))
    assert batch.candidates["item_candidate_mood"].values().tolist() == cache.context["mood"][cache.anchors].tolist()
    history = batch.uih.to_dict()
    at_event = {}
    for event in events:
        key = (event.user, event.time, 1 + (event.item - 1) // 2)
        at_event.setdefault(key, set()).add(event.mood - 9)
    for row, user in enumerate(batch.user_ids.tolist()):
        columns = (history[name].to_dense()[row].tolist() for name in ("action_timestamp", "item_id", "mood"))
        assert all(mood in at_event[user, time, item] for time, item, mood in zip(*columns, strict=True))


def test_a_mapped_cache_gives_the_same_batches(dataset, tmp_path):
    """Columns mapped read-only from files, as a prepared cache has them."""

    def mapped(name, column):
        np.save(tmp_path / name, column)
        return np.load(tmp_path / f"{name}.npy", mmap_mode="r")

    cache = dataset.cache
    single = ("user_offsets", "user_ids", "item", "time", "bits", "organic", "item_count", "anchors")
    changes = {name: mapped(name, getattr(cache, name)) for name in single}
    for kind in ("attributes", "context"):
        changes[kind] = {name: mapped(f"{kind}_{name}", column) for name, column in getattr(cache, kind).items()}
    reader = BatchReader(dataclasses.replace(cache, **changes), dataset.schema, dataset.reader.history)
    ids = np.arange(cache.num_anchors)
    assert flatten([reader.read(ids)]) == flatten([dataset.reader.read(ids)])


def _damaged(feature, event, rows):
    """A cache in which an event (or, of an attribute, an item) has an id past its vocabulary."""
    cache = make_cache(random_events(4), random_attributes(4))
    columns = {"item": np.array(cache.item), **{name: np.array(c) for name, c in cache.attributes.items()}}
    columns["mood"] = np.array(cache.context["mood"])
    name = "item" if feature == "item_id" else feature
    columns[name][event] = rows
    return dataclasses.replace(
        cache,
        item=columns["item"],
        attributes={name: columns[name] for name in cache.attributes},
        context={"mood": columns["mood"]},
    )


@pytest.mark.parametrize("feature", ["item_id", "artist_id", "album_id", "mood"])
@pytest.mark.parametrize("of", ["candidate", "history"])
def test_an_id_past_its_vocabulary_is_named(feature, of):
    """Checked as it is gathered, before it is looked up with: the tables of a GPU could not name it."""
    whole = make_cache(random_events(4), random_attributes(4))
    options = HistoryOptions(300, "last_n")
    schema = FeatureSchema(("item_id", "artist_id", "album_id", "mood"), (), dict(whole.vocab))
    sample = np.array([whole.num_anchors - 1])
    batch = BatchReader(whole, schema, options).read(sample)
    anchor = int(whole.anchors[sample[0]])
    event = anchor
    while of == "history" and (event == anchor or not whole.bits[event] or whole.time[event] == whole.time[anchor]):
        event -= 1
    place = int(whole.item[event]) if feature in whole.attributes else event
    assert batch.uih["item_id"].values().numel() > 0
    bad = whole.vocab[feature] + 3
    cache = _damaged(feature, place, bad)
    rows = whole.vocab[feature]
    message = rf"{feature!r} has the id {bad}, past its vocabulary of {rows}.*prepare it again"
    with pytest.raises(UserError, match=message):
        BatchReader(cache, schema, options).read(sample)


def test_a_contextual_id_past_its_vocabulary_is_named():
    whole = make_cache(random_events(4), random_attributes(4))
    cache = _damaged("mood", int(whole.anchors[0]), 10**6)
    schema = FeatureSchema(("item_id",), ("mood",), dict(whole.vocab))
    with pytest.raises(UserError, match="'mood' has the id 1000000"):
        BatchReader(cache, schema, HistoryOptions(12)).read(np.array([0]))


@pytest.mark.parametrize("word", ["user", "hour", "is_organic"])
def test_a_column_with_the_name_of_a_crosses_own_word_is_refused_in_a_cross(word):
    """Read as the word, the column would be left out without a sound; alone it is a feature like any other."""
    user, when, bits = np.arange(40) % 4, np.arange(40), np.resize([1, 4], 40)
    cache = cache_from_events(user, user, when, bits, min_history=1, context={word: user})
    for cross in (f"item_x_{word}", "item_x_item"):
        schema = FeatureSchema(("item_id",), ("uid", word, cross), {**cache.vocab, cross: 9})
        if word in cross:
            with pytest.raises(UserError, match=f"cross {cross!r}: {word!r} is a word that crosses have of their own"):
                BatchReader(cache, schema, HistoryOptions(4, "last_n"))
        else:
            BatchReader(cache, schema, HistoryOptions(4, "last_n"))
