"""The attention op: its contract, its checks and the choice of backend."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

import torch

from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.attention.reference import hstu_mha_reference
from generative_recommenders.ops.checks import check_sequences
from generative_recommenders.ops.dispatch import Backend, always, choose_backend, why_not_triton

MAX_HEAD_WIDTH = 256


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
    check_attention_inputs(q, k, v, seq_offsets, max_seq_len, num_targets, max_attn_len, contextual_seq_len)
    _check_numbers(alpha, attn_norm)
    if choose_backend("attention", backend, backend_checks(q, q.shape[2], v.shape[2], q.dtype)) is Backend.TRITON:
        call = make_call(
            q, seq_offsets, max_seq_len, alpha, attn_norm, num_targets, causal, max_attn_len, contextual_seq_len
        )
        return _TritonAttention.apply(q, k, v, call)
    seq_offsets, num_targets = (None if t is None else t.to(q.device) for t in (seq_offsets, num_targets))
    return hstu_mha_reference(
        q, k, v, seq_offsets, alpha, attn_norm, num_targets, causal, max_attn_len, contextual_seq_len
    )


class _TritonAttention(torch.autograd.Function):
    """Keeps q, k and v; the backward recomputes the scores."""

    @staticmethod
    def forward(ctx, q, k, v, call: AttentionCall):
        from generative_recommenders.ops.attention.kernels import forward_into

        out = torch.empty(v.shape, device=v.device, dtype=v.dtype)
        forward_into(q, k, v, out, call)
        ctx.save_for_backward(q, k, v)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        from generative_recommenders.ops.attention.kernels import backward_into

        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (q, k, v))
        backward_into(dout.to(v.dtype), q, k, v, dq, dk, dv, ctx.call)
        return dq, dk, dv, None


def backend_checks(
    rows: torch.Tensor, d_qk: int, d_v: int, dtype: torch.dtype
) -> Mapping[Backend, Callable[[], str | None]]:
    """The op's backends, best first: on a CPU the interpreter is for debugging, so PyTorch leads there."""
    checks = {Backend.TRITON: lambda: _why_not_triton(rows, d_qk, d_v, dtype), Backend.PYTORCH: always}
    return checks if rows.device.type == "cuda" else dict(reversed(checks.items()))


def _why_not_triton(rows: torch.Tensor, d_qk: int, d_v: int, dtype: torch.dtype) -> str | None:
    reason = why_not_triton(rows, rows.new_empty(0, dtype=dtype))  # under autocast not the rows' own dtype
    if reason is None and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reason = f"dtype {dtype} has no kernel: use float32, float16 or bfloat16"
    if reason is None and max(d_qk, d_v) > MAX_HEAD_WIDTH:
        reason = f"d_qk={d_qk}, d_v={d_v}: kernels go up to {MAX_HEAD_WIDTH} per head"
    return reason


def make_call(
    rows: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    attn_norm: float | torch.Tensor,
    num_targets: torch.Tensor | None,
    causal: bool,
    max_attn_len: int,
    contextual_seq_len: int,
) -> AttentionCall:
    """The kernels' view of a call, its small tensors contiguous and on the device of ``rows``."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(rows.device).contiguous()

    return AttentionCall(
        placed(seq_offsets),
        int(max_seq_len),
        float(alpha),
        placed(attn_norm) if isinstance(attn_norm, torch.Tensor) else float(attn_norm),
        None if num_targets is None else placed(num_targets),
        bool(causal),
        int(max_attn_len),
        int(contextual_seq_len),
    )


def make_row_call(
    x, heads, d_qk, d_v, seq_offsets, max_seq_len, alpha, attn_norm, num_targets, causal, max_attn_len,
    contextual_seq_len,
) -> AttentionCall:  # fmt: skip
    """Check and make the call of an attention whose q, k and v will be made from the rows of x [T, D]."""
    q = x[:, :1, None].expand(-1, heads, d_qk)
    v = x[:, :1, None].expand(-1, heads, d_v)
    check_attention_inputs(q, q, v, seq_offsets, max_seq_len, num_targets, max_attn_len, contextual_seq_len)
    _check_numbers(alpha, attn_norm)
    return make_call(
        x, seq_offsets, max_seq_len, alpha, attn_norm, num_targets, causal, max_attn_len, contextual_seq_len
    )


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
