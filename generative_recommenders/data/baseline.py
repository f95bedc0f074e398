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


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: the share of (positive, negative) pairs in the right order, ties counted half.

    ``labels`` [N] of 0 and 1; nan unless both classes occur. Source: the Mann-Whitney U statistic.

    Raises:
        ValueError: a score is not a finite number, so it has no place in the order.
    """
    if not np.isfinite(scores).all():
        raise ValueError("scores are not all finite numbers: they cannot be ranked")
    labels = np.asarray(labels, dtype=bool)
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, code, counts = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    return float((rank[code][labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))
