"""Adds what a row's place and age say to its embedding."""

from __future__ import annotations

import math

import torch
from torch import nn

from generative_recommenders.ops.position import SequenceRows, add_timestamp_positional_embeddings


class PositionalEncoder(nn.Module):
    """``x · sqrt(D) + position embedding + time embedding``, see ``ops.position`` for the two indices.

    Args:
        embedding_dim: D.
        num_position_buckets: rows of the position table.
        num_time_buckets: last time bucket; the table has one row more.
        num_contextual: contextual rows at the start of every sequence.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_position_buckets: int = 8192,
        num_time_buckets: int = 2048,
        num_contextual: int = 0,
    ) -> None:
        super().__init__()
        self.num_contextual = num_contextual
        self.position_embedding = nn.Parameter(torch.empty(num_position_buckets, embedding_dim))
        self.time_embedding = nn.Parameter(torch.empty(num_time_buckets + 1, embedding_dim))
        for table in (self.position_embedding, self.time_embedding):
            bound = math.sqrt(1.0 / table.shape[0])
            nn.init.uniform_(table, -bound, bound)

    def forward(
        self, x: torch.Tensor, rows: SequenceRows, timestamps: torch.Tensor, num_targets: torch.Tensor
    ) -> torch.Tensor:
        """x ``[T, D]``, timestamps int64 ``[T]`` (0 for contextual rows), num_targets ``[B]`` → fp32 ``[T, D]``."""
        return add_timestamp_positional_embeddings(
            x, rows, timestamps, num_targets, self.position_embedding, self.time_embedding, self.num_contextual
        )
