"""Launches of the Hopper (Gluon) attention kernels, and the reason where they cannot serve a call."""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton

from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.common.launch import multiprocessors
from generative_recommenders.ops.dispatch import triton_interpreted

HEAD_WIDTHS = (64, 128)
FORWARD_ROWS = 192
KV_ROWS = 128
Q_ROWS = 256
# How 227 KiB of shared memory are spent at d = 128: buffers for a tile's own rows (two let the next tile's arrive
# early) and stages for the blocks it walks. The best of a few measured on an H200.
FORWARD_DEPTH = dict(BUFFERS=2, STAGES=4)
KV_DEPTH = dict(BUFFERS=1, STAGES=3)
Q_DEPTH = dict(STAGES=4)
# The backward's scratch buffer: dS of a chunk of the batch, in tiles of 64 keys x 64 queries (8 KiB).
SCRATCH_TILES = 2**31 // (64 * 64 * 2)


def _gluon_kernels():
    """The modules of the forward and the backward kernels."""
    from generative_recommenders.ops.attention import triton_hopper_bwd, triton_hopper_fwd

    return triton_hopper_fwd, triton_hopper_bwd


@functools.lru_cache(maxsize=1)
def gluon_import_error() -> str | None:
    """Why the Gluon kernels cannot be imported, or ``None``. Gluon is experimental: its interface moves."""
    try:
        _gluon_kernels()
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
    adjacent = (
        rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] and rows.stride(0) >= rows.shape[1] * rows.shape[2]
    )
    return adjacent and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


def _descriptor(rows: torch.Tensor):
    """Bulk-copy descriptor of [T, H, d] rows as [T, H * d] in blocks of 64 rows and one head."""
    count, heads, width = rows.shape
    return _flat_descriptor(rows.as_strided((count, heads * width), (rows.stride(0), 1)), width)


def _flat_descriptor(rows: torch.Tensor, width: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [64, width]
    element = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block, layout)


def _masks(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    return call.seq_offsets, call.seq_offsets if call.num_targets is None else call.num_targets


def _scalars(call: AttentionCall, tile_rows: int) -> tuple:
    """Normaliser, alpha, and tiles of the longest sequence."""
    norm = call.attn_norm if isinstance(call.attn_norm, torch.Tensor) else float(call.attn_norm)
    return norm, float(call.alpha), triton.cdiv(call.max_seq_len, tile_rows)


def _constants(call: AttentionCall, q: torch.Tensor) -> dict:
    """Compile-time arguments that all kernels share."""
    return dict(
        heads=q.shape[1],
        D=q.shape[2],
        NORM_IS_TENSOR=isinstance(call.attn_norm, torch.Tensor),
        HAS_TARGETS=call.num_targets is not None,
        num_warps=4,
    )


def launch_forward(q, k, v, out, call: AttentionCall) -> None:
    """Write the attention of q, k, v into ``out`` [T, H, d]; see ``why_not_hopper`` for what is served."""
    if q.shape[0] == 0 or call.max_seq_len == 0:
        return
    norm, alpha, blocks = _scalars(call, FORWARD_ROWS)
    tiles = blocks * q.shape[1] * call.batch
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)  # programs draw their tiles from it
    forward, _ = _gluon_kernels()
    forward.attention_hopper_forward_kernel[(min(multiprocessors(q.device), tiles),)](
        _descriptor(q), _descriptor(k), _descriptor(v), out, *_masks(call), counter, norm, alpha, blocks, tiles,
        out_stride=out.stride(0), out_head=out.stride(1), WARPGROUPS=FORWARD_ROWS // 64, **FORWARD_DEPTH,
        **_constants(call, q),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SlopePlan:
    """How the backward goes through the batch in chunks of sequences whose dS fits the scratch buffer.

    A sequence of n blocks of 64 rows has n (n + 1) / 2 tiles per head. Lengths stay on the device: the host knows only
    bounds, so some chunks at the end may be empty.

    Attributes:
        tiles: tiles of the scratch buffer.
        chunks: how many.
        first_tile: int32 [B], where a sequence's tiles begin in the buffer.
        first_sequence: int32 [chunks + 1], where a chunk's sequences begin.
    """

    tiles: int
    chunks: int
    first_tile: torch.Tensor
    first_sequence: torch.Tensor

    @classmethod
    def of(cls, call: AttentionCall, rows: int, heads: int) -> SlopePlan:
        """Plan for ``rows`` = T rows; the buffer has ``SCRATCH_TILES``, or two longest sequences, if that is more."""
        longest = triton.cdiv(call.max_seq_len, 64)
        most = heads * longest * (longest + 1) // 2  # tiles of one sequence
        # Of L rows, n <= (L + 63) / 64, so n (n + 1) <= (L^2 + 190 L + 8001) / 64^2; the sum of L^2 is at most max(L)
        # times the sum of L.
        bound = heads * ((rows * (call.max_seq_len + 190)) // (2 * 64 * 64) + 2 * call.batch)
        bound = min(bound, most * call.batch)
        tiles = min(bound, max(SCRATCH_TILES, 2 * most))
        stride = bound if tiles == bound else tiles - most  # a chunk's last sequence begins before this
        blocks = (call.seq_offsets.diff() + 63) // 64
        sizes = blocks * (blocks + 1) // 2 * heads
        before = sizes.cumsum(0) - sizes
        chunks = triton.cdiv(bound, stride)
        bounds = torch.arange(chunks + 1, device=before.device)
        first = torch.searchsorted(before // stride, bounds, out_int32=True)
        return cls(tiles, chunks, (before % stride).int(), first)


def launch_backward(dout, q, k, v, dq, dk, dv, call: AttentionCall) -> None:
    """Write the gradients into ``dq``, ``dk`` and ``dv`` (any row stride); every row is written once."""
    if q.shape[0] == 0 or call.max_seq_len == 0:
        return
    if not _fits_descriptor(dout):
        dout = dout.contiguous()
    _, backward = _gluon_kernels()
    plan = SlopePlan.of(call, *q.shape[:2])
    rows = [_descriptor(tensor) for tensor in (q, k, v, dout)]
    slopes = _flat_descriptor(q.new_empty(plan.tiles * 64, 64), 64)
    counters = torch.zeros(plan.chunks, 2, dtype=torch.int32, device=q.device)
    grid, constants = (multiprocessors(q.device),), _constants(call, q)
    for chunk in range(plan.chunks):
        where = *_masks(call), plan.first_tile, plan.first_sequence[chunk:]
        backward.attention_hopper_backward_kv_kernel[grid](
            *rows, slopes, dk, dv, *where, counters[chunk, 0:], *_scalars(call, KV_ROWS),
            dk_stride=dk.stride(0), dk_head=dk.stride(1), dv_stride=dv.stride(0), dv_head=dv.stride(1),
            **KV_DEPTH, **constants,
        )  # fmt: skip
        backward.attention_hopper_backward_q_kernel[grid](
            slopes, rows[1], dq, *where, counters[chunk, 1:], *_scalars(call, Q_ROWS),
            dq_stride=dq.stride(0), dq_head=dq.stride(1), WARPGROUPS=Q_ROWS // 64, **Q_DEPTH, **constants,
        )  # fmt: skip
