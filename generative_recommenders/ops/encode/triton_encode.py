"""The rows of a joined sequence, from the products before the norms to the stack's input and back.

Bytes per event row of D columns in 16 bits: forward reads content and attributes (4 D) and writes x (2 D); the
position, time and action rows it adds come from tables that stay in the second-level cache. Backward reads x's
gradient, content and attributes (6 D) and writes two gradients (4 D). With dropout, a byte of keep decisions per four
columns more; they are kept since drawing them again (15 wide products) would cost more than reading them.

A program works on source rows (events, or contextual rows) and reads or writes each one's place in the joined
sequence. Row strides come divided by four: the compiler then sees that addresses are multiples of four columns and no
more, and gives each thread the four columns of one Philox counter, so that nothing is exchanged between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from generative_recommenders.ops.common import philox
from generative_recommenders.ops.common.triton_norm import norm_backward, normed
from generative_recommenders.ops.common.triton_philox import keep_bytes, spread_bytes

SEGMENT = tl.constexpr(philox.SEGMENT_INPUT)
FORWARD_RUNTIME = ["rows", "tiles", "c_stride", "a_stride", "x_stride", "action_stride", "table_stride", "threshold"]
BACKWARD_RUNTIME = ["rows", "tiles", "c_stride", "a_stride", "x_stride", "d_stride"]


@triton.jit
def spread_nibbles(nibbles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``[ROWS, COLUMNS / 4]`` of four decisions, lowest bit first → bool ``[ROWS, COLUMNS]``."""
    n = nibbles.to(tl.uint32)
    packed = (n & 1) | ((n & 2) << 7) | ((n & 4) << 14) | ((n & 8) << 21)
    return (spread_bytes(packed, ROWS, COLUMNS) & 1) != 0


@triton.jit
def _numbers(Place, PositionIndex, TimeIndex, Pattern, r, rows, EVENTS: tl.constexpr):
    """Joined row, position, time and action pattern (0 for context) of source rows r, 0 past the last."""
    place = tl.load(Place + r, mask=r < rows, other=0).to(tl.int64)
    i = tl.load(PositionIndex + r, mask=r < rows, other=0)
    j = tl.load(TimeIndex + r, mask=r < rows, other=0)
    pattern = i
    if EVENTS:
        pattern = tl.load(Pattern + r, mask=r < rows, other=0)
    return place, i, j, pattern


@triton.jit(do_not_specialize=FORWARD_RUNTIME)
def encode_forward_kernel(
    C, A, CWeight, CBias, AWeight, ABias, Action, Pattern, Position, PositionIndex, Time, TimeIndex, Place, Seed,
    X, Mask, Stats, rows, tiles, c_stride, a_stride, x_stride, action_stride, table_stride, threshold, scale, root,
    c_eps, a_eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, EVENTS: tl.constexpr, ATTRIBUTES: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """X[Place[r]] = dropout(root · row + Position[...] + Time[...]).

    EVENTS: row = LayerNorm(C) + LayerNorm(A) + Action[...], the norms' statistics to Stats; else row = C (context).
    """
    column = tl.arange(0, BD)
    inside = column < D
    c = column[None, :]
    quad = tl.arange(0, BD // 4)[None, :]
    if EVENTS:
        c_weight = (tl.load(CWeight + column, mask=inside, other=0.0).to(tl.float32) * root)[None, :]
        bias = tl.load(CBias + column, mask=inside, other=0.0).to(tl.float32)
        if ATTRIBUTES:
            a_weight = (tl.load(AWeight + column, mask=inside, other=0.0).to(tl.float32) * root)[None, :]
            bias += tl.load(ABias + column, mask=inside, other=0.0).to(tl.float32)
        bias = (bias * root)[None, :]
    if DROPOUT:
        seed = tl.load(Seed)
        key_low = seed.to(tl.uint32)
        key_high = (seed >> 32).to(tl.uint32)
        threshold = threshold.to(tl.uint32)
    c_step = c_stride.to(tl.int64) * 4
    a_step = a_stride.to(tl.int64) * 4
    x_step = x_stride.to(tl.int64) * 4
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # A tile's numbers are loaded one tile ahead, so that the rows they point to need not wait for them.
    next_place, next_i, next_j, next_pattern = _numbers(Place, PositionIndex, TimeIndex, Pattern, r, rows, EVENTS)
    for _ in range(tl.program_id(0), tiles, tl.num_programs(0)):
        ok = r < rows
        keep = ok[:, None] & inside[None, :]
        place, i, j = next_place, next_i[:, None], next_j[:, None]
        pattern = next_pattern[:, None]
        ahead = r + ROWS * tl.num_programs(0)
        next_place, next_i, next_j, next_pattern = _numbers(
            Place, PositionIndex, TimeIndex, Pattern, ahead, rows, EVENTS
        )
        row = r.to(tl.int64)[:, None]
        value = tl.load(C + row * c_step + c, mask=keep, other=0.0).to(tl.float32)
        if EVENTS:
            action = tl.load(Action + pattern * (action_stride * 4) + c, mask=keep, other=0.0).to(tl.float32)
            value, mean, rstd = normed(value, inside[None, :], c_eps, D)
            tl.store(Stats + r, mean, mask=ok)
            tl.store(Stats + rows + r, rstd, mask=ok)
            value = value * c_weight + bias + action * root
            if ATTRIBUTES:
                attributes = tl.load(A + row * a_step + c, mask=keep, other=0.0).to(tl.float32)
                a_hat, mean, rstd = normed(attributes, inside[None, :], a_eps, D)
                tl.store(Stats + 2 * rows.to(tl.int64) + r, mean, mask=ok)
                tl.store(Stats + 3 * rows.to(tl.int64) + r, rstd, mask=ok)
                value += a_hat * a_weight
        else:
            value *= root
        value += tl.load(Position + i * (table_stride * 4) + c, mask=keep, other=0.0).to(tl.float32)
        value += tl.load(Time + j * (table_stride * 4) + c, mask=keep, other=0.0).to(tl.float32)
        place = place[:, None]
        if DROPOUT:
            low = place.to(tl.uint32)
            high = (place >> 32).to(tl.uint32)
            bits = keep_bytes(key_low, key_high, low, high, quad.to(tl.uint32), threshold, SEGMENT)
            value = tl.where((spread_bytes(bits, ROWS, BD) & 8) != 0, value * scale, 0.0)
            bits = bits >> 3
            nibbles = (bits & 1) | ((bits >> 7) & 2) | ((bits >> 14) & 4) | ((bits >> 21) & 8)
            tl.store(Mask + place * (D // 4) + quad, nibbles.to(tl.uint8), mask=ok[:, None] & (quad < D // 4))
        tl.store(X + place * x_step + c, value.to(X.dtype.element_ty), mask=keep)
        r = ahead


@triton.jit(do_not_specialize=BACKWARD_RUNTIME)
def encode_backward_kernel(
    DX, Mask, Place, C, A, CWeight, AWeight, Stats, DC, DA, Partial,
    rows, tiles, c_stride, a_stride, x_stride, d_stride, factor,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, EVENTS: tl.constexpr, ATTRIBUTES: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """DC and DA from DX[Place[r]] · factor where it was kept; in Partial this program's sums for the norms' weights."""
    column = tl.arange(0, BD)
    inside = column < D
    c = column[None, :]
    quad = tl.arange(0, BD // 4)[None, :]
    if EVENTS:
        c_weight = tl.load(CWeight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        d_c_weight = tl.zeros((ROWS, BD), tl.float32)
        if ATTRIBUTES:
            a_weight = tl.load(AWeight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            d_a_weight = tl.zeros((ROWS, BD), tl.float32)
    c_step = c_stride.to(tl.int64) * 4
    a_step = a_stride.to(tl.int64) * 4
    x_step = x_stride.to(tl.int64) * 4
    d_step = d_stride.to(tl.int64) * 4
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    next_place = tl.load(Place + r, mask=r < rows, other=0)  # a tile ahead, as in the forward
    for _ in range(tl.program_id(0), tiles, tl.num_programs(0)):
        ok = r < rows
        keep = ok[:, None] & inside[None, :]
        place = next_place.to(tl.int64)[:, None]
        ahead = r + ROWS * tl.num_programs(0)
        next_place = tl.load(Place + ahead, mask=ahead < rows, other=0)
        row = r.to(tl.int64)[:, None]
        g = tl.load(DX + place * x_step + c, mask=keep, other=0.0).to(tl.float32) * factor
        if DROPOUT:
            nibbles = tl.load(Mask + place * (D // 4) + quad, mask=ok[:, None] & (quad < D // 4), other=0)
            g = tl.where(spread_nibbles(nibbles, ROWS, BD), g, 0.0)
        if EVENTS:
            x = tl.load(C + row * c_step + c, mask=keep, other=0.0).to(tl.float32)
            mean = tl.load(Stats + r, mask=ok, other=0.0)
            rstd = tl.load(Stats + rows + r, mask=ok, other=0.0)
            if ATTRIBUTES:
                a = tl.load(A + row * a_step + c, mask=keep, other=0.0).to(tl.float32)
                a_mean = tl.load(Stats + 2 * rows.to(tl.int64) + r, mask=ok, other=0.0)
                a_rstd = tl.load(Stats + 3 * rows.to(tl.int64) + r, mask=ok, other=0.0)
            xhat = tl.where(keep, (x - mean[:, None]) * rstd[:, None], 0.0)
            dx = norm_backward(g * c_weight, xhat, rstd[:, None], D)
            tl.store(DC + row * d_step + c, dx.to(DC.dtype.element_ty), mask=keep)
            d_c_weight += g * xhat
            if ATTRIBUTES:
                xhat = tl.where(keep, (a - a_mean[:, None]) * a_rstd[:, None], 0.0)
                da = norm_backward(g * a_weight, xhat, a_rstd[:, None], D)
                tl.store(DA + row * d_step + c, da.to(DA.dtype.element_ty), mask=keep)
                d_a_weight += g * xhat
        else:
            tl.store(DC + row * d_step + c, g.to(DC.dtype.element_ty), mask=keep)
        r = ahead
    if EVENTS:
        part = tl.program_id(0) * 2 * D + column
        tl.store(Partial + part, tl.sum(d_c_weight, axis=0), mask=inside)
        if ATTRIBUTES:
            tl.store(Partial + part + D, tl.sum(d_a_weight, axis=0), mask=inside)
