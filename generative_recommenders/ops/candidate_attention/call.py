"""What calls of candidate attention are made of beside their rows and parameters."""

from __future__ import annotations

import dataclasses

import torch

from generative_recommenders.ops.candidate_attention.rows import TargetSummary

COMPUTATIONS = ("absorbed", "materialised")
OPERAND_BYTES = 32 * 1024  # of D x columns; shared memory holds two forms of it beside the tiles of rows


@dataclasses.dataclass(frozen=True)
class CandidateShape:
    """What decides which backend serves a call: computation, device, dtype and width of x, H, and the counts."""

    computation: str
    device: torch.device
    dtype: torch.dtype
    width: int
    num_heads: int
    summary: TargetSummary


@dataclasses.dataclass(frozen=True)
class Sizes:
    """H, d_qk, d_v, the score factor, the LayerNorm's eps and the attention divisor (float, or fp32 tensor)."""

    num_heads: int
    attn_dim: int
    hidden_dim: int
    alpha: float
    eps: float
    attn_norm: float | torch.Tensor

    def columns(self) -> tuple[slice, slice, slice, slice]:
        """Columns of U, V, Q, K in the fused projection."""
        v, q = self.num_heads * self.hidden_dim, self.num_heads * self.attn_dim
        return slice(0, v), slice(v, 2 * v), slice(2 * v, 2 * v + q), slice(2 * v + q, 2 * v + 2 * q)


def operand_columns(width: int, dtype: torch.dtype, num_heads: int) -> tuple[int, int]:
    """Fewest columns that hold one candidate (both directions), and most that fit shared memory; powers of two."""
    power = lambda n: 1 << (n - 1).bit_length()  # noqa: E731
    return max(16, power(2 * num_heads)), OPERAND_BYTES // (max(16, power(width)) * dtype.itemsize)
