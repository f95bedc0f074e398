"""The backends of attention, and the one place that imports its kernels."""

from __future__ import annotations

import functools

import torch

from generative_recommenders.ops.attention.call import AttentionCall, AttentionShape
from generative_recommenders.ops.attention.reference import hstu_mha_reference
from generative_recommenders.ops.dispatch import Backend, Implementation, Op, never, why_not_triton

MAX_HEAD_WIDTH = 256


@functools.cache
def kernels():
    """The launches; imported on first use, since Triton is optional."""
    from generative_recommenders.ops.attention import launch

    return launch


def _why_not_triton(call: AttentionShape) -> str | None:
    # Under autocast products do not run in the rows' own dtype.
    reason = why_not_triton(call.device, call.product_dtype, call.dtype)
    if reason is None and max(call.d_qk, call.d_v) > MAX_HEAD_WIDTH:
        reason = f"d_qk={call.d_qk}, d_v={call.d_v}: kernels go up to {MAX_HEAD_WIDTH} per head"
    return reason


def _triton_forward(q, k, v, call: AttentionCall) -> torch.Tensor:
    out = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    kernels().forward_into(q, k, v, out, call)
    return out


def _triton_backward(dout, q, k, v, call: AttentionCall) -> tuple[torch.Tensor, ...]:
    dq, dk, dv = (torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (q, k, v))
    kernels().backward_into(dout.to(v.dtype), q, k, v, dq, dk, dv, call)
    return dq, dk, dv


def _pytorch_forward(q, k, v, call: AttentionCall) -> torch.Tensor:
    return hstu_mha_reference(
        q, k, v, call.seq_offsets, call.alpha, call.attn_norm, call.num_targets, call.causal, call.max_attn_len,
        call.contextual_seq_len,
    )  # fmt: skip


#: ``forward(q, k, v, call) -> out``, ``backward(dout, q, k, v, call) -> (dq, dk, dv)``.
ATTENTION = Op(
    "attention",
    {
        Backend.TRITON: Implementation(_why_not_triton, _triton_forward, _triton_backward),
        Backend.PYTORCH: Implementation(never, _pytorch_forward),
    },
)
