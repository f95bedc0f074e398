"""The event cache in memory and on disk: order, anchors, windows, validation."""

import dataclasses
import json

import numpy as np
import pytest

from generative_recommenders.data.anchor_rule import anchor_type, find_anchors, user_chunks
from generative_recommenders.data.cache import EventCache, cache_from_events
from generative_recommenders.data.schema import FeatureSchema
from generative_recommenders.errors import UserError


def random_cache(seed, min_history=3, **options):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 300))
    columns = dict(
        user=rng.integers(0, 8, count) * 10,
        item=rng.integers(5, 30, count),
        time=rng.integers(0, 40, count),
        bits=rng.choice([0, 1, 2, 4], count),
        organic=rng.integers(0, 2, count),
    )
    return columns, cache_from_events(**columns, min_history=min_history, **options)


@pytest.mark.parametrize("seed", range(10))
def test_in_memory_cache_equals_plain_python(seed):
    attributes = {"artist_id": {item: item % 4 for item in range(5, 30, 2)}}
    columns, cache = random_cache(seed, min_history=seed % 4, attributes=attributes)
    rows = list(zip(*(columns[name].tolist() for name in ("user", "time", "item", "bits", "organic")), strict=True))
    rows.sort()
    users, items = sorted({row[0] for row in rows}), sorted({row[2] for row in rows})
    assert cache.user_ids.tolist() == users
    assert cache.time.tolist() == [row[1] for row in rows]
    assert cache.item.tolist() == [items.index(row[2]) + 1 for row in rows]
    assert cache.bits.tolist() == [row[3] for row in rows]
    assert cache.organic.tolist() == [row[4] for row in rows]
    assert cache.user_of(np.arange(len(rows))).tolist() == [users.index(row[0]) for row in rows]
    earlier = [sum(o[0] == row[0] and o[1] < row[1] for o in rows) for row in rows]
    anchors = [n for n, row in enumerate(rows) if row[3] in (1, 4) and earlier[n] >= cache.min_history]
    assert cache.anchors.tolist() == sorted(anchors, key=lambda n: (rows[n][1], n))
    assert cache.anchor_time.tolist() == sorted(rows[n][1] for n in anchors)
    known = sorted({item % 4 for item in items if item % 2})
    want = [0] + [known.index(item % 4) + 1 if item % 2 else 0 for item in items]
    assert cache.attributes["artist_id"].tolist() == want
    for start, end in ((0, 40), (3, 11), (7, 7), (9, 2), (50, 60)):
        lo, hi = cache.anchor_range(start, end)
        assert cache.anchors[lo:hi].tolist() == [n for n in cache.anchors.tolist() if start <= rows[n][1] < end]


def test_row_order_leaves_no_trace():
    columns, cache = random_cache(3, context={})
    order = np.random.default_rng(0).permutation(len(columns["user"]))
    again = cache_from_events(**{name: values[order] for name, values in columns.items()}, min_history=3)
    for name in ("item", "time", "bits", "organic", "anchors", "user_offsets"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(again, name))


def test_context_columns_are_numbered_from_one():
    cache = cache_from_events(
        np.array([1, 1, 2]), np.array([4, 4, 4]), np.array([5, 5, 0]), np.array([1, 1, 4]), min_history=0,
        context={"device": np.array([70, -3, 70])},
    )  # fmt: skip
    assert cache.context["device"].tolist() == [1, 2, 2] and cache.vocab["device"] == 3


def test_time_range_and_empty_anchor_set():
    _, cache = random_cache(4)
    assert cache.time_range() == (cache.anchor_time[0], cache.anchor_time[-1])
    none = cache_from_events(*(np.array([value]) for value in (1, 1, 1, 1)), min_history=1)
    assert none.num_anchors == 0 and none.anchor_range(0, 2**32) == (0, 0)
    with pytest.raises(UserError, match="min_history=1"):
        none.time_range()
    likes = cache_from_events(*(np.array([value] * 3) for value in (1, 1, 1, 2)), min_history=0)
    with pytest.raises(UserError, match="none of its events has a positive or negative outcome"):
        likes.time_range()


def test_event_numbers_take_the_smallest_type():
    assert anchor_type(2**32) is np.uint32 and anchor_type(2**32 + 1) is np.int64


def test_user_chunks_cover_all_users_once():
    offsets = np.cumsum([0, 3, 100, 1, 1, 1, 40, 2])
    for size in (1, 2, 50, 10_000):
        chunks = list(user_chunks(offsets, size))
        assert [first for first, _ in chunks] == [0] + [last for _, last in chunks[:-1]] and chunks[-1][1] == 7
        assert all(offsets[last] - offsets[first] <= size or last == first + 1 for first, last in chunks)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: {"time": c.time[::-1].copy()}, "time order"),
        (lambda c: {"item": c.item + np.uint32(500)}, "past its vocabulary"),
        (lambda c: {"bits": np.full_like(c.bits, 3)}, "bits"),
        (lambda c: {"anchors": c.anchors[::-1].copy()}, "anchors"),
        (lambda c: {"anchors": c.anchors[:-1]}, "anchors"),
        (lambda c: {"anchors": np.zeros_like(c.anchors)}, "anchors"),
        (lambda c: {"organic": c.organic.astype(np.int64)}, "type int64"),
        (lambda c: {"time": c.time[:-1]}, "shape"),
        (lambda c: {"user_ids": c.user_ids[::-1].copy()}, "user_ids"),
        (lambda c: {"vocab": {**c.vocab, "uid": 3}}, "vocab"),
        (lambda c: {"item_count": c.item_count + 1}, "item_count"),
        (lambda c: {"attributes": {"genre": np.zeros(len(c.item_count), np.uint32)}}, "no vocabulary"),
        (lambda c: {"min_history": c.min_history + 1}, "anchors"),
    ],
)
def test_validation_names_the_fault(change, word):
    _, cache = random_cache(5, min_history=2)
    with pytest.raises(UserError, match=word):
        dataclasses.replace(cache, **change(cache)).validate()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(time=np.array([-1])), "-1"),
        (dict(time=np.array([2**32])), str(2**32)),
        (dict(time=np.array([1.5])), "float64"),
        (dict(item=np.array([1, 2])), "shape"),
        ({name: np.array([], int) for name in ("user", "item", "time", "bits")}, "no events"),
    ],
)
def test_bad_events_in_memory(change, word):
    columns = {name: np.array([1]) for name in ("user", "item", "time", "bits")} | change
    with pytest.raises(UserError, match=word):
        cache_from_events(**columns, min_history=0)


def test_open_refuses_what_is_no_cache(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        EventCache.open(tmp_path / "none")
    (tmp_path / "COMPLETE").touch()
    with pytest.raises(UserError, match="manifest.json cannot be read"):
        EventCache.open(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(UserError, match="version 99"):
        EventCache.open(tmp_path)


def test_anchor_needs_strictly_earlier_events():
    offsets, time, bits = np.array([0, 4]), np.array([5, 5, 5, 6], np.uint32), np.array([1, 1, 4, 4], np.uint8)
    assert find_anchors(offsets, time, bits, 1).tolist() == [3]
    assert find_anchors(offsets, time, bits, 3).tolist() == [3]
    assert find_anchors(offsets, time, bits, 4).tolist() == []
    assert find_anchors(offsets, time, bits, 0).tolist() == [0, 1, 2, 3]


def test_schema_names_and_faults():
    rows = {"item_id": 3, "artist_id": 2, "uid": 4}
    schema = FeatureSchema(("item_id", "artist_id"), ("uid",), rows)
    assert schema.candidate_features == ("item_candidate_id", "item_candidate_artist_id")
    assert schema.uih_keys == ("uid", "item_id", "artist_id", "action_weight", "action_timestamp")
    assert schema.candidate_keys[-2:] == ("item_query_time", "item_action_weight")
    for items, context, tables, word in (
        ((), ("uid",), rows, "at least one item"),
        (("item_id", "uid"), ("uid",), rows, "differ"),
        (("item_id", "album_id"), (), rows, "album_id"),
        (("item_id",), (), {"item_id": 0}, "reserved row"),
    ):
        with pytest.raises(UserError, match=word):
            FeatureSchema(items, context, tables)
