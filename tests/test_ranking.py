"""The AUC against its definition over pairs, and against another library's statistic."""

import math

import numpy as np
import pytest
import scipy.stats

from generative_recommenders.ranking import auc


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("seed", range(4))
def test_auc_is_the_mann_whitney_statistic_ties_included(seed, dtype):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 2, 200), rng.integers(0, 12, 200).astype(dtype)
    statistic = scipy.stats.mannwhitneyu(scores[labels == 1], scores[labels == 0]).statistic
    assert auc(labels, scores) == pytest.approx(statistic / (labels.sum() * (1 - labels).sum()), abs=1e-12)


def test_auc_needs_both_classes():
    assert math.isnan(auc([1, 1], [0.1, 0.2])) and math.isnan(auc([0.0], [0.1])) and math.isnan(auc([], []))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_without_a_place_in_the_order_are_refused(bad):
    with pytest.raises(ValueError, match="1 of 3 scores are not finite numbers"):
        auc([1, 0, 1], [0.2, bad, 0.1])
