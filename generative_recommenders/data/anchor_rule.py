"""Which events are anchors, the events that samples predict.

An anchor is a listen with a known outcome (``bits`` is 1 or 4) that has at least ``min_history`` events of its
user, of whatever kind, with a **strictly smaller** time. Counting strictly smaller times makes the set of samples
independent of anything that happens at or after an anchor, and equal for both rules of ``history_ties``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from generative_recommenders.data.schema import LISTEN_PLUS, SKIP


def find_anchors(user_offsets: np.ndarray, time: np.ndarray, bits: np.ndarray, min_history: int) -> np.ndarray:
    """Event numbers of the anchors (module docstring), ascending by (time, user, position); u32 or int64."""
    eligible = eligible_events(user_offsets, time, bits, min_history)
    anchors = eligible[np.argsort(time[eligible], kind="stable")]
    return anchors.astype(anchor_type(len(time)))


def eligible_events(user_offsets: np.ndarray, time: np.ndarray, bits: np.ndarray, min_history: int) -> np.ndarray:
    """Ascending int64 event numbers of the anchors among the events of some users, by user and position."""
    users = np.repeat(threshold_of_users(user_offsets, time, min_history), np.diff(user_offsets))
    return np.flatnonzero((time > users) & ((bits == LISTEN_PLUS) | (bits == SKIP)))


def threshold_of_users(user_offsets: np.ndarray, time: np.ndarray, min_history: int) -> np.ndarray:
    """int64 [U]: an event has min_history strictly earlier ones of its user exactly if its time is larger than this."""
    if min_history == 0:
        return np.full(len(user_offsets) - 1, -1, np.int64)
    threshold = np.full(len(user_offsets) - 1, 2**32, np.int64)
    enough = np.diff(user_offsets) > min_history
    threshold[enough] = time[user_offsets[:-1][enough] + min_history - 1]
    return threshold


def user_chunks(user_offsets: np.ndarray, events: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of runs of whole users with at most ``events`` events each, or one user with more."""
    first, users = 0, len(user_offsets) - 1
    while first < users:
        last = int(np.searchsorted(user_offsets, user_offsets[first] + events, side="right")) - 1
        last = min(max(last, first + 1), users)
        yield first, last
        first = last


def anchor_type(num_events: int) -> type:
    """Smallest of u32 and int64 that numbers this many events."""
    return np.uint32 if num_events <= 2**32 else np.int64
