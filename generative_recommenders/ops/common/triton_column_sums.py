"""Column sums of tall matrices, which are read once.

Sums over rows are per-program fp32 partials, added in a fixed order afterwards, so that two runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from generative_recommenders.ops.common.launch import multiprocessors


@triton.jit(do_not_specialize=("rows", "tiles"))
def column_sums_kernel(
    Source, Partial, rows, columns, tiles, source_stride, partial_stride, ROWS: tl.constexpr, BC: tl.constexpr
):
    """Partial sums over the rows of Source [rows, columns]: one read per element."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < columns
    total = tl.zeros((ROWS, BC), tl.float32)
    # Neighbouring programs work on neighbouring rows, so that reads stay within open memory pages.
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        r = tile * ROWS + tl.arange(0, ROWS)
        keep = (r < rows)[:, None] & inside[None, :]
        value = tl.load(Source + r.to(tl.int64)[:, None] * source_stride + c[None, :], mask=keep, other=0.0)
        total += value.to(tl.float32)
    tl.store(Partial + tl.program_id(1) * partial_stride + c, tl.sum(total, axis=0), mask=inside)


def _programs(device: torch.device) -> int:
    return 16 * multiprocessors(device) if device.type == "cuda" else 2


def sum_columns(source: torch.Tensor) -> torch.Tensor:
    """fp32 column sums of source [T, C], which may be a column slice."""
    rows, columns = source.shape
    if source.stride(1) != 1:
        source = source.contiguous()
    if rows == 0:
        return torch.zeros(columns, device=source.device, dtype=torch.float32)
    width = min(512, triton.next_power_of_2(columns))
    tile = 32 if source.device.type != "cuda" else 4096 // width
    slabs = triton.cdiv(columns, width)
    programs = max(1, min(triton.cdiv(_programs(source.device), slabs), triton.cdiv(rows, tile)))
    partial = torch.empty(programs, columns, device=source.device, dtype=torch.float32)
    column_sums_kernel[(slabs, programs)](
        source, partial, rows, columns, triton.cdiv(rows, tile), source.stride(0), partial.stride(0),
        ROWS=tile, BC=width, num_warps=4,
    )  # fmt: skip
    return partial.sum(0)
