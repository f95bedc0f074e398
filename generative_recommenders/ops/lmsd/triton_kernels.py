"""LMSD kernels. Bytes per element of a [N, D] input, bf16, all segments: forward 4 read + 6 written (+ 1 mask),
backward 10 read + 4 written (+ 1 mask, + 6 written if y is restored); about 25 floating-point operations each, so both
are memory-bound as long as Philox (15 wide products per four columns and segment) hides behind the traffic.

A *unit* is what one set of statistics covers: a row, or with GROUPS > 1 one row's block of WIDTH = D / GROUPS columns.
Programs are persistent: each walks over blocks of UNITS units with the stride of the grid. Row strides come divided by
VECTOR, so that the compiler sees their divisibility without specialising on their values; VECTOR is also the number of
neighbouring columns per thread. With dropout it must be 4, the columns of one Philox counter: then a counter's words,
its packed mask word and its four columns meet in one thread and nothing is exchanged between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from generative_recommenders.ops.common.triton_norm import norm_backward
from generative_recommenders.ops.common.triton_philox import keep_bytes, spread_bytes

RUNTIME = [
    "total", "x_stride", "u_stride", "y_stride", "dx_stride", "du_stride", "mask_stride", "seed_low", "seed_high",
    "threshold",
]  # fmt: skip


@triton.jit
def _unit_places(block, total, UNITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """int64 [UNITS, 1] unit numbers, their rows, their first columns, and which of them exist."""
    unit = (block * UNITS + tl.arange(0, UNITS))[:, None]
    if GROUPS == 1:
        row = unit
        first = tl.zeros((UNITS, 1), tl.int32)
    else:
        row = unit // GROUPS
        first = ((unit - row * GROUPS) * WIDTH).to(tl.int32)
    return unit, row, first, unit < total


@triton.jit
def _load_columns(pointer, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Weight or bias per column, float32 [1, BLOCK]."""
    # Loaded in one dimension: a two-dimensional load would press its own thread layout on what it is multiplied with.
    column = tl.arange(0, BLOCK)
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _scaled_sigmoid(u, factor):
    """``sigmoid(u) / factor`` as the square of ``rsqrt(factor * (1 + 2**(-u log2 e)))``: no division."""
    root = tl.rsqrt(tl.exp2(u * -1.4426950408889634) * factor + factor)
    return root * root


@triton.jit(do_not_specialize=RUNTIME)
def lmsd_forward_kernel(
    X, U, W, B, Y, MEAN, RSTD, MASK, ROWS, SEED,
    total, x_stride, u_stride, y_stride, mask_stride, seed_low, seed_high, threshold, scale, keep, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr,
    SILU: tl.constexpr, CONCAT_U: tl.constexpr, CONCAT_X: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """y, mean, rstd and packed mask. ``keep`` is 1 - dropout ratio and ``scale`` its reciprocal; 1 without dropout."""
    total = total.to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    column_ok = columns < WIDTH
    if GROUPS == 1:
        w = _load_columns(W, WIDTH, BLOCK)
        b = _load_columns(B, WIDTH, BLOCK)
    if DROPOUT:
        quads = tl.arange(0, BLOCK // 4)[None, :]
        if SEED is not None:
            seed = tl.load(SEED)
            key_low = seed.to(tl.uint32)
            key_high = (seed >> 32).to(tl.uint32)
        else:
            key_low = seed_low.to(tl.uint32)
            key_high = seed_high.to(tl.uint32)
        threshold = threshold.to(tl.uint32)
        # A zero the compiler cannot see: with a literal it would move the rounding to 16 bits before the selection and
        # pay two byte permutations per pair of elements to take the halves apart and join them again.
        zero = eps * 0.0
    blocks = (total + UNITS - 1) // UNITS
    for block in tl.range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0), num_stages=1):
        unit, row, first, unit_ok = _unit_places(block, total, UNITS, GROUPS, WIDTH)
        at = first + columns
        ok = unit_ok & column_ok
        x = tl.load(X + row * (x_stride.to(tl.int64) * VECTOR) + at, mask=ok, other=0.0).to(tl.float32)
        u = tl.load(U + row * (u_stride.to(tl.int64) * VECTOR) + at, mask=ok, other=0.0).to(tl.float32)
        if GROUPS > 1:
            w = tl.load(W + first // WIDTH).to(tl.float32)
            b = tl.load(B + first // WIDTH).to(tl.float32)
        if DROPOUT:
            number = row
            if ROWS is not None:
                number = tl.load(ROWS + row, mask=unit_ok, other=0).to(tl.int64)
            low = number.to(tl.uint32)
            high = (number >> 32).to(tl.uint32)
            quad = (first // 4 + quads).to(tl.uint32) if GROUPS > 1 else quads.to(tl.uint32)
        place = Y + row * (y_stride.to(tl.int64) * VECTOR) + at
        a = u * _scaled_sigmoid(u, keep) if SILU else u * scale
        packed = tl.zeros((UNITS, BLOCK // 4), tl.uint32)
        if CONCAT_U:
            part = a
            if DROPOUT:
                bits = keep_bytes(key_low, key_high, low, high, quad, threshold, 2)
                packed |= bits
                part = tl.where((spread_bytes(bits, UNITS, BLOCK) & 4) != 0, a, zero)
            tl.store(place, part.to(Y.dtype.element_ty), mask=ok)
            place += GROUPS * WIDTH
        mean = tl.sum(x, 1)[:, None] / WIDTH
        if CONCAT_X:
            part = x
            if DROPOUT:
                bits = keep_bytes(key_low, key_high, low, high, quad, threshold, 1)
                packed |= bits
                part = tl.where((spread_bytes(bits, UNITS, BLOCK) & 2) != 0, x * scale, zero)
            tl.store(place, part.to(Y.dtype.element_ty), mask=ok)
            place += GROUPS * WIDTH
        centred = tl.where(column_ok, x - mean, 0.0) if BLOCK != WIDTH else x - mean
        rstd = tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / WIDTH + eps)
        y = (centred * rstd * w + b) * a
        if DROPOUT:
            bits = keep_bytes(key_low, key_high, low, high, quad, threshold, 0)
            packed |= bits
            y = tl.where((spread_bytes(bits, UNITS, BLOCK) & 1) != 0, y, zero)
            tl.store(MASK + row * mask_stride + (first // 4 + quads), packed, mask=unit_ok & (quads < WIDTH // 4))
        tl.store(place, y.to(Y.dtype.element_ty), mask=ok)
        tl.store(MEAN + unit, mean, mask=unit_ok)
        tl.store(RSTD + unit, rstd, mask=unit_ok)


@triton.jit
def _load_upstream(place, bits, bit, scale, ok, DROPOUT: tl.constexpr):
    """One segment of dy as float32, zero where forward dropped and scaled elsewhere."""
    dy = tl.load(place, mask=ok, other=0.0).to(tl.float32)
    if DROPOUT:
        dy = tl.where((bits & bit) != 0, dy * scale, 0.0)
    return dy


@triton.jit
def _dropped(value, bits, bit, scale, DROPOUT: tl.constexpr):
    """One segment of y by forward's decisions."""
    if DROPOUT:
        value = tl.where((bits & bit) != 0, value * scale, 0.0)
    return value


@triton.jit(do_not_specialize=RUNTIME)
def lmsd_backward_kernel(
    DY, X, U, W, B, MEAN, RSTD, MASK, DX, DU, DW, DB, DU_SUMS,
    total, y_stride, x_stride, u_stride, dx_stride, du_stride, mask_stride, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr,
    SILU: tl.constexpr, CONCAT_U: tl.constexpr, CONCAT_X: tl.constexpr, DROPOUT: tl.constexpr,
    RESTORE_Y: tl.constexpr,
):  # fmt: skip
    """dx, du, and float32 parts of dweight and dbias: per program and column, or with groups per unit.

    DU_SUMS, if there (one group only): parts of du's column sums as well. RESTORE_Y: y, as forward made it, takes dy's
    place; everything it needs is at hand here, the mask included.
    """
    total = total.to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    column_ok = columns < WIDTH
    if GROUPS == 1:
        w = _load_columns(W, WIDTH, BLOCK)
        b = _load_columns(B, WIDTH, BLOCK)
        dw = tl.zeros((UNITS, BLOCK), tl.float32)
        db = tl.zeros((UNITS, BLOCK), tl.float32)
        du_sums = tl.zeros((UNITS, BLOCK), tl.float32)
    blocks = (total + UNITS - 1) // UNITS
    for block in tl.range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0), num_stages=1):
        unit, row, first, unit_ok = _unit_places(block, total, UNITS, GROUPS, WIDTH)
        at = first + columns
        ok = unit_ok & column_ok
        x = tl.load(X + row * (x_stride.to(tl.int64) * VECTOR) + at, mask=ok, other=0.0).to(tl.float32)
        u = tl.load(U + row * (u_stride.to(tl.int64) * VECTOR) + at, mask=ok, other=0.0).to(tl.float32)
        bits = 0
        if DROPOUT:
            bits = tl.load(MASK + row * (mask_stride.to(tl.int64) * VECTOR) + at, mask=ok, other=0)
        place = DY + row * (y_stride.to(tl.int64) * VECTOR) + at
        if CONCAT_U:
            da = _load_upstream(place, bits, 4, scale, ok, DROPOUT)
            place += GROUPS * WIDTH
        if CONCAT_X:
            dx_cat = _load_upstream(place, bits, 2, scale, ok, DROPOUT)
            place += GROUPS * WIDTH
        dz = _load_upstream(place, bits, 1, scale, ok, DROPOUT)
        mean = tl.load(MEAN + unit, mask=unit_ok, other=0.0)
        rstd = tl.load(RSTD + unit, mask=unit_ok, other=0.0)
        if GROUPS > 1:
            w = tl.load(W + first // WIDTH).to(tl.float32)
            b = tl.load(B + first // WIDTH).to(tl.float32)
        x_hat = (x - mean) * rstd
        ell = x_hat * w + b
        d_act = dz * ell
        if CONCAT_U:
            d_act += da
        if SILU:
            sigmoid = _scaled_sigmoid(u, 1.0)
            a = u * sigmoid
            du = d_act * (sigmoid * (1.0 + u - a))
        else:
            a = u
            du = d_act
        if RESTORE_Y:
            # No thread may overwrite what another has yet to read.
            tl.debug_barrier()
            place = DY + row * (y_stride.to(tl.int64) * VECTOR) + at
            if CONCAT_U:
                tl.store(place, _dropped(a, bits, 4, scale, DROPOUT).to(DY.dtype.element_ty), mask=ok)
                place += GROUPS * WIDTH
            if CONCAT_X:
                tl.store(place, _dropped(x, bits, 2, scale, DROPOUT).to(DY.dtype.element_ty), mask=ok)
                place += GROUPS * WIDTH
            tl.store(place, _dropped(ell * a, bits, 1, scale, DROPOUT).to(DY.dtype.element_ty), mask=ok)
        tl.store(DU + row * (du_stride.to(tl.int64) * VECTOR) + at, du.to(DU.dtype.element_ty), mask=ok)
        d_ell = dz * a
        dx = norm_backward(d_ell * w, x_hat, rstd, WIDTH)
        if CONCAT_X:
            dx += dx_cat
        tl.store(DX + row * (dx_stride.to(tl.int64) * VECTOR) + at, dx.to(DX.dtype.element_ty), mask=ok)
        if GROUPS == 1:
            if DU_SUMS is not None:
                du_sums += du
            db += d_ell
            if DW is not None:
                dw += d_ell * x_hat
        else:
            tl.store(DB + unit, tl.sum(d_ell, 1)[:, None], mask=unit_ok)
            if DW is not None:
                tl.store(DW + unit, tl.sum(d_ell * x_hat, 1)[:, None], mask=unit_ok)
    if GROUPS == 1:
        part = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
        tl.store(DB + part, tl.sum(db, 0), mask=tl.arange(0, BLOCK) < WIDTH)
        if DW is not None:
            tl.store(DW + part, tl.sum(dw, 0), mask=tl.arange(0, BLOCK) < WIDTH)
        if DU_SUMS is not None:
            tl.store(DU_SUMS + part, tl.sum(du_sums, 0), mask=tl.arange(0, BLOCK) < WIDTH)
