"""The public function of candidate attention: its contract, its checks and its table of backends."""

from __future__ import annotations

import torch

from generative_recommenders.ops.attention import Projection, UvqkParameters
from generative_recommenders.ops.candidate_attention import reference
from generative_recommenders.ops.candidate_attention.absorbed import absorbed_attention
from generative_recommenders.ops.candidate_attention.backends import why_not_kernels
from generative_recommenders.ops.candidate_attention.call import COMPUTATIONS, CandidateShape, Sizes
from generative_recommenders.ops.candidate_attention.materialised import materialised_attention
from generative_recommenders.ops.candidate_attention.rows import CandidateRows, TargetSummary
from generative_recommenders.ops.checks import check_sequences
from generative_recommenders.ops.dispatch import Backend, BackendUnavailable, Implementation, Op, never, parse_backend


def candidate_attention(
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    num_targets: torch.Tensor | CandidateRows,
    parameters: UvqkParameters,
    projection: Projection,
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
        parameters: of norm and projection. They may have another floating dtype than x; products run in x's.
        projection: H, d_qk, d_v and the norm's eps; nothing is kept that its recompute options could spare.
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
    if computation not in COMPUTATIONS:
        raise ValueError(f"computation={computation!r} is not known: use {' or '.join(COMPUTATIONS)}")
    parameters = parameters.checked(x, projection.columns)
    check_sequences(seq_offsets, x.shape[0])
    if isinstance(num_targets, CandidateRows):
        candidates = num_targets
        candidates.check(seq_offsets)
    else:
        candidates = CandidateRows.of(seq_offsets, num_targets)
    shape = CandidateShape(computation, x.device, x.dtype, x.shape[1], projection.heads, candidates.summary)
    implementation = CANDIDATE_ATTENTION.backends[CANDIDATE_ATTENTION.choose(shape, backend)]
    sizes = Sizes(projection.heads, projection.d_qk, projection.d_v, alpha, projection.eps, attn_norm)
    return implementation.forward(x, seq_offsets, candidates, *parameters, sizes, computation)


def _on_kernels(*call):
    *arguments, computation = call
    return (absorbed_attention if computation == "absorbed" else materialised_attention)(*arguments)


#: ``forward(x, seq_offsets, candidates, four parameters, sizes, computation)``, differentiable.
CANDIDATE_ATTENTION = Op(
    "candidate_attention",
    {
        Backend.TRITON: Implementation(why_not_kernels, _on_kernels),
        Backend.PYTORCH: Implementation(never, reference.candidate_attention),
    },
)


def why_not_computation(
    computation: str, x: torch.Tensor, num_heads: int, summary: TargetSummary, backend: Backend | str | None = None
) -> str | None:
    """Why a computation cannot serve such a batch without falling back to padded plain PyTorch on a GPU, or ``None``.

    Plain PyTorch serves every batch, but pads sequences: it counts only where it was asked for or on a CPU.
    """
    shape = CandidateShape(computation, x.device, x.dtype, x.shape[1], num_heads, summary)
    try:
        chosen = CANDIDATE_ATTENTION.choose(shape, backend)
    except BackendUnavailable as exc:  # asked for by name, and cannot
        return str(exc)
    if chosen is Backend.TRITON or x.device.type != "cuda" or parse_backend(backend) is Backend.PYTORCH:
        return None
    return why_not_kernels(shape)
