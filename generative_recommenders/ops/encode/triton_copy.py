"""Copying rows into a block of columns of another matrix, converting on the way: one read, one write per element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=("rows",))
def copy_rows_kernel(
    Source, Target, rows, source_stride, target_stride, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr
):
    """Target[r, :D] = Source[r, :D]."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BD)
    keep = (r < rows)[:, None] & (c < D)[None, :]
    at = r.to(tl.int64)[:, None]
    value = tl.load(Source + at * source_stride + c[None, :], mask=keep)
    tl.store(Target + at * target_stride + c[None, :], value.to(Target.dtype.element_ty), mask=keep)


def copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    """``target[:] = source`` for matrices of one shape; target may be a block of columns, dtypes may differ."""
    rows, width = source.shape
    if rows == 0 or width == 0:
        return
    source = source if source.stride(1) == 1 else source.contiguous()
    block = triton.next_power_of_2(width)
    tile = max(1, (4096 if source.device.type == "cuda" else 65536) // block)
    copy_rows_kernel[(triton.cdiv(rows, tile),)](
        source, target, rows, source.stride(0), target.stride(0), D=width, BD=block, ROWS=tile, num_warps=4
    )
