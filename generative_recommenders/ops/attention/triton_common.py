"""What the attention kernels share: the mask, the ranges of blocks it leaves, tile loads and SiLU.

Names inside the kernels: rows of a sequence are counted from its start; ``length`` is L, ``history`` the number of
rows before the candidates, ``id_max`` the id all candidates share (reference.row_ids). Blocks are skipped from the mask
alone: ids rise with the row, so the rows a tile can see are one interval (plus itself, plus the contextual prefix).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x, FAST: tl.constexpr):
    if FAST:
        # One instruction of the NVIDIA special-function unit, error about 2^-11: below half-precision rounding.
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    return y


@triton.jit
def silu(scores, half_alpha, FAST: tl.constexpr):
    """SiLU(alpha * s) = t * tanh(t) + t with t = alpha * s / 2: one special-function instruction instead of two."""
    t = scores * half_alpha
    return t * tanh(t, FAST) + t


@triton.jit
def silu_and_slope(scores, half_alpha, FAST: tl.constexpr):
    """p = SiLU(alpha * s), and e with 2 * SiLU'(alpha * s) = e + 1, so that 2 * ds = dp * e + dp."""
    t = scores * half_alpha
    th = tanh(t, FAST)
    e = (1.0 - th * th) * t + th
    return t * th + t, e


@triton.jit
def inverse_norm(norm, NORM_IS_TENSOR: tl.constexpr):
    if NORM_IS_TENSOR:
        n = tl.load(norm).to(tl.float32)
    else:
        n = norm
    return 1.0 / n


@triton.jit
def sequence_of(Offsets, Targets, batch, contextual, HAS_TARGETS: tl.constexpr, HAS_CONTEXT: tl.constexpr):
    """First row (int64), length, rows before the candidates, and id_max of one sequence."""
    first = tl.load(Offsets + batch).to(tl.int64)
    length = (tl.load(Offsets + batch + 1).to(tl.int64) - first).to(tl.int32)
    id_max = length
    if HAS_CONTEXT:
        id_max = id_max - contextual + 1
    if HAS_TARGETS:
        id_max = id_max - tl.load(Targets + batch).to(tl.int32)
    history = tl.maximum(id_max, 0)
    if HAS_CONTEXT:
        # A prefix cut short leaves only candidates: nothing but itself is seen by any row.
        history = tl.where(id_max > 0, id_max + contextual - 1, 0)
    return first, length, history, id_max


@triton.jit
def row_id(rows, id_max, contextual, HAS_CONTEXT: tl.constexpr):
    if HAS_CONTEXT:
        rows = tl.maximum(rows - contextual + 1, 0)
    return tl.minimum(rows, id_max)


@triton.jit
def row_of_id(number, contextual, HAS_CONTEXT: tl.constexpr):
    """First row of an id; row 0 for ids at or below 0."""
    row = tl.maximum(number, 0)
    if HAS_CONTEXT:
        row = tl.where(number > 0, number + contextual - 1, 0)
    return row


@triton.jit
def visible(
    i, j, id_max, window, contextual, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CONTEXT: tl.constexpr
):
    """Whether row i sees row j, for index tensors of broadcastable shapes (reference.attention_mask)."""
    a = row_id(i, id_max, contextual, HAS_CONTEXT)
    b = row_id(j, id_max, contextual, HAS_CONTEXT)
    distance = a - b
    if not CAUSAL:
        distance = tl.abs(distance)
    seen = distance > 0
    if HAS_WINDOW:
        seen = seen & (distance <= window)
    if HAS_CONTEXT:
        seen = seen | ((a == 0) & (b < id_max))
    return seen | (i == j)


@triton.jit
def key_ranges(
    m0, m1, length, history, id_max, window, contextual,
    BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CONTEXT: tl.constexpr,
):  # fmt: skip
    """Key blocks that query rows m0 … m1 - 1 can see.

    Returns (head, full, tail, tail_end, own, own_end): blocks from ``full`` to ``tail`` need no mask; those from
    ``head`` to ``full``, from ``tail`` to ``tail_end`` and from ``own`` to ``own_end`` (candidates seeing themselves)
    do. Starts are multiples of BN.
    """
    head = 0
    if CAUSAL:
        tail = tl.minimum(m0, history) // BN * BN
        straddles = m0 < history
        tail_end = tl.where(straddles, m1, history)
        own_end = m1
        own = tl.where(straddles, m1, tl.maximum(m0 // BN, tl.cdiv(history, BN)) * BN)
        full = 0
        if HAS_WINDOW:
            head, sure = _window_starts(m0, m1, id_max, window, contextual, HAS_CONTEXT)
            head = tl.minimum(head // BN * BN, tail)
            full = tl.minimum(tl.cdiv(sure, BN) * BN, tail)
        everything = tl.maximum(history, m1)
    else:
        everything = length
        if HAS_WINDOW:
            head, sure = _window_starts(m0, m1, id_max, window, contextual, HAS_CONTEXT)
            head = head // BN * BN
            everything = _window_end(m1 - 1, length, id_max, window, contextual, HAS_CONTEXT)
        full = everything
        tail = everything
        tail_end = everything
        own = everything
        own_end = everything
    if HAS_CONTEXT:
        if m0 < contextual:
            head = 0
            full = tl.maximum(everything, history)
            tail = full
            tail_end = full
            own = full
            own_end = full
    return head, full, tail, tail_end, own, own_end


@triton.jit
def _window_starts(m0, m1, id_max, window, contextual, HAS_CONTEXT: tl.constexpr):
    """First row that any of rows m0 … m1 - 1 sees through the window, and the first that all of them do."""
    first = row_id(m0, id_max, contextual, HAS_CONTEXT) - window
    last = row_id(m1 - 1, id_max, contextual, HAS_CONTEXT) - window
    return row_of_id(first, contextual, HAS_CONTEXT), row_of_id(last, contextual, HAS_CONTEXT)


@triton.jit
def _window_end(row, length, id_max, window, contextual, HAS_CONTEXT: tl.constexpr):
    """One past the last row whose id is at most the row's own id plus the window."""
    number = row_id(row, id_max, contextual, HAS_CONTEXT) + window
    end = row_of_id(number, contextual, HAS_CONTEXT) + 1
    if HAS_CONTEXT:
        end = tl.where(number <= 0, contextual, end)
    return tl.where(number >= id_max, length, tl.minimum(end, length))


@triton.jit
def query_ranges(
    n0, n1, length, history, id_max, window, contextual,
    BM: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CONTEXT: tl.constexpr,
):  # fmt: skip
    """Query blocks that can see key rows n0 … n1 - 1.

    Returns (prefix_end, start, full, tail, end): blocks from ``full`` to ``tail`` need no mask; those from 0 to
    ``prefix_end`` (contextual prefix), from ``start`` to ``full`` (diagonal) and from ``tail`` to ``end`` do. Starts
    are multiples of BM.
    """
    prefix_end = 0
    if CAUSAL:
        start = n0 // BM * BM
        full = tl.cdiv(n1, BM) * BM
        # Candidate keys are seen by themselves alone.
        end = tl.where(n0 < history, length, n1)
        sure = length
        if HAS_WINDOW:
            end = tl.minimum(end, _window_end(n1 - 1, length, id_max, window, contextual, HAS_CONTEXT))
            end = tl.maximum(end, n1)
            sure = _window_end(n0, length, id_max, window, contextual, HAS_CONTEXT)
        # Rows after a tile that holds candidate keys see only a part of it.
        tail = tl.where(n1 <= history, tl.maximum(sure // BM * BM, full), full)
        if HAS_CONTEXT:
            if n0 < history:
                prefix_end = tl.minimum(tl.cdiv(contextual, BM) * BM, start)
    else:
        start = 0
        end = length
        if HAS_WINDOW:
            end = _window_end(n1 - 1, length, id_max, window, contextual, HAS_CONTEXT)
            if not HAS_CONTEXT:
                start, sure = _window_starts(n0, n1, id_max, window, contextual, HAS_CONTEXT)
                start = start // BM * BM
        full = end
        tail = end
    return prefix_end, start, full, tail, end


@triton.jit
def load_rows(
    base, row_stride, row, limit, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr
):
    """Tile [ROWS, BD] from rows ``row`` …; columns past D, and with MASKED rows from ``limit`` on, are zero."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BD)
    pointers = base + tl.cast(row, tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    if MASKED:
        keep = (row + r < limit)[:, None]
        if BD != D:
            keep = keep & (c < D)[None, :]
        tile = tl.load(pointers, mask=keep, other=0.0)
    elif BD != D:
        tile = tl.load(pointers, mask=(c < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(base, row_stride, row, limit, tile, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Write tile [ROWS, BD] to rows ``row`` … below ``limit``, columns below D, cast to the buffer's dtype."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BD)
    pointers = base + tl.cast(row, tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    keep = (row + r < limit)[:, None] & (c < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=keep)
