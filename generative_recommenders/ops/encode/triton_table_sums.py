"""Gradients of small tables: the rows that looked up the same entry, added up in a fixed order.

Rows come sorted by entry. Entries are cut into pieces of at most PIECE rows, so that one entry that everybody looks up
is no longer than many that few do; each piece is read once (2 D bytes per row in 16 bits) and added in fp32, then each
entry's pieces. No atomics: two runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from generative_recommenders.ops.encode.triton_encode import spread_nibbles

PIECE = 128
MOST_SHORT_ENTRIES = (1 << 15) - 1  # keys of two bytes take the radix sort half the passes of four


@triton.jit(do_not_specialize=("x_stride",))
def piece_sums_kernel(
    DX, Mask, Rows, Entry, Bounds, FirstPiece, Partial, x_stride,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Partial[piece] = sum of the kept elements of DX[Rows[n]], n over the piece; unused pieces have no rows."""
    piece = tl.program_id(0)
    entry = tl.load(Entry + piece)
    begin = tl.load(Bounds + entry) + (piece - tl.load(FirstPiece + entry)) * LENGTH
    end = tl.minimum(begin + LENGTH, tl.load(Bounds + entry + 1))
    column = tl.arange(0, BD)
    inside = column < D
    quad = tl.arange(0, BD // 4)[None, :]
    step = x_stride.to(tl.int64) * 4
    total = tl.zeros((ROWS, BD), tl.float32)
    n = begin + tl.arange(0, ROWS)
    ahead = tl.load(Rows + n, mask=n < end, other=0)  # a tile ahead, so that rows need not wait for their numbers
    for _ in range(begin, end, ROWS):
        ok = (n < end)[:, None]
        row = ahead.to(tl.int64)[:, None]
        n += ROWS
        ahead = tl.load(Rows + n, mask=n < end, other=0)
        value = tl.load(DX + row * step + column[None, :], mask=ok & inside[None, :], other=0.0).to(tl.float32)
        if DROPOUT:
            nibbles = tl.load(Mask + row * (D // 4) + quad, mask=ok & (quad < D // 4), other=0)
            value = tl.where(spread_nibbles(nibbles, ROWS, BD), value, 0.0)
        total += value
    tl.store(Partial + piece.to(tl.int64) * D + column, tl.sum(total, axis=0), mask=inside)


@triton.jit
def entry_sums_kernel(
    Partial, FirstPiece, Out, D: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Out[entry] = sum of its pieces."""
    entry = tl.program_id(0)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < D
    begin = tl.load(FirstPiece + entry)
    end = tl.load(FirstPiece + entry + 1)
    total = tl.zeros((ROWS, BC), tl.float32)
    for first in range(begin, end, ROWS):
        n = (first + tl.arange(0, ROWS))[:, None]
        total += tl.load(Partial + n.to(tl.int64) * D + column[None, :], mask=(n < end) & inside[None, :], other=0.0)
    tl.store(Out + entry.to(tl.int64) * D + column, tl.sum(total, axis=0), mask=inside)


def piece_launch(block: int) -> tuple[int, int]:
    """(rows of a tile, warps) of ``piece_sums_kernel``: few rows and many pieces at once win by a third."""
    return max(1, 1024 // block), min(16, max(1, block // 512))


def table_gradient(
    dx: torch.Tensor,
    mask: torch.Tensor | None,
    entries: torch.Tensor,
    num_entries: int,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[e] = Σ kept(dx[n])`` over the rows n that looked up entry e: fp32 ``[num_entries, D]``.

    Args:
        dx: ``[T, D]``, D a multiple of 8.
        mask: uint8 ``[T, D / 4]`` of four keep decisions each, or ``None``: all kept.
        entries: integer ``[N]``, the entry that each row looked up.
        places: ``[N]``, the rows' numbers in dx; ``None``: N = T, each its own.
    """
    width, device = dx.shape[1], dx.device
    if entries.numel() == 0:
        return torch.zeros(num_entries, width, device=device, dtype=torch.float32)
    keys = entries.to(torch.int16 if num_entries <= MOST_SHORT_ENTRIES else torch.int32)
    keys, rows = torch.sort(keys, stable=True)
    rows = rows if places is None else places[rows]
    bounds = torch.searchsorted(keys, torch.arange(num_entries + 1, device=device, dtype=keys.dtype))
    pieces = torch.zeros(num_entries + 1, device=device, dtype=torch.int64)
    torch.cumsum(bounds.diff().add_(PIECE - 1).div_(PIECE, rounding_mode="floor"), 0, out=pieces[1:])
    # The host knows only how many pieces there can be: every entry may end with one that is not full.
    most = triton.cdiv(entries.numel(), PIECE) + min(num_entries, entries.numel())
    numbers = torch.arange(most, device=device)
    entry = torch.searchsorted(pieces, numbers, right=True).sub_(1).clamp_(max=num_entries - 1)
    partial = torch.empty(most, width, device=device, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    tile, warps = piece_launch(block) if device.type == "cuda" else (PIECE, 1)
    piece_sums_kernel[(most,)](
        dx, mask, rows, entry, bounds, pieces, partial, dx.stride(0) // 4,
        D=width, BD=block, ROWS=tile, LENGTH=PIECE, DROPOUT=mask is not None, num_warps=warps,
    )  # fmt: skip
    out = torch.empty(num_entries, width, device=device, dtype=torch.float32)
    columns = min(128, block)
    entry_sums_kernel[(num_entries, triton.cdiv(width, columns))](
        partial, pieces, out, D=width, BC=columns, ROWS=16, num_warps=4
    )
    return out
