"""Attention of the candidate rows alone: the front of a targets-only last layer.

``candidate_attention`` is the differentiable op; ``reference.py`` states the maths, ``absorbed.py`` and
``materialised.py`` compute it on Triton.
"""

from __future__ import annotations

import torch

from generative_recommenders.ops.candidate_attention import reference
from generative_recommenders.ops.candidate_attention.absorbed import Sizes, absorbed_attention, why_not_absorbed
from generative_recommenders.ops.candidate_attention.materialised import (
    materialised_attention,
    why_not_materialised,
)
from generative_recommenders.ops.candidate_attention.rows import CandidateRows, TargetSummary
from generative_recommenders.ops.checks import check_sequences
from generative_recommenders.ops.dispatch import (
    Backend,
    BackendUnavailable,
    always,
    choose_backend,
    parse_backend,
    why_not_triton,
)

__all__ = ["COMPUTATIONS", "CandidateRows", "TargetSummary", "candidate_attention", "why_not_computation"]

COMPUTATIONS = ("absorbed", "materialised")


def candidate_attention(
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    num_targets: torch.Tensor | CandidateRows,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    uvqk_weight: torch.Tensor,
    uvqk_bias: torch.Tensor,
    num_heads: int,
    attn_dim: int,
    hidden_dim: int,
    alpha: float,
    attn_norm: float | torch.Tensor,
    computation: str = "absorbed",
    backend: Backend | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U and attention of the candidate rows against the whole sequence: rows that see the history and themselves.

    Differentiable in x and the four parameters. History rows get their gradient through the keys and values; the
    candidate rows' own (residual, U, Q) is added to those rows alone, without a buffer of T rows.

    Args:
        x: ``[T, D]``, the rows of B sequences, one after the other.
        seq_offsets: int64 ``[B + 1]``.
        num_targets: int64 ``[B]``, candidates at the end of each sequence (any number, 0 too), or the batch's
            ``CandidateRows``. Reading the counts of a GPU tensor waits for the device; ``CandidateRows`` does not.
        norm_weight, norm_bias: ``[D]`` of the input LayerNorm. norm_eps: added to the variance.
        uvqk_weight: ``[D, H * (2 * hidden_dim + 2 * attn_dim)]``, columns U, V, Q, K. uvqk_bias: one per column. They
            may have another floating dtype than x; products run in x's.
        num_heads: H. attn_dim: d_qk. hidden_dim: d_v.
        alpha: factor of the scores. attn_norm: the divisor N, float or 0-d fp32 tensor on the device.
        computation: ``"absorbed"`` (one pass over x, no keys or values) or ``"materialised"``.
        backend: ``PYTORCH``, ``TRITON`` or ``None`` (environment, then the best that can serve).

    Returns:
        The candidates' rows of x ``[C, D]`` (for the residual), their U ``[C, H * d_v]`` before the SiLU, and their
        attention output ``[C, H * d_v]``.

    Raises:
        ValueError: sizes that do not fit, an unknown computation, or a backend that cannot serve the call; on a CPU
            also offsets and counts that do not fit (on a GPU they are asserted on the device).
    """
    _check(x, uvqk_weight, num_heads, attn_dim, hidden_dim, computation)
    check_sequences(seq_offsets, x.shape[0])
    if isinstance(num_targets, CandidateRows):
        candidates = num_targets
        candidates.check(seq_offsets)
    else:
        candidates = CandidateRows.of(seq_offsets, num_targets)
    checks = _checks(computation, x, num_heads, candidates.summary)
    if choose_backend("candidate_attention", backend, checks) is Backend.PYTORCH:
        parameters = [p.to(x.dtype) for p in (norm_weight, norm_bias, uvqk_weight, uvqk_bias)]
        rest = (num_heads, attn_dim, hidden_dim, alpha, attn_norm, computation)
        return reference.candidate_attention(
            x, seq_offsets, candidates, *parameters[:2], norm_eps, *parameters[2:], *rest
        )
    sizes = Sizes(num_heads, attn_dim, hidden_dim, alpha, norm_eps, attn_norm)
    compute = absorbed_attention if computation == "absorbed" else materialised_attention
    return compute(x, seq_offsets, candidates, norm_weight, norm_bias, uvqk_weight, uvqk_bias, sizes)


def why_not_computation(
    computation: str, x: torch.Tensor, num_heads: int, summary: TargetSummary, backend: Backend | str | None = None
) -> str | None:
    """Why a computation cannot serve such a batch without falling back to padded plain PyTorch on a GPU, or ``None``.

    Plain PyTorch serves every batch, but pads sequences: it counts only where it was asked for or on a CPU.
    """
    try:
        chosen = choose_backend("candidate_attention", backend, _checks(computation, x, num_heads, summary))
    except BackendUnavailable as exc:  # asked for by name, and cannot
        return str(exc)
    if chosen is Backend.TRITON or x.device.type != "cuda" or parse_backend(backend) is Backend.PYTORCH:
        return None
    return why_not_triton(x) or _why_not_kernels(computation, x, num_heads, summary)


def _checks(computation, x, num_heads, summary) -> dict:
    """Backends, best first, each with the check that names what it cannot serve."""
    triton = lambda: why_not_triton(x) or _why_not_kernels(computation, x, num_heads, summary)  # noqa: E731
    return {Backend.TRITON: triton, Backend.PYTORCH: always}


def _why_not_kernels(computation, x, num_heads, summary) -> str | None:
    if computation == "absorbed":
        return why_not_absorbed(x, num_heads)
    return why_not_materialised(x, summary)


def _check(x, uvqk_weight, num_heads, attn_dim, hidden_dim, computation) -> None:
    if computation not in COMPUTATIONS:
        raise ValueError(f"computation={computation!r} is not known: use {' or '.join(COMPUTATIONS)}")
    if x.dim() != 2:
        raise ValueError(f"x must be [T, D]: got {list(x.shape)}")
    wanted = (x.shape[1], 2 * num_heads * (attn_dim + hidden_dim))
    if tuple(uvqk_weight.shape) != wanted:
        raise ValueError(f"uvqk_weight must be {list(wanted)}: got {list(uvqk_weight.shape)}")
