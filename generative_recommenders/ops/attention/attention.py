"""The attention op: its contract, its checks and the choice of backend."""

from __future__ import annotations

import math
import operator

import torch

from generative_recommenders.ops.attention.backends import ATTENTION
from generative_recommenders.ops.attention.call import AttentionCall, AttentionShape
from generative_recommenders.ops.checks import check_sequences
from generative_recommenders.ops.dispatch import Backend, Implementation


def hstu_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    attn_norm: float | torch.Tensor,
    num_targets: torch.Tensor | None = None,
    causal: bool = True,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """HSTU attention over jagged sequences: Y = mask * SiLU(alpha * Q K^T) / attn_norm * V, differentiable in q, k, v.

    Args:
        q, k: [T, H, d_qk]; v: [T, H, d_v]. Rows of all sequences one after another; any row stride, so slices of one
            fused projection buffer are read in place.
        seq_offsets: int64 [B + 1], first row of each sequence, from 0 to T.
        max_seq_len: upper bound of the sequence lengths (a host integer; it sizes the launch and is never compiled in).
        alpha: factor of the scores, usually d_qk ** -0.5.
        attn_norm: the divisor N, a float or a 0-d tensor on the device.
        num_targets: int64 [B], candidates at the end of each sequence (they see the history and themselves, never each
            other), or None for none. A sequence holds its contextual prefix and its candidates side by side.
        causal: rows see smaller ids only; otherwise both ways.
        max_attn_len: sliding window in rows, 0 for none.
        contextual_seq_len: rows of the prefix that see everything before the candidates, 0 for none.
        backend: "TRITON" or "PYTORCH"; None takes HSTU_ATTENTION_BACKEND, HSTU_BACKEND or the fastest that can serve.

    Returns:
        [T, H, d_v], dtype of v.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit; a backend that cannot serve the call. Offsets and counts
            on a GPU are asserted there instead, without waiting: a device-side assertion says what does not fit.

    Source: Zhai et al. 2024, "Actions speak louder than words: trillion-parameter sequential transducers".
    """
    call = AttentionCall(
        seq_offsets, max_seq_len, alpha, attn_norm, num_targets, causal, max_attn_len, contextual_seq_len
    )
    return attend(q, k, v, call, backend)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, backend: Backend | str | None = None
) -> torch.Tensor:
    """``hstu_mha`` of a call that is made already."""
    call = checked_call(q, k, v, call)
    shape = AttentionShape(q.device, q.dtype, q.shape[2], v.shape[2], q.dtype)
    implementation = ATTENTION.backends[ATTENTION.choose(shape, backend)]
    if implementation.backward is None:
        return implementation.forward(q, k, v, call)
    return _Attention.apply(q, k, v, call, implementation)


class _Attention(torch.autograd.Function):
    """Keeps q, k and v; the backward recomputes the scores."""

    @staticmethod
    def forward(ctx, q, k, v, call: AttentionCall, implementation: Implementation):
        ctx.save_for_backward(q, k, v)
        ctx.call, ctx.implementation = call, implementation
        return implementation.forward(q, k, v, call)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return *ctx.implementation.backward(dout, *ctx.saved_tensors, ctx.call), None, None


def checked_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> AttentionCall:
    """The kernels' view of a call whose arguments fit; raises ``ValueError`` where one does not."""
    check_attention_inputs(
        q, k, v, call.seq_offsets, call.max_seq_len, call.num_targets, call.max_attn_len, call.contextual_seq_len
    )
    _check_numbers(call.alpha, call.attn_norm)
    return call.on(q.device)


def check_attention_inputs(q, k, v, seq_offsets, max_seq_len, num_targets, max_attn_len, contextual_seq_len) -> None:
    """Raise ``ValueError`` naming the first argument that does not fit; on a GPU values are asserted, not read."""
    if q.dim() != 3 or q.shape != k.shape:
        raise ValueError(f"q and k must both be [T, H, d_qk]: got {tuple(q.shape)} and {tuple(k.shape)}")
    if not q.is_floating_point():
        raise ValueError(f"q, k and v must be floating point: got {q.dtype}")
    if v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must be [T, H, d_v] with T, H = {tuple(q.shape[:2])}: got {tuple(v.shape)}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must share one dtype: got {q.dtype}, {k.dtype}, {v.dtype}; cast them")
    for name, value in (
        ("max_seq_len", max_seq_len),
        ("max_attn_len", max_attn_len),
        ("contextual_seq_len", contextual_seq_len),
    ):
        try:
            operator.index(value)
        except TypeError:
            raise ValueError(f"{name}={value!r} must be a whole number") from None
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative")
    check_sequences(seq_offsets, q.shape[0], max_seq_len, num_targets, contextual_seq_len)


def _check_numbers(alpha: float, attn_norm: float | torch.Tensor) -> None:
    """What is a number on the host must be one that scores can be multiplied with and divided by."""
    if not math.isfinite(alpha):
        raise ValueError(f"alpha={alpha} must be a finite number")
    if isinstance(attn_norm, torch.Tensor):
        if attn_norm.numel() != 1:
            raise ValueError(f"attn_norm must be one number: got a tensor {tuple(attn_norm.shape)}")
    elif not math.isfinite(attn_norm) or attn_norm == 0:
        raise ValueError(f"attn_norm={attn_norm} must be a finite number other than 0: it divides")
