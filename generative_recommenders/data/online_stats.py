"""Running statistics of users and items as features: what was known just before each event, in buckets.

Every value is counted over events with a strictly smaller time, so an event's own outcome, and anything that happens
at the same time or later, cannot move it. Bucket edges are constants: they do not look at the data either. Bucket ids
start at 1 (0 is the reserved unknown id).

Names, for user u and item i of the event (k = 5 shrinks a mean over few events towards the running mean of all events):

- ``user_mean``, ``item_mean``: shrunk mean of the label
- ``user_count``, ``item_count``: events so far, on a logarithmic scale
- ``user_recent``: mean of the label over the user's newest 10 events, shrunk with k = 2
- ``user_lean``: how the user differs from the items rated: shrunk mean of label - item_mean, each at its own time
- ``item_lean``: the same of an item against its users: shrunk mean of label - user_mean
"""

from __future__ import annotations

import collections

import numpy as np

from generative_recommenders.data.cache import EventCache

BUCKETS = 32
COUNT_BUCKETS = 24
RECENT = 10
SHRINKAGE = 5.0
RECENT_SHRINKAGE = 2.0

MEANS = ("user_mean", "item_mean", "user_recent")
LEANS = ("user_lean", "item_lean")
COUNTS = ("user_count", "item_count")


def online_columns(cache: EventCache, labels: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Bucketed statistics of every event: name → u32 [E], and name → rows of its id space.

    ``labels`` [E]: 0 or 1 per event of the cache. Plain Python over the events in time order (about 10 µs an event).
    """
    raw = _online_values(cache, labels)
    columns = {name: _linear(raw[name], 0.0, 1.0) for name in MEANS}
    columns |= {name: _linear(raw[name], -0.5, 0.5) for name in LEANS}
    columns |= {name: _logarithmic(raw[name]) for name in COUNTS}
    rows = {name: 1 + (COUNT_BUCKETS if name in COUNTS else BUCKETS) for name in columns}
    return columns, rows


class _Running:
    """Sums of one user or item."""

    __slots__ = ("count", "label", "lean", "recent")

    def __init__(self) -> None:
        self.count, self.label, self.lean = 0, 0.0, 0.0
        self.recent: collections.deque[float] = collections.deque(maxlen=RECENT)

    def mean(self, prior: float) -> float:
        return (self.label + SHRINKAGE * prior) / (self.count + SHRINKAGE)

    def shrunk_lean(self) -> float:
        return self.lean / (self.count + SHRINKAGE)

    def recent_mean(self, prior: float) -> float:
        return (sum(self.recent) + RECENT_SHRINKAGE * prior) / (len(self.recent) + RECENT_SHRINKAGE)

    def add(self, label: float, expected: float) -> None:
        self.count += 1
        self.label += label
        self.lean += label - expected
        self.recent.append(label)


def _online_values(cache: EventCache, labels: np.ndarray) -> dict[str, np.ndarray]:
    users = cache.user_of(np.arange(cache.num_events)).tolist()
    items, times, labels = cache.item.tolist(), cache.time.tolist(), np.asarray(labels, float).tolist()
    values = {name: np.empty(cache.num_events) for name in MEANS + LEANS + COUNTS}
    state_of_user, state_of_item = collections.defaultdict(_Running), collections.defaultdict(_Running)
    total, waiting = _Running(), []
    for event in np.argsort(cache.time, kind="stable").tolist():
        if waiting and times[waiting[-1][0]] != times[event]:
            _absorb(waiting, users, items, labels, state_of_user, state_of_item, total)
        prior = total.label / total.count if total.count else 0.5
        user, item = state_of_user[users[event]], state_of_item[items[event]]
        means = user.mean(prior), item.mean(prior)
        values["user_mean"][event], values["item_mean"][event] = means
        values["user_recent"][event] = user.recent_mean(prior)
        values["user_lean"][event], values["item_lean"][event] = user.shrunk_lean(), item.shrunk_lean()
        values["user_count"][event], values["item_count"][event] = user.count, item.count
        waiting.append((event, *means))
    return values


def _absorb(waiting, users, items, labels, state_of_user, state_of_item, total) -> None:
    """Count the events of one time, now that a later time is reached."""
    for event, user_mean, item_mean in waiting:
        state_of_user[users[event]].add(labels[event], item_mean)
        state_of_item[items[event]].add(labels[event], user_mean)
        total.add(labels[event], 0.0)
    waiting.clear()


def _linear(values: np.ndarray, low: float, high: float) -> np.ndarray:
    bucket = np.floor((values - low) / (high - low) * BUCKETS)
    return (1 + np.clip(bucket, 0, BUCKETS - 1)).astype(np.uint32)


def _logarithmic(counts: np.ndarray) -> np.ndarray:
    """Two buckets per doubling: 0 → 1, 1 → 2, 2 → 4, 4 → 6, …"""
    bucket = np.floor(2 * np.log2(counts + 1))
    return (1 + np.clip(bucket, 0, COUNT_BUCKETS - 1)).astype(np.uint32)
