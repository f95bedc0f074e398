"""The reference that a trained ranker must beat: how much users and items lean from the mean, counted online.

Small on purpose: plain Python over the events in time order. The model's features of the same kind are computed by
``online_stats.py``; this file shares nothing with it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

SHRINKAGE = 5.0


def online_baseline(
    users: Sequence[int], items: Sequence[int], labels: Sequence[int], times: Sequence[int]
) -> np.ndarray:
    """Scores float64 [E] of all events: lean of the user plus lean of the item, over events of strictly smaller time.

    The lean of a user after n events with s positives, at running mean m of all events: s + 5 m over n + 5, the mean
    shrunk towards m, minus m. That is (s - n m) / (n + 5); the same for an item.
    """
    seen: dict[str, dict[int, list[int]]] = {"user": defaultdict(lambda: [0, 0]), "item": defaultdict(lambda: [0, 0])}
    total = [0, 0]
    scores = np.zeros(len(times))
    order = sorted(range(len(times)), key=times.__getitem__)
    for _, events in itertools.groupby(order, key=times.__getitem__):
        group = list(events)
        mean = total[0] / total[1] if total[1] else 0.5
        for event in group:
            for counts in (seen["user"][users[event]], seen["item"][items[event]]):
                scores[event] += (counts[0] - counts[1] * mean) / (counts[1] + SHRINKAGE)
        for event in group:
            for counts in (seen["user"][users[event]], seen["item"][items[event]], total):
                counts[0] += labels[event]
                counts[1] += 1
    return scores
