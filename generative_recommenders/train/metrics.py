"""Metrics of binary predictions (AUC, GAUC, NE, accuracy, calibration) and of predicted values (RMSE, MAE).

All are exact over all samples and all ranks. They are taken from logits, in float64 where numbers are added: in fp32
every probability from a logit of 17 on is the same 1, and order and log loss would be lost with it.

A ``BinaryMetrics`` or ``RegressionMetrics`` object collects one evaluation on one rank; ``compute`` joins the ranks and
forgets the samples, so that no evaluation sees another's. Where all labels are equal AUC and GAUC are 0.5 and NE 1.0 by
definition, the result is marked ``one_class`` and never counts as reaching a target.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from generative_recommenders import ranking
from generative_recommenders.train.distributed import World

ONE_CLASS_AUC = 0.5
ONE_CLASS_NE = 1.0


@dataclasses.dataclass(frozen=True)
class BinaryResult:
    """One task's figures over one evaluation."""

    auc: float
    gauc: float
    ne: float
    accuracy: float
    calibration: float
    samples: int
    positive_rate: float
    one_class: bool

    def reaches(self, target: float) -> bool:
        """Whether AUC is at least ``target``; an evaluation of one class never is."""
        return not self.one_class and self.auc >= target


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, a tie counting one half.

    Args:
        scores: [N] float on the host, any monotone scale; logits rather than probabilities, which may have rounded to
            one number.
        labels: [N], 1 for positive, 0 for negative.

    Returns:
        The Mann-Whitney statistic over n1 · n0, or ``ONE_CLASS_AUC`` when there is one class only.

    Raises:
        ValueError: a score is not a finite number, so it has no place in the order.
    """
    found = ranking.auc(labels.numpy(), scores.numpy())
    return ONE_CLASS_AUC if math.isnan(found) else found


def grouped_auc(scores: torch.Tensor, labels: torch.Tensor, groups: torch.Tensor) -> float:
    """Mean of the groups' AUCs weighted by their samples, over groups with both classes (``ONE_CLASS_AUC`` if none).

    Args:
        scores, labels, groups: [N]; ``groups`` are int64 user ids.

    Raises:
        ValueError: as ``auc``.
    """
    _check_finite(scores)
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    order = torch.argsort(scores, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    group, scores, labels = group[order], scores[order], labels[order].to(torch.float64)
    first = counts.cumsum(0) - counts
    # One rank over (group, score): pairs are unique values of a structured key, ranked inside their group.
    change = torch.ones(group.numel(), dtype=torch.bool)
    change[1:] = (group[1:] != group[:-1]) | (scores[1:] != scores[:-1])
    tie = change.cumsum(0) - 1
    tie_counts = torch.bincount(tie, minlength=int(change.sum()))
    tie_last = tie_counts.cumsum(0).to(torch.float64)
    ranks = (tie_last - (tie_counts.to(torch.float64) - 1) / 2)[tie] - first[group]
    positives = torch.zeros(counts.numel(), dtype=torch.float64).index_add_(0, group, labels)
    rank_sums = torch.zeros_like(positives).index_add_(0, group, ranks * labels)
    pairs = positives * (counts - positives)
    both = pairs > 0
    if not both.any():
        return ONE_CLASS_AUC
    each = (rank_sums - positives * (positives + 1) / 2)[both] / pairs[both]
    weight = counts[both].to(torch.float64)
    return ((each * weight).sum() / weight.sum()).item()


def _check_finite(scores: torch.Tensor) -> None:
    if not scores.isfinite().all():
        raise ValueError(f"{int((~scores.isfinite()).sum())} of {scores.numel()} scores are not finite numbers")


def normalised_entropy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean log loss over the entropy of the label's base rate (He et al. 2014); ``ONE_CLASS_NE`` for one class.

    ``logits``, ``labels``: [N]. The log loss is that of the logits as they are, however sure they are.

    Raises:
        ValueError: as ``auc``.
    """
    _check_finite(logits)
    x, y = logits.to(torch.float64), labels.to(torch.float64)
    rate = y.mean().item()
    if rate in (0.0, 1.0):
        return ONE_CLASS_NE
    loss = -(y * F.logsigmoid(x) + (1 - y) * F.logsigmoid(-x)).mean().item()
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


class BinaryMetrics:
    """Collects one task's logits of one evaluation on this rank."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def update(self, logits: torch.Tensor, labels: torch.Tensor, users: torch.Tensor) -> None:
        """Add [n] logits, 0/1 labels and int64 user ids, on any device; lengths must agree (``ValueError``)."""
        if not (logits.shape == labels.shape == users.shape and logits.dim() == 1):
            shapes = f"{tuple(logits.shape)}, {tuple(labels.shape)}, {tuple(users.shape)}"
            raise ValueError(f"logits, labels and users must be one-dimensional of one length, got {shapes}")
        self._parts.append((logits.detach().float().cpu(), labels.detach().float().cpu(), users.cpu()))

    def compute(self, world: World) -> BinaryResult:
        """Figures over the samples of all ranks, equal on every rank; empties the collector. A collective call.

        Raises:
            ValueError: on every rank, a logit of any rank is not a finite number.
        """
        empty = (torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64))
        columns = list(zip(*(self._parts or [empty]), strict=True))
        self._parts = []
        logits, labels, users = (world.concatenate(torch.cat(column)) for column in columns)
        if logits.numel() == 0:
            return BinaryResult(ONE_CLASS_AUC, ONE_CLASS_AUC, ONE_CLASS_NE, 0.0, 1.0, 0, 0.0, one_class=True)
        rate = labels.mean(dtype=torch.float64).item()
        mean = torch.sigmoid(logits.to(torch.float64)).mean().item()
        return BinaryResult(
            auc=auc(logits, labels),
            gauc=grouped_auc(logits, labels, users),
            ne=normalised_entropy(logits, labels),
            accuracy=((logits >= 0) == (labels >= 0.5)).double().mean().item(),
            calibration=mean / rate if rate > 0 else 1.0,
            samples=logits.numel(),
            positive_rate=rate,
            one_class=rate in (0.0, 1.0),
        )


@dataclasses.dataclass(frozen=True)
class RegressionResult:
    """One regression task's figures over one evaluation; ``label_std`` is the RMSE of always saying the mean label."""

    rmse: float
    mae: float
    label_mean: float
    label_std: float
    samples: int


class RegressionMetrics:
    """Collects one regression task's predictions of one evaluation on this rank."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, predictions: torch.Tensor, labels: torch.Tensor, users: torch.Tensor) -> None:
        """Add [n] predicted and true values, on any device; users do not count. Lengths must agree (``ValueError``)."""
        if predictions.shape != labels.shape or predictions.dim() != 1:
            shapes = f"{tuple(predictions.shape)}, {tuple(labels.shape)}"
            raise ValueError(f"predictions and labels must be one-dimensional of one length, got {shapes}")
        self._parts.append((predictions.detach().float().cpu(), labels.detach().float().cpu()))

    def compute(self, world: World) -> RegressionResult:
        """Figures over the samples of all ranks, equal on every rank; empties the collector. A collective call."""
        columns = list(zip(*(self._parts or [(torch.empty(0), torch.empty(0))]), strict=True))
        self._parts = []
        predictions, labels = (world.concatenate(torch.cat(column)).double() for column in columns)
        if predictions.numel() == 0:
            return RegressionResult(0.0, 0.0, 0.0, 0.0, 0)
        error = predictions - labels
        return RegressionResult(
            rmse=error.square().mean().sqrt().item(),
            mae=error.abs().mean().item(),
            label_mean=labels.mean().item(),
            label_std=labels.std(correction=0).item(),
            samples=predictions.numel(),
        )
