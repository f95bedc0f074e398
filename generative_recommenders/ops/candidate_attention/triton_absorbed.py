"""Triton kernels of the absorbed candidate attention: one pass over x forward, one read and one write of x backward.

Notation (see ``reference.py`` for the maths): x_hat_j = (x_j - mean_j) * rstd_j is a normalised row without the
LayerNorm's affine part, a *column* is one (candidate, head) pair, s = x_hat . qw + qc its score and
a = SiLU(alpha s) its weight, still to be divided by the attention normaliser.

How the kernels stay near the memory limit:

- A tile of rows is three-dimensional, [W, BN, DC]: W chunks of DC columns, one per warp. ``tl.dot`` with a leading
  batch axis gives each chunk to one warp, so a tile is read from shared memory once per product, not once per warp,
  and the per-sequence operand stays in registers.
- Products take the rows as they lie in memory: x_hat . g = rstd * (x . g - mean * sum(g)), so nothing is normalised,
  rounded or written back first; the sums corrected with are those of the rounded operands.
- The matrix unit wants 16 columns where one candidate of four heads needs four. Forward, a spare column of ones
  returns the row sum. Backward, qw and the weights' gradient operand gs interleave in one operand, so one product
  gives both s and da, and the LayerNorm backward's two row means follow from them without touching D elements:
  mean(dx_hat) = sum_k coef_k mean(g_k), mean(dx_hat * x_hat) = sum_k coef_k (x_hat . g_k) / D.
- Long sequences are cut into ``splits`` programs whose partial sums are added in a fixed order afterwards.

On Hopper and later the tiles arrive through tensor descriptors (a swizzled, conflict-free layout); elsewhere, and
where D is no power of two, through pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _load_tile(X, DESC, base, start, t, high, stride_x, col, row, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr):
    """Rows start + t ... as [W, BN, DC]; rows past ``high`` are the next sequence's (TMA) or zero: mask their weights."""
    if TMA:
        return DESC.load([0, (start + t).to(tl.int32), 0])
    mask = (t + row < high)[None, :, None]
    if D != DP:
        mask = mask & (col < D)
    return tl.load(base + (t + row)[None, :, None] * stride_x + col, mask=mask, other=0.0)


@triton.jit
def _load_stats(STATS, start, row, high):
    """Mean and 1 / standard deviation of the sequence's rows, [BN, 2]; zero from row ``high`` on."""
    at = row[:, None] * 2 + tl.arange(0, 2)[None, :]
    return tl.load(STATS + start * 2 + at, mask=(row < high)[:, None], other=0.0)


@triton.jit
def _store_constant(out, k, value, valid, D: tl.constexpr, DQ: tl.constexpr):
    """A column's sum without x_hat behind its D others, and zeros up to DQ: products run over all DQ."""
    pad = tl.arange(0, DQ - D)
    values = tl.where((pad == 0)[None, :], value[:, None], 0.0)
    tl.store(out + k[:, None] * DQ + D + pad[None, :], values, mask=valid[:, None])


@triton.jit
def _silu_and_slope(z):
    """SiLU(z) and its derivative."""
    sig = 1.0 / (1.0 + tl.exp(-z))
    return z * sig, sig * (1.0 + z * (1.0 - sig))


@triton.jit(do_not_specialize=["splits", "columns", "chunks"])
def absorbed_forward_kernel(
    X,  # [T, D]
    DESC,  # descriptor of X as [W, T, DC], or X
    OFFSETS,  # int64 [B + 1]
    TARGET_OFFSETS,  # int64 [B + 1]
    QW,  # fp32 [C * H, DQ]: qw in columns 0 ... D - 1, qc in column D
    SUMS,  # fp32 [splits, C * H, DQ]: sum a x_hat, sum a in column D, both over the normaliser
    STATS,  # fp32 [T, 2]: mean and 1 / standard deviation of every row
    NORM,  # fp32 [1], the normaliser, read if NORM_TENSOR
    stride_x,
    splits,
    columns,  # C * H
    chunks,
    alpha,
    eps,
    norm,
    D: tl.constexpr,
    DQ: tl.constexpr,
    H: tl.constexpr,
    TC: tl.constexpr,  # candidates per program, TC * H < KC
    W: tl.constexpr,
    DC: tl.constexpr,
    KC: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    NORM_TENSOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Per (sequence, split, chunk of candidates). Bytes: T D (read) + 8 T (statistics); FLOPs 4 T D KC."""
    pid = tl.program_id(0)
    chunk = pid % chunks
    split = (pid // chunks) % splits
    b = pid // chunks // splits
    start, length, first_target, targets, low, high = _sequence_part(OFFSETS, TARGET_OFFSETS, b, split, splits, BN)
    history = length - targets
    first = chunk * TC
    if first < targets:
        count = tl.minimum(targets - first, TC)
        c3 = tl.arange(0, W)[:, None, None] * DC + tl.arange(0, DC)[None, None, :]
        k = tl.arange(0, KC)
        row = tl.arange(0, BN)
        own = history + first + k // H
        column = (first_target + first) * H
        qw_ptr = QW + column * DQ
        valid = k < count * H
        mask3 = valid[None, :, None] & (c3 < D)
        g = tl.load(qw_ptr + k[None, :, None] * DQ + c3, mask=mask3, other=0.0).to(X.dtype.element_ty)
        qc = tl.load(qw_ptr + k * DQ + D, mask=valid, other=0.0)
        g_sum = tl.sum(tl.sum(g.to(tl.float32), 2), 0)
        g = tl.where((k == KC - 1)[None, :, None], 1.0, g.to(tl.float32)).to(X.dtype.element_ty)
        g = tl.permute(g, (0, 2, 1))
        acc = tl.zeros([W, KC, DC], tl.float32)
        mean_sum = tl.zeros([BN, KC], tl.float32)
        weight_sum = tl.zeros([BN, KC], tl.float32)
        base = X + start * stride_x
        for t in tl.range(low, high, BN, num_stages=STAGES):
            x = _load_tile(X, DESC, base, start, t, high, stride_x, c3, row, D, W * DC, TMA)
            inside = t + row < high
            raw = tl.sum(tl.dot(x, g, input_precision=PRECISION), 0)
            mean = tl.sum(tl.where((k == KC - 1)[None, :], raw, 0.0), 1) / D
            centred = x.to(tl.float32) - mean[None, :, None]
            if D != W * DC:
                centred = tl.where(c3 < D, centred, 0.0)
            rstd = tl.rsqrt(tl.sum(tl.sum(centred * centred, 2), 0) / D + eps)
            z = ((raw - mean[:, None] * g_sum[None, :]) * rstd[:, None] + qc[None, :]) * alpha
            a = z / (1.0 + tl.exp(-z))
            local = (t + row)[:, None]
            seen = ((local < history) | (local == own[None, :])) & inside[:, None] & valid[None, :]
            a = tl.where(seen, a, 0.0)
            ar = (a * rstd[:, None]).to(x.dtype)
            art = tl.broadcast_to(tl.trans(ar)[None, :, :], (W, KC, BN))
            acc = tl.dot(art, x, acc, input_precision=PRECISION)
            mean_sum += ar.to(tl.float32) * mean[:, None]
            weight_sum += a
            if chunk == 0:
                at = (t + row)[:, None] * 2 + tl.arange(0, 2)[None, :]
                tl.store(STATS + start * 2 + at, tl.join(mean, rstd), mask=inside[:, None])
        if NORM_TENSOR:
            scale = 1.0 / tl.load(NORM)
        else:
            scale = 1.0 / norm
        out = SUMS + (split.to(tl.int64) * columns + column) * DQ
        tl.store(out + k[None, :, None] * DQ + c3, (acc - tl.sum(mean_sum, 0)[None, :, None]) * scale, mask=mask3)
        _store_constant(out, k, tl.sum(weight_sum, 0) * scale, valid, D, DQ)


@triton.jit
def _load_pair(QW, GS, column, count, k2, c3, D: tl.constexpr, DQ: tl.constexpr, H: tl.constexpr, dtype: tl.constexpr):
    """Operand [W, 2 KH, DC] with qw in even and gs in odd columns, and the columns' constants qc and ga, [KH] each."""
    kk = k2 // 2
    valid = kk < count * H
    odd = (k2 % 2) == 1
    offset = kk[None, :, None] * DQ + c3
    mask = valid[None, :, None] & (c3 < D)
    qw = tl.load(QW + column * DQ + offset, mask=mask & (~odd)[None, :, None], other=0.0)
    gs = tl.load(GS + column * DQ + offset, mask=mask & odd[None, :, None], other=0.0)
    return (qw + gs).to(dtype)


@triton.jit
def _coefficients(
    raw,
    g_sum,
    qc,
    ga,
    mean,
    rstd,
    seen,
    alpha,
    D: tl.constexpr,
    BN: tl.constexpr,
    KH: tl.constexpr,
    dtype: tl.constexpr,
):
    """From x . [qw, gs] to dx_hat's coefficients [BN, 2 KH] (ds for qw, a for gs), its two row means, and ds [BN, KH]."""
    projection = (raw - mean[:, None] * g_sum[None, :]) * rstd[:, None]
    on_qw, on_gs = tl.split(tl.reshape(projection, (BN, KH, 2)))
    z = (on_qw + qc[None, :]) * alpha
    a, slope = _silu_and_slope(z)
    a = tl.where(seen, a, 0.0)
    ds = tl.where(seen, (on_gs + ga[None, :]) * slope * alpha, 0.0)
    coef = tl.reshape(tl.join(ds, a), (BN, 2 * KH)).to(dtype)
    rounded = coef.to(tl.float32)
    c1 = tl.sum(rounded * g_sum[None, :], 1) / D
    c2 = tl.sum(rounded * projection, 1) / D
    return coef, c1, c2, ds


@triton.jit(do_not_specialize=["splits", "columns", "chunks"])
def absorbed_backward_kernel(
    X,  # [T, D]
    DESC,  # descriptor of X as [W, T, DC], or X
    OFFSETS,  # int64 [B + 1]
    TARGET_OFFSETS,  # int64 [B + 1]
    QW,  # fp32 [C * H, DQ]: qw, qc in column D
    GS,  # fp32 [C * H, DQ]: gradient of the forward's sums (undivided), ga in column D
    STATS,  # fp32 [T, 2]: mean and 1 / standard deviation of every row
    NORM,  # fp32 [1], read if NORM_TENSOR
    DX,  # [T, D]
    SUMS,  # fp32 [splits, C * H, DQ]: sum ds x_hat, sum ds in column D, both over the normaliser
    stride_x,
    stride_dx,
    splits,
    columns,  # C * H
    chunks,
    alpha,
    norm,
    D: tl.constexpr,
    DQ: tl.constexpr,
    H: tl.constexpr,
    TC: tl.constexpr,  # candidates per program, TC * H <= KH
    W: tl.constexpr,
    DC: tl.constexpr,
    KH: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    WRITE_DX: tl.constexpr,
    NORM_TENSOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Per (sequence, split, chunk). Bytes: T D read, with WRITE_DX (one chunk) T D written; FLOPs 12 T D KH."""
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
        c3 = tl.arange(0, W)[:, None, None] * DC + tl.arange(0, DC)[None, None, :]
        k2 = tl.arange(0, 2 * KH)
        k = tl.arange(0, KH)
        row = tl.arange(0, BN)
        own = history + first + k // H
        column = (first_target + first) * H
        valid = k < count * H
        qc = tl.load(QW + column * DQ + k * DQ + D, mask=valid, other=0.0)
        ga = tl.load(GS + column * DQ + k * DQ + D, mask=valid, other=0.0)
        gt = _load_pair(QW, GS, column, count, k2, c3, D, DQ, H, dtype)
        g_sum = tl.sum(tl.sum(gt.to(tl.float32), 2), 0)
        g = tl.permute(gt, (0, 2, 1))
        if NORM_TENSOR:
            scale = 1.0 / tl.load(NORM)
        else:
            scale = 1.0 / norm
        acc = tl.zeros([W, 2 * KH, DC], tl.float32)
        mean_sum = tl.zeros([BN, 2 * KH], tl.float32)
        ds_sum = tl.zeros([BN, KH], tl.float32)
        base = X + start * stride_x
        dx_base = DX + start * stride_dx
        known = tl.where(targets > 0, high, 0)  # without candidates there are no statistics, and dx is zero
        stats = _load_stats(STATS, start, low + row, known)
        for t in tl.range(low, high, BN, num_stages=STAGES):
            x = _load_tile(X, DESC, base, start, t, high, stride_x, c3, row, D, W * DC, TMA)
            inside = t + row < high
            mean, rstd = tl.split(stats)
            stats = _load_stats(STATS, start, t + BN + row, known)  # the next tile's, ahead of their use
            raw = tl.sum(tl.dot(x, g, input_precision=PRECISION), 0)
            local = (t + row)[:, None]
            seen = ((local < history) | (local == own[None, :])) & inside[:, None] & valid[None, :]
            coef, c1, c2, ds = _coefficients(raw, g_sum, qc, ga, mean, rstd, seen, alpha, D, BN, KH, dtype)
            if WRITE_DX:
                dx_hat = tl.dot(tl.broadcast_to(coef[None, :, :], (W, BN, 2 * KH)), gt, input_precision=PRECISION)
                slope = -c2 * rstd * rstd * scale
                shift = -c1 * rstd * scale - mean * slope
                dx = dx_hat * (rstd * scale)[None, :, None] + (x.to(tl.float32) * slope[None, :, None] + shift[None, :, None])
                keep = inside[None, :, None]
                if D != W * DC:
                    keep = keep & (c3 < D)
                tl.store(dx_base + (t + row)[None, :, None] * stride_dx + c3, dx.to(DX.dtype.element_ty), mask=keep)
            cr = (coef.to(tl.float32) * rstd[:, None]).to(dtype)
            crt = tl.broadcast_to(tl.trans(cr)[None, :, :], (W, 2 * KH, BN))
            acc = tl.dot(crt, x, acc, input_precision=PRECISION)
            mean_sum += cr.to(tl.float32) * mean[:, None]
            ds_sum += ds
        out = SUMS + (split.to(tl.int64) * columns + column) * DQ
        keep3 = ((k2 % 2 == 0) & (k2 // 2 < count * H))[None, :, None] & (c3 < D)
        tl.store(out + (k2 // 2)[None, :, None] * DQ + c3, (acc - tl.sum(mean_sum, 0)[None, :, None]) * scale, mask=keep3)
        _store_constant(out, k, tl.sum(ds_sum, 0) * scale, valid, D, DQ)


@triton.jit(do_not_specialize=["splits"])
def absorbed_dx_kernel(
    X,
    OFFSETS,
    TARGET_OFFSETS,
    QW,
    GS,
    STATS,
    NORM,
    DX,
    stride_x,
    stride_dx,
    splits,
    alpha,
    norm,
    D: tl.constexpr,
    DQ: tl.constexpr,
    H: tl.constexpr,
    TC: tl.constexpr,
    W: tl.constexpr,
    DC: tl.constexpr,
    KH: tl.constexpr,
    BN: tl.constexpr,
    NORM_TENSOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    c3 = tl.arange(0, W)[:, None, None] * DC + tl.arange(0, DC)[None, None, :]
    k2 = tl.arange(0, 2 * KH)
    k = tl.arange(0, KH)
    row = tl.arange(0, BN)
    if NORM_TENSOR:
        scale = 1.0 / tl.load(NORM)
    else:
        scale = 1.0 / norm
    for t in range(low, high, BN):
        x = _load_tile(X, X, X + start * stride_x, start, t, high, stride_x, c3, row, D, W * DC, False)
        inside = t + row < high
        local = (t + row)[:, None]
        mean, rstd = tl.split(_load_stats(STATS, start, t + row, tl.where(targets > 0, high, 0)))
        dx_hat = tl.zeros([W, BN, DC], tl.float32)
        c1 = tl.zeros([BN], tl.float32)
        c2 = tl.zeros([BN], tl.float32)
        for first in range(0, targets, TC):
            count = tl.minimum(targets - first, TC)
            column = (first_target + first) * H
            valid = k < count * H
            qc = tl.load(QW + column * DQ + k * DQ + D, mask=valid, other=0.0)
            ga = tl.load(GS + column * DQ + k * DQ + D, mask=valid, other=0.0)
            gt = _load_pair(QW, GS, column, count, k2, c3, D, DQ, H, dtype)
            g_sum = tl.sum(tl.sum(gt.to(tl.float32), 2), 0)
            raw = tl.sum(tl.dot(x, tl.permute(gt, (0, 2, 1)), input_precision=PRECISION), 0)
            own = history + first + k // H
            seen = ((local < history) | (local == own[None, :])) & inside[:, None] & valid[None, :]
            coef, d1, d2, _ = _coefficients(raw, g_sum, qc, ga, mean, rstd, seen, alpha, D, BN, KH, dtype)
            c1 += d1
            c2 += d2
            coef3 = tl.broadcast_to(coef[None, :, :], (W, BN, 2 * KH))
            dx_hat = tl.dot(coef3, gt, dx_hat, input_precision=PRECISION)
        slope = -c2 * rstd * rstd * scale
        shift = -c1 * rstd * scale - mean * slope
        dx = dx_hat * (rstd * scale)[None, :, None] + (x.to(tl.float32) * slope[None, :, None] + shift[None, :, None])
        at = DX + start * stride_dx + (t + row)[None, :, None] * stride_dx + c3
        tl.store(at, dx.to(DX.dtype.element_ty), mask=inside[None, :, None] & (c3 < D))


@triton.jit
def candidate_rows_backward_kernel(
    DX,  # [T, D], updated in place at the candidate rows
    ROWS,  # int64 [C]
    X,  # [T, D]
    STATS,  # fp32 [T, 2]: mean and 1 / standard deviation of every row
    DX_HAT,  # [C, D]: gradient of the candidates' normalised rows (from U and Q)
    RESIDUAL,  # [C, D]: gradient of the candidates' own rows (the residual), read if HAS_RESIDUAL
    stride_dx,
    stride_x,
    D: tl.constexpr,
    DP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add the candidate rows' residual, U and Q gradients to dx: C rows are read and written, nothing of size T."""
    c = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + c)
    d = tl.arange(0, DP)
    mask = d < D
    mean, rstd = tl.load(STATS + row * 2), tl.load(STATS + row * 2 + 1)
    x_hat = (tl.load(X + row * stride_x + d, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    g = tl.load(DX_HAT + c * D + d, mask=mask, other=0.0).to(tl.float32)
    c1 = tl.sum(g, 0) / D
    c2 = tl.sum(tl.where(mask, g * x_hat, 0.0), 0) / D
    dx = (g - c1 - x_hat * c2) * rstd + tl.load(DX + row * stride_dx + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        dx += tl.load(RESIDUAL + c * D + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(DX + row * stride_dx + d, dx.to(DX.dtype.element_ty), mask=mask)
