"""The AUC that data sets and the trainer share: of baselines, of generated data's best, and of every evaluation."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: the share of (positive, negative) pairs in the right order, ties counted half.

    ``labels`` [N] of 0 and 1, ``scores`` [N] on any scale; nan unless both classes occur. Ranks are added in float64.
    Source: the Mann-Whitney U statistic.

    Raises:
        ValueError: a score is not a finite number, so it has no place in the order.
    """
    scores, labels = np.asarray(scores), np.asarray(labels, dtype=bool)
    finite = np.isfinite(scores)
    if not finite.all():
        raise ValueError(
            f"{np.count_nonzero(~finite)} of {scores.size} scores are not finite numbers: they cannot be ranked"
        )
    positives = int(labels.sum())
    negatives = labels.size - positives
    if not positives or not negatives:
        return float("nan")
    _, code, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    return float((rank[code][labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))
