"""Which events form the history of a sample: compiled loops over the columns of an event cache.

A history is causal by construction: only events of the anchor's user that precede the anchor are looked at. Which
events precede is the tie rule: ``"exclude"`` takes events with a strictly smaller time, ``"order"`` everything before
the anchor in the cache's order (the public benchmark works by position).

Strategies, both over the newest ``scan_limit`` preceding events of any kind:

- ``interleaved``: the newest ``length // 3`` events of each pool (listen_plus, like, skip), merged in time order. A
  pool that the scan does not fill leaves its slots empty.
- ``last_n``: the newest ``length`` events of any pool.

Events with bits 0 enter no pool and no history.
"""

from __future__ import annotations

import numpy as np

from generative_recommenders.data.compiled import compiled
from generative_recommenders.errors import UserError

STRATEGIES = ("interleaved", "last_n")
TIE_RULES = ("exclude", "order")
SCAN_LIMIT = 20_000
#: A batch has room for so many rows per sample, used or not.
LONGEST_HISTORY = 2**20


def check_history_options(length: int, strategy: str, ties: str, scan_limit: int) -> None:
    """Raise ``UserError`` for a strategy, tie rule or size that does not exist."""
    if strategy not in STRATEGIES:
        raise UserError(f"history strategy {strategy!r} is unknown: choose one of {', '.join(STRATEGIES)}")
    if ties not in TIE_RULES:
        raise UserError(f"history_ties {ties!r} is unknown: choose one of {', '.join(TIE_RULES)}")
    least = 3 if strategy == "interleaved" else 1
    if length < least:
        raise UserError(f"history_length {length} is too small for {strategy!r}: give at least {least}")
    if length > LONGEST_HISTORY:
        raise UserError(f"history_length {length} is too large: give at most {LONGEST_HISTORY}")
    if scan_limit < 1:
        raise UserError(f"scan_limit {scan_limit} is too small: give at least 1")


def pick_history(
    anchors: np.ndarray,
    user_starts: np.ndarray,
    time: np.ndarray,
    bits: np.ndarray,
    length: int,
    strategy: str = "interleaved",
    ties: str = "exclude",
    scan_limit: int = SCAN_LIMIT,
) -> tuple[np.ndarray, np.ndarray]:
    """Event numbers of B histories.

    ``anchors`` int64 [B]: event numbers; ``user_starts`` int64 [B]: first event number of each anchor's user; ``time``
    u32 [E] and ``bits`` u8 [E]: the cache's columns. Returns ``picked`` int64 [B, slots] and ``counts`` int64 [B]: the
    history of sample b is ``picked[b, slots - counts[b]:]``, oldest first; what stands before it is not set.
    """
    pool_size = length // 3 if strategy == "interleaved" else length
    slots = 3 * pool_size if strategy == "interleaved" else length
    picked = np.empty((len(anchors), slots), np.int64)
    counts = np.empty(len(anchors), np.int64)
    kernel = _pick_interleaved if strategy == "interleaved" else _pick_last
    kernel(anchors, user_starts, time, bits, pool_size, ties == "exclude", scan_limit, picked, counts)
    return picked, counts


@compiled
def _newest_before(anchor, start, time, exclude):
    """The event number after the newest one that precedes the anchor."""
    end = anchor
    if exclude:
        while end > start and time[end - 1] >= time[anchor]:
            end -= 1
    return end


@compiled
def _pick_interleaved(anchors, starts, time, bits, pool_size, exclude, scan_limit, picked, counts):
    slots = picked.shape[1]
    for b in range(len(anchors)):
        end = _newest_before(anchors[b], starts[b], time, exclude)
        oldest = max(starts[b], end - scan_limit)
        plus, like, skip = pool_size, pool_size, pool_size
        at = slots
        event = end - 1
        while event >= oldest and at > 0:
            kind = bits[event]
            if kind == 1 and plus > 0:
                plus -= 1
            elif kind == 2 and like > 0:
                like -= 1
            elif kind == 4 and skip > 0:
                skip -= 1
            else:
                kind = 0
            if kind != 0:
                at -= 1
                picked[b, at] = event
            event -= 1
        counts[b] = slots - at


@compiled
def _pick_last(anchors, starts, time, bits, length, exclude, scan_limit, picked, counts):
    for b in range(len(anchors)):
        end = _newest_before(anchors[b], starts[b], time, exclude)
        oldest = max(starts[b], end - scan_limit)
        at = length
        event = end - 1
        while event >= oldest and at > 0:
            if bits[event] != 0:
                at -= 1
                picked[b, at] = event
            event -= 1
        counts[b] = length - at


@compiled
def gather_history(picked, counts, column, out, limit):
    """Write ``column[event]`` of every picked event, sample after sample, into ``out`` int64 [sum(counts)].

    Returns whether every value is below ``limit``. Differences are or-ed, so that their sign tells, which is
    cheaper than a comparison each.
    """
    slots = picked.shape[1]
    at, signs = 0, np.int64(0)
    last = np.int64(limit) - 1
    for b in range(len(counts)):
        for slot in range(slots - counts[b], slots):
            value = np.int64(column[picked[b, slot]])
            out[at] = value
            signs |= last - value
            at += 1
    return signs >= 0


@compiled
def look_up(table, ids, out):
    """``out[i] = table[ids[i]]``: the attributes of items, whose ids lie within the table."""
    for i in range(len(ids)):
        out[i] = table[ids[i]]
