"""Triton kernels of the absorbed candidate attention: one pass over x forward, one read and one write of x backward.

Notation (see ``reference.py`` for the maths): x_hat_j = (x_j - mean_j) * rstd_j is a normalised row without the
LayerNorm's affine part, a *column* is one (candidate, head) pair, s = x_hat . qw + qc its score and
a = SiLU(alpha s) its weight, still to be divided by the attention normaliser.

How the kernels stay near the memory limit:

- Products take the rows as they lie in memory: x_hat . g = rstd * (x . g - mean * sum(g)), so nothing is normalised,
  rounded or written back first, and on Hopper the matrix unit reads the loaded tiles straight from shared memory. The
  sums corrected with are those of the rounded operands.
- The matrix unit wants 16 columns where one candidate of four heads needs four. Forward, a spare column of ones
  returns the row sum. Backward, qw and the weights' gradient operand gs interleave in one operand, so one product
  gives both s and da, and the LayerNorm backward's two row means follow from them without touching D elements:
  mean(dx_hat) = sum_k coef_k mean(g_k), mean(dx_hat * x_hat) = sum_k coef_k (x_hat . g_k) / D.
- Tiles of 64 rows (one warp group's matrix operand) are cut into NB blocks of DC columns, DC * NB >= D, to bound the
  registers that a block's fp32 result takes.
- Long sequences are cut into ``splits`` programs whose partial sums are added in a fixed order afterwards.

On Hopper and later the tiles arrive through tensor descriptors; elsewhere, and where D does not divide, through
pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from generative_recommenders.ops.common.triton_norm import norm_backward


@triton.jit
def _sequence_part(OFFSETS, TARGET_OFFSETS, b, split, splits, BN: tl.constexpr):
    """Rows [low, high) of sequence b that this split covers, and where the sequence and its candidates start."""
    start = tl.load(OFFSETS + b)
    length = (tl.load(OFFSETS + b + 1) - start).to(tl.int32)
    first_target = tl.load(TARGET_OFFSETS + b)
    targets = (tl.load(TARGET_OFFSETS + b + 1) - first_target).to(tl.int32)
    rows = tl.cdiv(tl.cdiv(length, splits), BN) * BN
    low = tl.minimum(split * rows, length)
    high = tl.minimum(low + rows, length)
    return start, length, first_target, targets, low, high


@triton.jit
def _load_block(X, DESC, start, t, high, stride_x, row, col, block: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """Block ``block`` of rows start + t ...: [BN, DC]. From ``high`` on zeros, or (TMA) the rows there."""
    if TMA:
        return DESC.load([(start + t).to(tl.int32), block * col.shape[0]])
    at = block * col.shape[0] + col
    mask = (t + row < high)[:, None]
    if (block + 1) * col.shape[0] > D:
        mask = mask & (at < D)[None, :]
    return tl.load(X + start * stride_x + (t + row)[:, None] * stride_x + at[None, :], mask=mask, other=0.0)


@triton.jit
def _load_stats(STATS, start, row, high):
    """Mean and 1 / standard deviation of the sequence's rows, [BN, 2]; zero from row ``high`` on."""
    at = row[:, None] * 2 + tl.arange(0, 2)[None, :]
    return tl.load(STATS + start * 2 + at, mask=(row < high)[:, None], other=0.0)


@triton.jit
def _one_over_norm(NORM, norm, NORM_TENSOR: tl.constexpr):
    """1 / attention normaliser, from the device where it is a tensor."""
    if NORM_TENSOR:
        return 1.0 / tl.load(NORM)
    return 1.0 / norm


@triton.jit
def _store_constant(out, k, value, valid, D: tl.constexpr, DQ: tl.constexpr):
    """A column's sum without x_hat behind its D others, and zeros up to DQ: products run over all DQ."""
    pad = tl.arange(0, DQ - D)
    values = tl.where((pad == 0)[None, :], value[:, None], 0.0)
    tl.store(out + k[:, None] * DQ + D + pad[None, :], values, mask=valid[:, None])


@triton.jit(do_not_specialize=["splits", "columns", "chunks"])
def absorbed_forward_kernel(
    X, DESC, OFFSETS, TARGET_OFFSETS, QW, SUMS, STATS, NORM, stride_x, splits, columns, chunks, alpha, eps, norm,
    D: tl.constexpr, DQ: tl.constexpr, H: tl.constexpr, TC: tl.constexpr, NB: tl.constexpr, DC: tl.constexpr,
    KC: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, NORM_TENSOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Per (sequence, split, chunk of candidates). Bytes: T D (read) + 8 T (statistics); FLOPs 4 T D KC.

    X [T, D]; DESC its descriptor with blocks [BN, DC], or X; OFFSETS, TARGET_OFFSETS int64 [B + 1]; QW fp32 [C * H,
    DQ], qw in columns 0 ... D - 1, qc in column D; SUMS fp32 [splits, C * H, DQ], sum a x_hat, and sum a in column D,
    both over the normaliser; STATS fp32 [T, 2], mean and 1 / standard deviation of every row; NORM fp32 [1], the
    normaliser, read if NORM_TENSOR. ``columns`` is C * H; TC candidates per program, TC * H < KC.
    """
    pid = tl.program_id(0)
    chunk = pid % chunks
    split = (pid // chunks) % splits
    b = pid // chunks // splits
    start, length, first_target, targets, low, high = _sequence_part(OFFSETS, TARGET_OFFSETS, b, split, splits, BN)
    history = length - targets
    first = chunk * TC
    if first < targets:
        dtype: tl.constexpr = X.dtype.element_ty
        col = tl.arange(0, DC)
        k = tl.arange(0, KC)
        row = tl.arange(0, BN)
        own = history + first + k // H
        column = (first_target + first) * H
        valid = k < tl.minimum(targets - first, TC) * H
        ones = (k == KC - 1)[None, :]
        qc = tl.load(QW + column * DQ + k * DQ + D, mask=valid, other=0.0)
        gs = ()
        acc = ()
        g_sum = tl.zeros([KC], tl.float32)
        for i in tl.static_range(NB):
            at = i * DC + col
            g = tl.load(
                QW + column * DQ + k[None, :] * DQ + at[:, None], mask=valid[None, :] & (at < D)[:, None], other=0.0
            )
            g = g.to(dtype)
            g_sum += tl.sum(g.to(tl.float32), 0)
            gs = gs + (tl.where(ones, 1.0, g.to(tl.float32)).to(dtype),)
            acc = acc + (tl.zeros([DC, KC], tl.float32),)
        mean_sum = tl.zeros([BN, KC], tl.float32)
        weight_sum = tl.zeros([BN, KC], tl.float32)
        for t in tl.range(low, high, BN, num_stages=STAGES):
            raw = tl.zeros([BN, KC], tl.float32)
            xs = ()
            for i in tl.static_range(NB):
                x = _load_block(X, DESC, start, t, high, stride_x, row, col, i, D, TMA)
                xs = xs + (x,)
                raw = tl.dot(x, gs[i], raw, input_precision=PRECISION)
            inside = t + row < high
            mean = tl.sum(tl.where(ones, raw, 0.0), 1) / D
            squares = tl.zeros([BN], tl.float32)
            for i in tl.static_range(NB):
                centred = xs[i].to(tl.float32) - mean[:, None]
                if (i + 1) * DC > D:
                    centred = tl.where((i * DC + col < D)[None, :], centred, 0.0)
                squares += tl.sum(centred * centred, 1)
            rstd = tl.rsqrt(squares / D + eps)
            z = ((raw - mean[:, None] * g_sum[None, :]) * rstd[:, None] + qc[None, :]) * alpha
            local = (t + row)[:, None]
            seen = ((local < history) | (local == own[None, :])) & inside[:, None] & valid[None, :]
            a = tl.where(seen, z / (1.0 + tl.exp(-z)), 0.0)
            ar = (a * rstd[:, None]).to(dtype)
            added = ()
            for i in tl.static_range(NB):
                added = added + (tl.dot(tl.trans(xs[i]), ar, acc[i], input_precision=PRECISION),)
            acc = added
            mean_sum += ar.to(tl.float32) * mean[:, None]
            weight_sum += a
            if chunk == 0:
                stats_at = local * 2 + tl.arange(0, 2)[None, :]
                tl.store(STATS + start * 2 + stats_at, tl.join(mean, rstd), mask=inside[:, None])
        scale = _one_over_norm(NORM, norm, NORM_TENSOR)
        out = SUMS + (split.to(tl.int64) * columns + column) * DQ
        shift = tl.sum(mean_sum, 0)[None, :]
        for i in tl.static_range(NB):
            at = i * DC + col
            keep = valid[None, :] & (at < D)[:, None]
            tl.store(out + k[None, :] * DQ + at[:, None], (acc[i] - shift) * scale, mask=keep)
        _store_constant(out, k, tl.sum(weight_sum, 0) * scale, valid, D, DQ)


@triton.jit
def _load_pair(QW, GS, k2, valid, at, D: tl.constexpr, DQ: tl.constexpr, dtype: tl.constexpr):
    """Operand [DC, 2 KH]: qw in even columns, gs in odd ones."""
    odd = k2 % 2 == 1
    offset = (k2 // 2)[None, :] * DQ + at[:, None]
    mask = valid[None, :] & (at < D)[:, None]
    qw = tl.load(QW + offset, mask=mask & (~odd)[None, :], other=0.0)
    gs = tl.load(GS + offset, mask=mask & odd[None, :], other=0.0)
    return (qw + gs).to(dtype)


@triton.jit
def _coefficients(
    raw, g_sum, qc, ga, mean, rstd, seen, alpha, D: tl.constexpr, BN: tl.constexpr, KH: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """From x . [qw, gs] to dx_hat's coefficients [BN, 2 KH] (ds for qw, a for gs), its row means, and ds [BN, KH]."""
    projection = (raw - mean[:, None] * g_sum[None, :]) * rstd[:, None]
    on_qw, on_gs = tl.split(tl.reshape(projection, (BN, KH, 2)))
    z = (on_qw + qc[None, :]) * alpha
    sig = 1.0 / (1.0 + tl.exp(-z))
    a = tl.where(seen, z * sig, 0.0)
    ds = tl.where(seen, (on_gs + ga[None, :]) * (sig * (1.0 + z * (1.0 - sig))) * alpha, 0.0)
    coef = tl.reshape(tl.join(ds, a), (BN, 2 * KH)).to(dtype)
    rounded = coef.to(tl.float32)
    c1 = tl.sum(rounded * g_sum[None, :], 1) / D
    c2 = tl.sum(rounded * projection, 1) / D
    return coef, c1, c2, ds


@triton.jit
def _layer_norm_slope(c1, c2, mean, rstd, row, dtype: tl.constexpr):
    """The LayerNorm backward's term in x as an operand, diag(-c2 rstd) [BN, BN], and what is left of it, [BN].

    dx = (dx_hat - c1 - (x - mean) rstd c2) rstd. As a product, x need not come through registers.
    """
    slope = (-c2 * rstd).to(dtype)
    diagonal = tl.where(row[:, None] == row[None, :], slope[:, None], tl.zeros_like(slope)[:, None])
    return diagonal, -c1 - mean * slope.to(tl.float32)


@triton.jit
def _store_dx(DX, dx, start, t, high, stride_dx, row, at, D: tl.constexpr):
    """Rows start + t ... of one block of columns."""
    out = DX + start * stride_dx + (t + row)[:, None] * stride_dx + at[None, :]
    tl.store(out, dx.to(DX.dtype.element_ty), mask=(t + row < high)[:, None] & (at < D)[None, :])


@triton.jit(do_not_specialize=["splits", "columns", "chunks"])
def absorbed_backward_kernel(
    X, DESC, OFFSETS, TARGET_OFFSETS, QW, GS, STATS, NORM, DX, SUMS, stride_x, stride_dx, splits, columns, chunks,
    alpha, norm, D: tl.constexpr, DQ: tl.constexpr, H: tl.constexpr, TC: tl.constexpr, NB: tl.constexpr,
    DC: tl.constexpr, KH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    WRITE_DX: tl.constexpr, NORM_TENSOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per (sequence, split, chunk). Bytes: T D read, with WRITE_DX (one chunk) T D written; FLOPs 12 T D KH.

    Arguments as forward, and: GS fp32 [C * H, DQ], gradient of the forward's sums, ga in column D; DX [T, D]; SUMS fp32
    [splits, C * H, DQ], sum ds x_hat, and sum ds in column D, both over the normaliser. TC * H <= KH.
    """
    pid = tl.program_id(0)
    chunk = pid % chunks
    split = (pid // chunks) % splits
    b = pid // chunks // splits
    start, length, first_target, targets, low, high = _sequence_part(OFFSETS, TARGET_OFFSETS, b, split, splits, BN)
    history = length - targets
    first = chunk * TC
    if WRITE_DX or first < targets:
        dtype: tl.constexpr = X.dtype.element_ty
        count = tl.maximum(tl.minimum(targets - first, TC), 0)
        col = tl.arange(0, DC)
        k = tl.arange(0, KH)
        k2 = tl.arange(0, 2 * KH)
        row = tl.arange(0, BN)
        own = history + first + k // H
        column = (first_target + first) * H
        valid = k < count * H
        qc = tl.load(QW + column * DQ + k * DQ + D, mask=valid, other=0.0)
        ga = tl.load(GS + column * DQ + k * DQ + D, mask=valid, other=0.0)
        gs = ()
        acc = ()
        g_sum = tl.zeros([2 * KH], tl.float32)
        for i in tl.static_range(NB):
            g = _load_pair(QW + column * DQ, GS + column * DQ, k2, k2 // 2 < count * H, i * DC + col, D, DQ, dtype)
            g_sum += tl.sum(g.to(tl.float32), 0)
            gs = gs + (g,)
            acc = acc + (tl.zeros([DC, 2 * KH], tl.float32),)
        mean_sum = tl.zeros([BN, 2 * KH], tl.float32)
        ds_sum = tl.zeros([BN, KH], tl.float32)
        scale = _one_over_norm(NORM, norm, NORM_TENSOR)
        known = tl.where(targets > 0, high, 0)  # without candidates there are no statistics, and dx is zero
        stats = _load_stats(STATS, start, low + row, known)
        for t in tl.range(low, high, BN, num_stages=STAGES):
            raw = tl.zeros([BN, 2 * KH], tl.float32)
            xs = ()
            for i in tl.static_range(NB):
                x = _load_block(X, DESC, start, t, high, stride_x, row, col, i, D, TMA)
                xs = xs + (x,)
                raw = tl.dot(x, gs[i], raw, input_precision=PRECISION)
            mean, rstd = tl.split(stats)
            stats = _load_stats(STATS, start, t + BN + row, known)  # the next tile's, ahead of their use
            local = (t + row)[:, None]
            seen = ((local < history) | (local == own[None, :])) & (local < high) & valid[None, :]
            coef, c1, c2, ds = _coefficients(raw, g_sum, qc, ga, mean, rstd, seen, alpha, D, BN, KH, dtype)
            cr = (coef.to(tl.float32) * rstd[:, None]).to(dtype)
            mean_sum += cr.to(tl.float32) * mean[:, None]
            ds_sum += ds
            diagonal, shift = _layer_norm_slope(c1, c2, mean, rstd, row, dtype)
            factor = rstd * scale
            added = ()
            for i in tl.static_range(NB):
                added = added + (tl.dot(tl.trans(xs[i]), cr, acc[i], input_precision=PRECISION),)
                if WRITE_DX:
                    dx = tl.dot(coef, tl.trans(gs[i]), input_precision=PRECISION)
                    dx = tl.dot(diagonal, xs[i], dx, input_precision=PRECISION)
                    dx = dx * factor[:, None] + (shift * factor)[:, None]
                    _store_dx(DX, dx, start, t, high, stride_dx, row, i * DC + col, D)
            acc = added
        out = SUMS + (split.to(tl.int64) * columns + column) * DQ
        even = (k2 % 2 == 0) & (k2 // 2 < count * H)
        shift = tl.sum(mean_sum, 0)[None, :]
        for i in tl.static_range(NB):
            at = i * DC + col
            keep = even[None, :] & (at < D)[:, None]
            tl.store(out + (k2 // 2)[None, :] * DQ + at[:, None], (acc[i] - shift) * scale, mask=keep)
        _store_constant(out, k, tl.sum(ds_sum, 0) * scale, valid, D, DQ)


@triton.jit(do_not_specialize=["splits"])
def absorbed_dx_kernel(
    X, OFFSETS, TARGET_OFFSETS, QW, GS, STATS, NORM, DX, stride_x, stride_dx, splits, alpha, norm, D: tl.constexpr,
    DQ: tl.constexpr, H: tl.constexpr, TC: tl.constexpr, NB: tl.constexpr, DC: tl.constexpr, KH: tl.constexpr,
    BN: tl.constexpr, NORM_TENSOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx where a sequence has more candidates than one operand holds: per tile of rows, a loop over the chunks.

    The arguments are those of ``absorbed_backward_kernel``, which supplies the sums in a launch without dx. Bytes: T D
    read and written, plus the operands of all chunks once per tile (from cache).
    """
    pid = tl.program_id(0)
    split = pid % splits
    b = pid // splits
    start, length, first_target, targets, low, high = _sequence_part(OFFSETS, TARGET_OFFSETS, b, split, splits, BN)
    history = length - targets
    dtype: tl.constexpr = X.dtype.element_ty
    col = tl.arange(0, DC)
    k = tl.arange(0, KH)
    k2 = tl.arange(0, 2 * KH)
    row = tl.arange(0, BN)
    scale = _one_over_norm(NORM, norm, NORM_TENSOR)
    for t in range(low, high, BN):
        local = (t + row)[:, None]
        mean, rstd = tl.split(_load_stats(STATS, start, t + row, tl.where(targets > 0, high, 0)))
        xs = ()
        dx_hats = ()
        for i in tl.static_range(NB):
            xs = xs + (_load_block(X, X, start, t, high, stride_x, row, col, i, D, False),)
            dx_hats = dx_hats + (tl.zeros([BN, DC], tl.float32),)
        c1 = tl.zeros([BN], tl.float32)
        c2 = tl.zeros([BN], tl.float32)
        for first in range(0, targets, TC):
            count = tl.minimum(targets - first, TC)
            column = (first_target + first) * H
            valid = k < count * H
            qc = tl.load(QW + column * DQ + k * DQ + D, mask=valid, other=0.0)
            ga = tl.load(GS + column * DQ + k * DQ + D, mask=valid, other=0.0)
            g_sum = tl.zeros([2 * KH], tl.float32)
            raw = tl.zeros([BN, 2 * KH], tl.float32)
            gs = ()
            for i in tl.static_range(NB):
                g = _load_pair(QW + column * DQ, GS + column * DQ, k2, k2 // 2 < count * H, i * DC + col, D, DQ, dtype)
                g_sum += tl.sum(g.to(tl.float32), 0)
                raw = tl.dot(xs[i], g, raw, input_precision=PRECISION)
                gs = gs + (g,)
            own = history + first + k // H
            seen = ((local < history) | (local == own[None, :])) & (local < high) & valid[None, :]
            coef, d1, d2, _ = _coefficients(raw, g_sum, qc, ga, mean, rstd, seen, alpha, D, BN, KH, dtype)
            c1 += d1
            c2 += d2
            added = ()
            for i in tl.static_range(NB):
                added = added + (tl.dot(coef, tl.trans(gs[i]), dx_hats[i], input_precision=PRECISION),)
            dx_hats = added
        diagonal, shift = _layer_norm_slope(c1, c2, mean, rstd, row, dtype)
        factor = rstd * scale
        for i in tl.static_range(NB):
            dx = tl.dot(diagonal, xs[i], dx_hats[i], input_precision=PRECISION)
            dx = dx * factor[:, None] + (shift * factor)[:, None]
            _store_dx(DX, dx, start, t, high, stride_dx, row, i * DC + col, D)


@triton.jit
def candidate_rows_backward_kernel(
    DX, ROWS, X, STATS, DX_HAT, RESIDUAL, stride_dx, stride_x, D: tl.constexpr, DP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add the candidate rows' residual, U and Q gradients to dx: C rows are read and written, nothing of size T.

    DX [T, D], updated in place at ROWS int64 [C]; X [T, D]; STATS fp32 [T, 2]; DX_HAT [C, D], gradient of the
    candidates' normalised rows (from U and Q); RESIDUAL [C, D], that of their own rows, read if HAS_RESIDUAL.
    """
    c = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + c)
    d = tl.arange(0, DP)
    mask = d < D
    mean, rstd = tl.load(STATS + row * 2), tl.load(STATS + row * 2 + 1)
    x_hat = (tl.load(X + row * stride_x + d, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    g = tl.load(DX_HAT + c * D + d, mask=mask, other=0.0).to(tl.float32)
    dx = norm_backward(g, x_hat, rstd, D) + tl.load(DX + row * stride_dx + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        dx += tl.load(RESIDUAL + c * D + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(DX + row * stride_dx + d, dx.to(DX.dtype.element_ty), mask=mask)
