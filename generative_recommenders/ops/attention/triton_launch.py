"""Launches of the plain Triton attention kernels; buffers are the caller's, strided views welcome."""

from __future__ import annotations

import torch
import triton

from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.attention.configs import LaunchConfig, launch_config
from generative_recommenders.ops.attention.triton_bwd import attention_backward_kv_kernel, attention_backward_q_kernel
from generative_recommenders.ops.attention.triton_fwd import attention_forward_kernel
from generative_recommenders.ops.dispatch import triton_interpreted


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _scalars(call: AttentionCall, blocks: int, heads: int) -> tuple:
    norm = call.attn_norm if isinstance(call.attn_norm, torch.Tensor) else float(call.attn_norm)
    return (
        call.seq_offsets,
        call.seq_offsets if call.num_targets is None else call.num_targets,
        norm,
        float(call.alpha),
        blocks,
        heads,
        call.max_attn_len,
        call.contextual_seq_len,
    )


def _constants(call: AttentionCall, q: torch.Tensor, v: torch.Tensor, config: LaunchConfig) -> dict:
    d_qk, d_v = q.shape[2], v.shape[2]
    fast = q.dtype != torch.float32 and torch.version.hip is None and not triton_interpreted()
    return dict(
        DQK=d_qk,
        DV=d_v,
        BQK=max(16, triton.next_power_of_2(d_qk)),
        BV=max(16, triton.next_power_of_2(d_v)),
        BM=config.block_m,
        BN=config.block_n,
        NORM_IS_TENSOR=isinstance(call.attn_norm, torch.Tensor),
        HAS_TARGETS=call.num_targets is not None,
        CAUSAL=call.causal,
        HAS_WINDOW=call.max_attn_len > 0,
        HAS_CONTEXT=call.contextual_seq_len > 0,
        FAST=fast,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def launch_forward(q, k, v, out, call: AttentionCall) -> None:
    """Write the attention of q, k, v into ``out`` [T, H, d_v]."""
    if q.shape[0] == 0 or call.max_seq_len == 0:
        return
    heads = q.shape[1]
    config = launch_config("forward", q.device, q.shape[2], v.shape[2], q.dtype)
    blocks = triton.cdiv(call.max_seq_len, config.block_m)
    attention_forward_kernel[(blocks * heads * call.batch,)](
        q, k, v, out, *_scalars(call, blocks, heads), *_strides(q, k, v, out), **_constants(call, q, v, config)
    )  # fmt: skip


def launch_backward(dout, q, k, v, dq, dk, dv, call: AttentionCall) -> None:
    """Write the gradients into ``dq``, ``dk`` [T, H, d_qk] and ``dv`` [T, H, d_v]; every row is written once."""
    if q.shape[0] == 0 or call.max_seq_len == 0:
        return
    heads = q.shape[1]
    config = launch_config("backward_kv", q.device, q.shape[2], v.shape[2], q.dtype)
    blocks = triton.cdiv(call.max_seq_len, config.block_n)
    attention_backward_kv_kernel[(blocks * heads * call.batch,)](
        q, k, v, dout, dk, dv, *_scalars(call, blocks, heads), *_strides(q, k, v, dout, dk, dv),
        **_constants(call, q, v, config),
    )  # fmt: skip
    config = launch_config("backward_q", q.device, q.shape[2], v.shape[2], q.dtype)
    blocks = triton.cdiv(call.max_seq_len, config.block_m)
    attention_backward_q_kernel[(blocks * heads * call.batch,)](
        q, k, v, dout, dq, *_scalars(call, blocks, heads), *_strides(q, k, v, dout, dq),
        **_constants(call, q, v, config),
    )  # fmt: skip
