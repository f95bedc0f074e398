"""AUC and its relatives against definitions written out, joined over ranks, one evaluation at a time."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from generative_recommenders.train.metrics import BinaryMetrics, RegressionMetrics, auc, grouped_auc, normalised_entropy


def pairs_auc(scores, labels):
    """The definition: share of positive-negative pairs in the right order, ties counting one half."""
    positives = [s for s, y in zip(scores, labels, strict=True) if y]
    negatives = [s for s, y in zip(scores, labels, strict=True) if not y]
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives]
    return sum(wins) / len(wins)


class Ranks:
    """A world whose other ranks' columns are given: ``concatenate`` is called per column in order."""

    def __init__(self, *others):
        self.columns = [iter(column) for column in zip(*others, strict=True)] if others else None
        self.others = others
        self.call = 0

    def concatenate(self, tensor):
        if not self.others:
            return tensor
        column = self.call % len(self.others[0])
        self.call += 1
        return torch.cat([tensor, *(other[column] for other in self.others)])


def columns(scores, labels, users=None):
    users = range(len(scores)) if users is None else users
    return torch.tensor(scores), torch.tensor(labels, dtype=torch.float32), torch.tensor(list(users))


def measure(*ranks):
    metrics = BinaryMetrics()
    metrics.update(*columns(*ranks[0]))
    return metrics.compute(Ranks(*(columns(*rank) for rank in ranks[1:])))


@pytest.mark.parametrize("seed", range(8))
def test_auc_counts_pairs_and_ties(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (60,), generator=generator) / 5
    labels = torch.randint(0, 2, (60,), generator=generator)
    assert auc(scores, labels) == pytest.approx(pairs_auc(scores.tolist(), labels.tolist()), abs=1e-12)


def test_ranks_are_joined_before_ranking():
    result = measure(([0.9, 0.8], [1, 1]), ([0.1, 0.2], [0, 0]))
    assert result.auc == 1.0
    assert result.samples == 4
    assert not result.one_class


def test_ties_give_one_half():
    assert measure(([0.5] * 4, [1, 0, 1, 0])).auc == 0.5


def test_scores_in_the_wrong_direction_give_the_mirror_image():
    assert measure(([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0])).auc == 0.0


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_a_documented_value_and_reaches_no_target(label):
    result = measure(([0.2, 0.7], [label, label]))
    assert (result.auc, result.gauc, result.ne) == (0.5, 0.5, 1.0)
    assert result.one_class
    assert not result.reaches(0.1)
    assert math.isfinite(result.calibration)


def test_a_second_evaluation_forgets_the_first():
    metrics = BinaryMetrics()
    metrics.update(*columns([0.9, 0.1], [1, 0]))
    assert metrics.compute(Ranks()).auc == 1.0
    metrics.update(*columns([0.9, 0.1, 0.5], [0, 1, 1]))
    second = metrics.compute(Ranks())
    assert second.auc == 0.0
    assert second.samples == 3


def test_every_one_of_many_samples_counts():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(3000, generator=generator), torch.randint(0, 2, (3000,), generator=generator)
    metrics = BinaryMetrics()
    for part in range(0, 3000, 250):
        users = torch.arange(part, part + 250)
        metrics.update(scores[part : part + 250], labels[part : part + 250], users)
    result = metrics.compute(Ranks())
    assert result.samples == 3000
    assert result.auc == pytest.approx(pairs_auc(scores.tolist(), labels.tolist()), abs=1e-12)


def test_no_sample_at_all_is_one_class():
    result = BinaryMetrics().compute(Ranks())
    assert result.samples == 0 and result.one_class


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        BinaryMetrics().update(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("seed", range(4))
def test_grouped_auc_is_the_weighted_mean_over_users_with_both_classes(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 5, (80,), generator=generator) / 4
    labels = torch.randint(0, 2, (80,), generator=generator)
    users = torch.randint(0, 12, (80,), generator=generator) * 1000
    total, weight = 0.0, 0
    for user in users.unique():
        mine = users == user
        if 0 < labels[mine].sum() < mine.sum():
            total += pairs_auc(scores[mine].tolist(), labels[mine].tolist()) * int(mine.sum())
            weight += int(mine.sum())
    assert grouped_auc(scores, labels, users) == pytest.approx(total / weight, abs=1e-12)


def test_normalised_entropy_of_the_base_rate_is_one():
    labels = torch.tensor([1, 0, 0, 0])
    assert normalised_entropy(torch.full((4,), 0.25).logit(), labels) == pytest.approx(1.0)
    assert normalised_entropy(40.0 * (2 * labels - 1), labels) < 1e-6


def test_accuracy_and_calibration():
    result = measure((torch.tensor([0.9, 0.6, 0.4, 0.1]).logit().tolist(), [1, 0, 0, 0]))
    assert result.accuracy == 0.75
    assert result.calibration == pytest.approx(2.0)
    assert result.positive_rate == 0.25


def of_logits(logits, labels):
    """The figures of [N] logits and labels by scipy, in float64: AUC by its U statistic, NE, accuracy, calibration."""
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, bool)
    u = scipy.stats.mannwhitneyu(logits[labels], logits[~labels]).statistic
    loss = -np.where(labels, scipy.special.log_expit(logits), scipy.special.log_expit(-logits)).mean()
    rate = labels.mean()
    entropy = scipy.special.entr([rate, 1 - rate]).sum()
    mean = scipy.special.expit(logits).mean()
    return u / labels.sum() / (~labels).sum(), loss / entropy, ((logits >= 0) == labels).mean(), mean / rate


@pytest.mark.parametrize("shift", [-80.0, -25.0, 0.0, 25.0, 80.0])
def test_sure_predictions_keep_their_order_and_their_loss(shift):
    """From a logit of 17 on every fp32 probability is 1, from -104 on 0: what is measured is the logit."""
    generator = torch.Generator().manual_seed(5)
    # Multiples of 1/64, so that fp32 holds every shifted logit exactly and each figure has one right value.
    logits = torch.randint(-200, 200, (500,), generator=generator) / 64
    labels = (torch.rand(500, generator=generator) < torch.sigmoid(logits)).float()
    users = torch.randint(0, 20, (500,), generator=generator)
    metrics = BinaryMetrics()
    metrics.update(logits, labels, users)
    before = metrics.compute(Ranks())
    metrics.update(logits + shift, labels, users)
    after = metrics.compute(Ranks())
    assert (after.auc, after.gauc) == (before.auc, before.gauc) and 0.7 < after.auc < 0.9 and 0.7 < after.gauc < 0.95
    figures = (after.auc, after.ne, after.accuracy, after.calibration)
    assert figures == pytest.approx(of_logits((logits + shift).tolist(), labels.tolist()), rel=1e-12)


def test_a_logit_just_below_zero_says_no():
    """The fp32 sigmoid of -1e-9 is 0.5."""
    assert measure(([-1e-9, 0.0], [0, 1])).accuracy == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_ranked(bad):
    scores, labels, users = columns([0.3, bad, 0.1], [1, 0, 1])
    for figure in (lambda: auc(scores, labels), lambda: grouped_auc(scores, labels, users)):
        with pytest.raises(ValueError, match="1 of 3 scores are not finite"):
            figure()
    with pytest.raises(ValueError, match="not finite"):
        measure(([0.3, 0.2], [1, 0]), ([bad], [1]))  # of another rank


def test_errors_of_values_over_all_ranks():
    generator = torch.Generator().manual_seed(3)
    parts = [tuple(torch.randn(n, generator=generator) * 2 + 3 for _ in range(2)) for n in (5, 0, 8)]
    metrics = RegressionMetrics()
    metrics.update(*parts[0], torch.zeros(5))
    result = metrics.compute(Ranks(*parts[1:]))
    said, true = (np.concatenate([part[i].numpy() for part in parts]).astype(np.float64) for i in range(2))
    assert result.rmse == pytest.approx(np.sqrt(((said - true) ** 2).mean()), rel=1e-9)
    assert result.mae == pytest.approx(np.abs(said - true).mean(), rel=1e-9)
    assert result.label_std == pytest.approx(true.std(), rel=1e-9) and result.label_mean == pytest.approx(true.mean())
    assert result.samples == 13
    assert metrics.compute(Ranks()).samples == 0  # nothing is carried over
    with pytest.raises(ValueError, match="one length"):
        metrics.update(torch.zeros(2), torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_entropy_of_a_logit_that_is_no_number_is_an_error(bad):
    with pytest.raises(ValueError, match="1 of 2 scores are not finite"):
        normalised_entropy(torch.tensor([0.5, bad]), torch.tensor([1.0, 0.0]))
