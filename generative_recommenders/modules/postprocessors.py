"""What happens to a candidate's row after the last layer: the user's embedding for this candidate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from generative_recommenders.modules.layers import LayerNorm, init_linear

L2_NORM_EPS = 1e-6
#: (unit in seconds, units per period): hour of the day, day of the week.
TIME_PERIODS = ((3600, 24), (86_400, 7))


class LayerNormPostprocessor(nn.Module):
    """LayerNorm over the embedding."""

    def __init__(self, embedding_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(embedding_dim, eps=eps)

    def forward(self, x: torch.Tensor, timestamps: torch.Tensor) -> torch.Tensor:
        """x ``[C, D]``; timestamps unused → ``[C, D]``."""
        return self.layer_norm(x)


class L2NormPostprocessor(nn.Module):
    """Divide by the Euclidean length (not below 1e-6); no parameters."""

    def forward(self, x: torch.Tensor, timestamps: torch.Tensor) -> torch.Tensor:
        """x ``[C, D]``; timestamps unused → ``[C, D]`` of unit length."""
        return F.normalize(x, dim=-1, eps=L2_NORM_EPS)


class TimestampPostprocessor(nn.Module):
    """Appends cos and sin of the hour of the day and the day of the week, then Linear and LayerNorm.

    Args:
        embedding_dim: D.
        full_turn: the angle of one period. 2π; the public model uses 2 · 3.14, which parity with its weights needs.
        eps: of the LayerNorm.
    """

    def __init__(self, embedding_dim: int, full_turn: float = 2 * math.pi, eps: float = 1e-5) -> None:
        super().__init__()
        self.full_turn = full_turn
        self.time_feature_combiner = init_linear(nn.Linear(embedding_dim + 2 * len(TIME_PERIODS), embedding_dim))
        self.layer_norm = LayerNorm(embedding_dim, eps=eps)

    def forward(self, x: torch.Tensor, timestamps: torch.Tensor) -> torch.Tensor:
        """x ``[C, D]``, timestamps int64 seconds ``[C]`` → ``[C, D]``."""
        features = self.time_features(timestamps).to(x.dtype)
        return self.layer_norm(self.time_feature_combiner(torch.cat([x, features], dim=1)))

    def time_features(self, timestamps: torch.Tensor) -> torch.Tensor:
        """int64 seconds ``[C]`` → fp32 ``[C, 4]``: cos, sin of the hour, cos, sin of the day.

        The phase is a whole number of units modulo the period, taken before any float is involved.
        """
        columns = []
        for unit, count in TIME_PERIODS:
            phase = timestamps.div(unit, rounding_mode="floor").remainder(count)
            angle = phase.float() / count * self.full_turn
            columns += [torch.cos(angle), torch.sin(angle)]
        return torch.stack(columns, dim=1)


def make_postprocessor(name: str, embedding_dim: int, full_turn: float = 2 * math.pi) -> nn.Module:
    """``"timestamp"``, ``"layer_norm"`` or ``"l2_norm"``; another name raises ``ValueError``."""
    if name == "timestamp":
        return TimestampPostprocessor(embedding_dim, full_turn)
    if name == "layer_norm":
        return LayerNormPostprocessor(embedding_dim)
    if name == "l2_norm":
        return L2NormPostprocessor()
    raise ValueError(f"postprocessor={name!r} is not known: use timestamp, layer_norm or l2_norm")
