"""Launches of the Hopper (Gluon) attention kernels, and the reason where they cannot serve a call."""

from __future__ import annotations

import functools

import torch
import triton

from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.dispatch import triton_interpreted

HEAD_WIDTHS = (64, 128)
FORWARD_ROWS = 192
BACKWARD_ROWS = 128
# How 227 KiB of shared memory are spent at d = 128: buffers for a tile's own rows (two let the next tile's arrive
# early) and stages for the blocks it walks. The best of a few measured on an H200.
FORWARD_DEPTH = dict(BUFFERS=2, STAGES=4)
KV_DEPTH = dict(BUFFERS=1, STAGES=3)
Q_DEPTH = dict(BUFFERS=1, K_STAGES=5, V_STAGES=3)


@functools.lru_cache(maxsize=1)
def gluon_import_error() -> str | None:
    """Why the Gluon kernels cannot be imported, or ``None``. Gluon is experimental: its interface moves."""
    try:
        from generative_recommenders.ops.attention import triton_hopper_bwd, triton_hopper_fwd  # noqa: F401
    except Exception as exc:
        return f"the Gluon kernels cannot be imported under triton {triton.__version__} ({type(exc).__name__}: {exc})"
    return None


@functools.lru_cache
def _why_not_device(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    if torch.version.hip is not None or (major, minor) != (9, 0):
        return f"the GPU has compute capability {major}.{minor}; these kernels are for 9.0 (Hopper)"
    return gluon_import_error()


def why_not_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> str | None:
    """Why the Hopper kernels cannot take this call, or ``None``; plain Triton serves what they do not."""
    if q.device.type != "cuda" or triton_interpreted():
        return f"tensors are on {q.device}: Gluon kernels run on a GPU only"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is not bfloat16 or float16"
    if q.shape[2] != v.shape[2] or q.shape[2] not in HEAD_WIDTHS:
        return f"d_qk={q.shape[2]}, d_v={v.shape[2]}: they must be equal and one of {HEAD_WIDTHS}"
    if not call.causal or call.max_attn_len > 0 or call.contextual_seq_len > 0:
        return "the mask is not causal (with candidates or not)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not _fits_descriptor(tensor):
            return f"{name} has strides {tensor.stride()}: heads must be adjacent and rows 16-byte aligned"
    return _why_not_device(q.device.index if q.device.index is not None else torch.cuda.current_device())


def _fits_descriptor(rows: torch.Tensor) -> bool:
    adjacent = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return adjacent and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


def _descriptor(rows: torch.Tensor):
    """Bulk-copy descriptor of [T, H, d] rows as [T, H * d] in blocks of 64 rows and one head."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    count, heads, width = rows.shape
    block = [64, width]
    element = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    flat = rows.as_strided((count, heads * width), (rows.stride(0), 1))
    return TensorDescriptor(flat, [count, heads * width], [rows.stride(0), 1], block, layout)


def _common(call: AttentionCall, q: torch.Tensor, tile_rows: int) -> tuple[tuple, tuple, dict]:
    """Grid, runtime arguments and compile-time arguments all three kernels share."""
    heads = q.shape[1]
    blocks = triton.cdiv(call.max_seq_len, tile_rows)
    tiles = blocks * heads * call.batch
    is_tensor = isinstance(call.attn_norm, torch.Tensor)
    runtime = (
        call.seq_offsets,
        call.seq_offsets if call.num_targets is None else call.num_targets,
        torch.zeros(1, dtype=torch.int32, device=q.device),  # the counter that programs draw tiles from
        call.attn_norm if is_tensor else float(call.attn_norm),
        float(call.alpha),
        blocks,
        tiles,
    )
    constants = dict(D=q.shape[2], NORM_IS_TENSOR=is_tensor, HAS_TARGETS=call.num_targets is not None, num_warps=4)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return (min(processors, tiles),), runtime, constants


def launch_forward(q, k, v, out, call: AttentionCall) -> None:
    """Write the attention of q, k, v into ``out`` [T, H, d]; see ``why_not_hopper`` for what is served."""
    from generative_recommenders.ops.attention.triton_hopper_fwd import hopper_forward

    if q.shape[0] == 0 or call.max_seq_len == 0:
        return
    grid, runtime, constants = _common(call, q, FORWARD_ROWS)
    hopper_forward[grid](
        _descriptor(q), _descriptor(k), _descriptor(v), out, *runtime,
        heads=q.shape[1], out_stride=out.stride(0), out_head=out.stride(1), WARPGROUPS=FORWARD_ROWS // 64,
        **FORWARD_DEPTH, **constants,
    )  # fmt: skip


def launch_backward(dout, q, k, v, dq, dk, dv, call: AttentionCall) -> None:
    """Write the gradients into ``dq``, ``dk`` and ``dv`` (any row stride); every row is written once."""
    from generative_recommenders.ops.attention.triton_hopper_bwd import hopper_backward_kv, hopper_backward_q

    if q.shape[0] == 0 or call.max_seq_len == 0:
        return
    if not _fits_descriptor(dout):
        dout = dout.contiguous()
    inputs = [_descriptor(rows) for rows in (q, k, v, dout)]
    grid, runtime, constants = _common(call, q, BACKWARD_ROWS)
    hopper_backward_kv[grid](
        *inputs, dk, dv, *runtime, heads=q.shape[1], dk_stride=dk.stride(0), dk_head=dk.stride(1),
        dv_stride=dv.stride(0), dv_head=dv.stride(1), **KV_DEPTH, **constants,
    )  # fmt: skip
    grid, runtime, constants = _common(call, q, BACKWARD_ROWS)
    hopper_backward_q[grid](
        *inputs, dq, *runtime, heads=q.shape[1], dq_stride=dq.stride(0), dq_head=dq.stride(1),
        **Q_DEPTH, **constants,
    )  # fmt: skip
