"""Whether the columns of an event cache fit together; reads everything, in pieces, so that size does not matter."""

from __future__ import annotations

import itertools

import numpy as np

from generative_recommenders.data.anchor_rule import anchor_type, eligible_events, threshold_of_users, user_chunks
from generative_recommenders.data.cache_columns import COLUMN_TYPES, CacheColumns
from generative_recommenders.data.schema import LISTEN_PLUS, SKIP
from generative_recommenders.errors import UserError

#: Events looked at in one go.
PIECE = 2**22


def check_shapes(cache: CacheColumns) -> None:
    events, items = cache.num_events, len(cache.item_count)
    expected = {"time": events, "bits": events, "organic": events, "user_offsets": cache.num_users + 1}
    found = {name: getattr(cache, name) for name in COLUMN_TYPES}
    for kind, columns, length in (("attributes", cache.attributes, items), ("context", cache.context, events)):
        for name, column in columns.items():
            found[f"{kind}[{name!r}]"], expected[f"{kind}[{name!r}]"] = column, length
            if name not in cache.vocab:
                raise UserError(f"{cache.name}: {kind} {name!r} has no vocabulary size")
    for name, column in found.items():
        if column.ndim != 1 or len(column) != expected.get(name, len(column)):
            raise UserError(f"{cache.name}: column {name} has shape {column.shape}, expected ({expected.get(name)},)")
        wanted = COLUMN_TYPES.get(name, np.uint32) or anchor_type(events)
        if column.dtype != wanted:
            raise UserError(f"{cache.name}: column {name} has type {column.dtype}, expected {np.dtype(wanted)}")
    if cache.vocab.get("item_id") != items or cache.vocab.get("uid") != cache.num_users + 1:
        raise UserError(f"{cache.name}: vocab {dict(cache.vocab)} does not fit {items} items, {cache.num_users} users")
    if cache.min_history < 0:
        raise UserError(f"{cache.name}: min_history is {cache.min_history}, expected 0 or more")


def check_values(cache: CacheColumns) -> None:
    """Offsets, ids within their vocabularies, order of events and anchors; ``UserError`` names the first fault."""
    offsets = cache.user_offsets
    least = 0 if cache.generations else 1  # an extension also knows users without events
    if offsets[0] != 0 or offsets[-1] != cache.num_events or (np.diff(offsets) < least).any():
        raise UserError(f"{cache.name}: user_offsets do not ascend from 0 to {cache.num_events} events")
    _check_user_ids(cache)
    limits = {"item": (cache.item, cache.vocab["item_id"]), "organic": (cache.organic, 2)}
    limits |= {name: (column, cache.vocab[name]) for name, column in {**cache.attributes, **cache.context}.items()}
    for name, (column, rows) in limits.items():
        for start in range(0, len(column), PIECE):
            largest = column[start : start + PIECE].max()
            if largest >= rows:
                raise UserError(f"{cache.name}: column {name} holds {largest}, past its vocabulary of {rows}")
    count = np.zeros(len(cache.item_count), np.int64)
    eligible = 0
    for first, last in user_chunks(offsets, PIECE):
        eligible += _check_users(cache, first, last)
        count += np.bincount(cache.item[offsets[first] : offsets[last]], minlength=len(count))
    if not np.array_equal(count, cache.item_count):
        raise UserError(f"{cache.name}: item_count is not the number of events per item")
    _check_anchors(cache, eligible)


def _check_user_ids(cache: CacheColumns) -> None:
    """All different, and ascending within each generation."""
    ends = [*cache.generations.get("uid", []), cache.num_users]
    for first, last in itertools.pairwise([0, *ends]):
        if (np.diff(cache.user_ids[first:last]) <= 0).any():
            raise UserError(f"{cache.name}: user_ids do not ascend")
    if len(ends) > 1 and len(np.unique(cache.user_ids)) != cache.num_users:
        raise UserError(f"{cache.name}: user_ids hold a user twice")


def _check_users(cache: CacheColumns, first: int, last: int) -> int:
    """Check bits and order of the users' events; returns how many are eligible as anchors."""
    start, stop = int(cache.user_offsets[first]), int(cache.user_offsets[last])
    offsets = cache.user_offsets[first : last + 1] - start
    time, bits = cache.time[start:stop], cache.bits[start:stop]
    if not np.isin(bits, (0, 1, 2, 4)).all():
        raise UserError(f"{cache.name}: bits must be 0, 1, 2 or 4")
    falls = np.flatnonzero(time[1:] < time[:-1]) + 1
    if not np.isin(falls, offsets).all():
        raise UserError(f"{cache.name}: a user's events are not in time order")
    return len(eligible_events(offsets, time, bits, cache.min_history))


def _check_anchors(cache: CacheColumns, eligible: int) -> None:
    """As many anchors as eligible events, each eligible, strictly ascending by (time, event): so all of them, once."""
    fault = UserError(f"{cache.name}: anchors are not the eligible listens in time order")
    if len(cache.anchors) != eligible:
        raise fault
    threshold = threshold_of_users(cache.user_offsets, cache.time, cache.min_history)
    for start in range(0, len(cache.anchors), PIECE):
        # One anchor of overlap, so that order is checked across pieces.
        events = cache.anchors[max(start - 1, 0) : start + PIECE].astype(np.int64)
        if events.min() < 0 or events.max() >= cache.num_events:
            raise fault
        time, bits = cache.time[events].astype(np.int64), cache.bits[events]
        ascending = (time[1:] > time[:-1]) | ((time[1:] == time[:-1]) & (events[1:] > events[:-1]))
        allowed = ((bits == LISTEN_PLUS) | (bits == SKIP)) & (time > threshold[cache.user_of(events)])
        if not (ascending.all() and allowed.all()):
            raise fault
