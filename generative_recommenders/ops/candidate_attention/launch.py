"""Launches of the absorbed and the materialised kernels: tile shapes, splits and descriptors.

Nothing that changes from batch to batch (lengths, batch size, candidate counts, splits) is a compile-time constant or
specialised on, so a kernel is compiled once per (dtype, D, H, one or several candidates).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton

from generative_recommenders.ops.candidate_attention import triton_absorbed as absorbed
from generative_recommenders.ops.candidate_attention import triton_materialised as materialised
from generative_recommenders.ops.candidate_attention.call import operand_columns
from generative_recommenders.ops.candidate_attention.rows import CandidateRows

#: Rows below which cutting a sequence into more programs does not pay for the programs' own operands and sums.
MIN_SPLIT_ROWS = 256
#: Programs to aim at, per multiprocessor: the tail of the last wave shrinks with their number.
PROGRAMS_PER_PROCESSOR = 6
#: Rows of keys that a materialised program reads at a time.
QUERY_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Tile:
    """A kernel's tile of ``rows`` rows in ``blocks`` blocks of ``block_dim`` columns, and its compile options."""

    blocks: int
    block_dim: int
    rows: int
    warps: int
    stages: int


def tile_for(width: int, dtype: torch.dtype, backward: bool, hopper: bool, columns: int = 16) -> Tile:
    """The tile of rows of this width for an operand of so many columns.

    On Hopper, 64 rows are one warp group's matrix operand and are read from shared memory as loaded: at 512 columns in
    half precision two forward programs fit a multiprocessor, or one backward program with three tiles in flight (two
    beside a wider operand), in blocks of 64 columns, whose fp32 results need no spilled registers. Elsewhere operands
    pass through registers: 16 rows.
    """
    padded = max(16, triton.next_power_of_2(width))
    if hopper and dtype.itemsize == 2 and padded <= 512:
        if not backward:
            return Tile(1, padded, 64, 4, 2)
        block_dim = min(64, padded)
        return Tile(padded // block_dim, block_dim, 64, 4, 3 if columns <= 16 else 2)
    block_dim = min(128, padded)
    stages = 2 if padded * dtype.itemsize <= 2048 else 1
    return Tile(padded // block_dim, block_dim, 16, 8 if padded >= 256 else 4, stages)


@dataclasses.dataclass(frozen=True)
class Device:
    """What the launches ask of a device: multiprocessors, Hopper or not, descriptors copied by hardware or not."""

    processors: int
    hopper: bool
    descriptors: bool


INTERPRETER = Device(processors=1, hopper=False, descriptors=True)


@functools.lru_cache
def _device_facts(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    nvidia = torch.version.hip is None
    return Device(properties.multi_processor_count, nvidia and properties.major == 9, nvidia and properties.major >= 9)


def _facts(device: torch.device) -> Device:
    if device.type != "cuda":
        return INTERPRETER
    return _device_facts(torch.cuda.current_device() if device.index is None else device.index)


def choose_splits(sequences: int, rows: int, processors: int) -> int:
    """Programs per sequence for B ``sequences`` of ``rows`` rows in all."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(1, sequences))
    return max(1, min(wanted, rows // max(1, sequences) // MIN_SPLIT_ROWS))


def _descriptor(x: torch.Tensor, tile: Tile):
    """A descriptor of x in blocks for the copy engine, or ``None`` where the blocks do not divide or align for it."""
    itemsize = x.element_size()
    fits = tile.blocks * tile.block_dim == x.shape[1] and itemsize == 2
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * itemsize % 16 == 0
    if not (fits and aligned):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [tile.rows, tile.block_dim])


def _common(x: torch.Tensor, tile: Tile, sizes) -> dict:
    """Keyword arguments that all passes share."""
    tensor_norm = isinstance(sizes.attn_norm, torch.Tensor)
    return dict(
        NORM=sizes.attn_norm if tensor_norm else x, norm=1.0 if tensor_norm else float(sizes.attn_norm),
        alpha=float(sizes.alpha), D=x.shape[1], H=sizes.num_heads, NORM_TENSOR=tensor_norm,
        PRECISION="ieee" if torch.version.hip else "tf32x3", **_tile_arguments(tile),
    )  # fmt: skip


def _tile_arguments(tile: Tile) -> dict:
    return dict(NB=tile.blocks, DC=tile.block_dim, BN=tile.rows, num_warps=tile.warps, num_stages=tile.stages)


def _operand(x: torch.Tensor, candidates: CandidateRows, heads: int, backward: bool) -> tuple[int, int, int]:
    """Columns of one operand, candidates it holds (two columns per head backward), and operands per sequence."""
    least, most = operand_columns(x.shape[1], x.dtype, heads)
    per_head, spare = (2, 0) if backward else (1, 1)
    columns = least
    if candidates.summary.largest * heads * per_head + spare > least:
        columns = max(least, min(32, most))
    held = (columns - spare) // (heads * per_head)
    return columns, held, triton.cdiv(max(1, candidates.summary.largest), held)


def _add_splits(partial: torch.Tensor) -> torch.Tensor:
    """[splits, ...] → [...], added in a fixed order."""
    return partial[0] if partial.shape[0] == 1 else partial.sum(0)


def absorbed_forward(
    x: torch.Tensor, seq_offsets: torch.Tensor, candidates: CandidateRows, qw: torch.Tensor, sizes, splits=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One read of x.

    Args:
        x: ``[T, D]``. qw: fp32 ``[C, H, D + 8]``, score operand and, in column D, its constant.
        splits: programs per sequence, ``None`` to choose.

    Returns:
        fp32 ``[C, H, D + 8]`` with sum_j a_j x_hat_j / N and, in column D, sum_j a_j / N (zeros behind it), and fp32
        ``[T, 2]`` mean and 1 / standard deviation of the rows of sequences that have candidates.
    """
    sequences = seq_offsets.numel() - 1
    stats = x.new_empty(x.shape[0], 2, dtype=torch.float32)
    if qw.shape[0] == 0 or x.shape[0] == 0:
        return torch.zeros_like(qw), stats
    device = _facts(x.device)
    tile = tile_for(x.shape[1], x.dtype, backward=False, hopper=device.hopper)
    columns, per_operand, chunks = _operand(x, candidates, sizes.num_heads, backward=False)
    splits = splits or choose_splits(sequences, x.shape[0], device.processors)
    sums = qw.new_empty(splits, *qw.shape)
    descriptor = _descriptor(x, tile) if device.descriptors else None
    absorbed.absorbed_forward_kernel[(sequences * splits * chunks,)](
        X=x, DESC=x if descriptor is None else descriptor, OFFSETS=seq_offsets, TARGET_OFFSETS=candidates.offsets,
        QW=qw, SUMS=sums, STATS=stats, stride_x=x.stride(0), splits=splits, columns=qw.shape[0] * sizes.num_heads,
        chunks=chunks, eps=float(sizes.eps), DQ=qw.shape[2], TC=per_operand, KC=columns, STAGES=tile.stages,
        TMA=descriptor is not None, **_common(x, tile, sizes),
    )  # fmt: skip
    return _add_splits(sums), stats


def absorbed_backward(
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    candidates: CandidateRows,
    qw: torch.Tensor,
    gs: torch.Tensor,
    stats: torch.Tensor,
    sizes,
    splits=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One read of x and one write of dx (two reads if a sequence has more candidates than one operand holds).

    Args:
        gs: fp32 ``[C, H, D + 8]``, gradient of ``absorbed_forward``'s sums.
        stats: from ``absorbed_forward``. Others as there.

    Returns:
        dx ``[T, D]`` without the candidate rows' own terms, and fp32 ``[C, H, D + 8]``: the gradient of qw.
    """
    sequences = seq_offsets.numel() - 1
    if qw.shape[0] == 0 or x.shape[0] == 0:
        return torch.zeros_like(x), torch.zeros_like(qw)
    device = _facts(x.device)
    columns, per_operand, chunks = _operand(x, candidates, sizes.num_heads, backward=True)
    tile = tile_for(x.shape[1], x.dtype, True, device.hopper, columns)
    splits = splits or choose_splits(sequences, x.shape[0], device.processors)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = qw.new_empty(splits, *qw.shape)
    common = _common(x, tile, sizes)
    common |= dict(OFFSETS=seq_offsets, TARGET_OFFSETS=candidates.offsets, QW=qw, GS=gs, STATS=stats, DX=dx)
    common |= dict(X=x, stride_x=x.stride(0), stride_dx=dx.stride(0), splits=splits)
    common |= dict(DQ=qw.shape[2], TC=per_operand, KH=columns // 2)
    descriptor = _descriptor(x, tile) if device.descriptors else None
    absorbed.absorbed_backward_kernel[(sequences * splits * chunks,)](
        DESC=x if descriptor is None else descriptor, SUMS=sums, columns=qw.shape[0] * sizes.num_heads, chunks=chunks,
        STAGES=tile.stages, TMA=descriptor is not None, WRITE_DX=chunks == 1, **common,
    )  # fmt: skip
    if chunks > 1:
        small = tile_for(x.shape[1], x.dtype, backward=True, hopper=False)
        absorbed.absorbed_dx_kernel[(sequences * splits,)](**common | _tile_arguments(small))
    return dx, _add_splits(sums)


def add_candidate_rows(dx, rows, x, stats, d_hat, d_residual: torch.Tensor | None) -> None:
    """``dx[rows] += LayerNorm backward of d_hat + d_residual`` in place; rows int64 ``[C]``, the others ``[C, D]``."""
    if rows.numel() == 0:
        return
    absorbed.candidate_rows_backward_kernel[(rows.numel(),)](
        dx, rows, x, stats, d_hat, d_hat if d_residual is None else d_residual.contiguous(), dx.stride(0),
        x.stride(0), D=x.shape[1], DP=triton.next_power_of_2(x.shape[1]), HAS_RESIDUAL=d_residual is not None,
        num_warps=4,
    )  # fmt: skip


def _query_splits(rows: int, sequences: int) -> int:
    return max(1, min(16, rows // max(1, sequences) // 512))


def _query_arguments(q, k, v, seq_offsets, sizes) -> dict:
    tensor_norm = isinstance(sizes.attn_norm, torch.Tensor)
    return dict(
        Q=q, K=k, V=v, OFFSETS=seq_offsets, NORM=sizes.attn_norm if tensor_norm else q,
        sequences=seq_offsets.numel() - 1, alpha=float(sizes.alpha),
        norm=1.0 if tensor_norm else float(sizes.attn_norm), H=sizes.num_heads, DK=sizes.attn_dim,
        DV=sizes.hidden_dim, PK=triton.next_power_of_2(sizes.attn_dim), PV=triton.next_power_of_2(sizes.hidden_dim),
        BN=QUERY_ROWS, NORM_TENSOR=tensor_norm,
    )  # fmt: skip


def materialised_forward(q, k, v, seq_offsets, sizes) -> torch.Tensor:
    """q ``[B, H d_qk]``, k ``[T, H d_qk]``, v ``[T, H d_v]`` (contiguous) → ``[B, H d_v]`` in q's dtype."""
    sequences = seq_offsets.numel() - 1
    if sequences == 0:
        return v.new_empty(0, v.shape[1])
    splits = _query_splits(k.shape[0], sequences)
    out = v.new_empty(splits, sequences, v.shape[1], dtype=torch.float32)
    materialised.materialised_forward_kernel[(sequences * splits * sizes.num_heads,)](
        OUT=out, splits=splits, **_query_arguments(q, k, v, seq_offsets, sizes)
    )
    return out.sum(0).to(q.dtype)


def materialised_backward(q, k, v, seq_offsets, d_out, sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    sequences = seq_offsets.numel() - 1
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    if sequences == 0:
        return torch.empty_like(q), dk, dv
    splits = _query_splits(k.shape[0], sequences)
    dq = q.new_empty(splits, *q.shape, dtype=torch.float32)
    materialised.materialised_backward_kernel[(sequences * splits * sizes.num_heads,)](
        D_OUT=d_out, DK_OUT=dk, DV_OUT=dv, DQ=dq, splits=splits, **_query_arguments(q, k, v, seq_offsets, sizes)
    )
    return dq.sum(0).to(q.dtype), dk, dv
