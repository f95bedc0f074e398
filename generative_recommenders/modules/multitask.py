"""Prediction heads and losses: one head per task on ``user ⊙ item``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from generative_recommenders.modules.layers import SwishLayerNorm, init_linear

TASK_KINDS = ("binary", "regression")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """One thing to predict.

    Attributes:
        name: of the task, in losses and metrics.
        kind: ``"binary"`` (label 1 if ``label_bit`` is set in the label feature, else 0; both classes supervise) or
            ``"regression"`` (the label feature's value times ``label_scale``).
        label_feature: candidate feature that holds the label.
        label_bit: of a binary task.
        label_scale: of a regression task; label features are whole numbers, so a rating may stand there in hundredths.
        label_center: of a regression task, the prediction of an untrained head, about.
        loss_weight: factor of the task's mean loss.
    """

    name: str
    kind: str = "binary"
    label_feature: str = "item_action_weight"
    label_bit: int = 1
    label_scale: float = 1.0
    label_center: float = 0.0
    loss_weight: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in TASK_KINDS:
            raise ValueError(f"task {self.name!r}: kind={self.kind!r} is not known: use {' or '.join(TASK_KINDS)}")
        if self.label_bit < 1:
            raise ValueError(f"task {self.name!r}: label_bit={self.label_bit} must be at least 1")


@dataclasses.dataclass(frozen=True)
class MultitaskOutput:
    """Predictions and supervision of C candidates, all fp32.

    Attributes:
        predictions: ``[tasks, C]``, a probability for binary tasks, the value for regression.
        labels, weights: ``[tasks, C]``; ``None`` if the batch carries no labels.
        losses: task name → scalar (mean over the candidates times the task's weight; 0 for none); empty without labels.
    """

    predictions: torch.Tensor
    labels: torch.Tensor | None
    weights: torch.Tensor | None
    losses: dict[str, torch.Tensor]


class MultitaskHead(nn.Module):
    """Per task: Linear → SwishLayerNorm → Linear 1.

    Args:
        embedding_dim: D of user and item embeddings.
        tasks: at least one, with distinct names.
        hidden_dim: width of the hidden layer.
        backend: as ``SwishLayerNorm``.
    """

    def __init__(
        self, embedding_dim: int, tasks: Sequence[TaskConfig], hidden_dim: int = 512, backend: str | None = None
    ) -> None:
        super().__init__()
        names = [task.name for task in tasks]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"tasks must be given and have distinct names, got {names}")
        self.tasks = tuple(tasks)
        self.heads = nn.ModuleList(
            nn.Sequential(
                init_linear(nn.Linear(embedding_dim, hidden_dim)),
                SwishLayerNorm(hidden_dim, backend),
                init_linear(nn.Linear(hidden_dim, 1)),
            )
            for _ in self.tasks
        )

    def forward(
        self,
        user_embedding: torch.Tensor,
        item_embedding: torch.Tensor,
        label_values: Mapping[str, torch.Tensor] | None = None,
    ) -> MultitaskOutput:
        """User and item embeddings fp32 ``[C, D]``, label feature → int64 or float ``[C]`` → predictions, losses."""
        joint = user_embedding * item_embedding
        rows = torch.cat([head(joint) for head in self.heads], dim=1).t()
        logits = [
            row if task.kind == "binary" else row + task.label_center
            for task, row in zip(self.tasks, rows, strict=True)
        ]
        predictions = torch.stack(
            [torch.sigmoid(row) if task.kind == "binary" else row for task, row in zip(self.tasks, logits, strict=True)]
        )
        if label_values is None:
            return MultitaskOutput(predictions, None, None, {})
        labels = torch.stack([task_labels(task, label_values) for task in self.tasks])
        weights = torch.ones_like(labels)
        losses = {task.name: task_loss(task, logits[i], labels[i], weights[i]) for i, task in enumerate(self.tasks)}
        return MultitaskOutput(predictions, labels, weights, losses)


def task_labels(task: TaskConfig, label_values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The task's labels, fp32 ``[C]``."""
    value = label_values[task.label_feature]
    return ((value & task.label_bit) > 0).float() if task.kind == "binary" else value.float() * task.label_scale


def task_loss(task: TaskConfig, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean over the candidates times the task's weight; exactly 0 (with zero gradients) for no candidates.

    Binary: cross entropy of the logits. Regression: squared error.
    """
    if task.kind == "binary":
        each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    else:
        each = F.mse_loss(logits, labels, reduction="none")
    total = weights.sum()
    return (each * weights).sum() / torch.where(total > 0, total, torch.ones_like(total)) * task.loss_weight
