"""Triton kernels of the materialised candidate attention: one query row per (sequence, head) against all keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["splits"])
def materialised_forward_kernel(
    Q, K, V, OFFSETS, OUT, NORM, splits, sequences, alpha, norm, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PK: tl.constexpr, PV: tl.constexpr, BN: tl.constexpr, NORM_TENSOR: tl.constexpr,
):  # fmt: skip
    """Per (sequence, split, head). Bytes: the head's K and V once.

    Q [B, H * DK]; K [T, H * DK]; V [T, H * DV]; OFFSETS int64 [B + 1]; OUT fp32 [splits, B, H * DV]; NORM fp32 [1], the
    normaliser, read if NORM_TENSOR.
    """
    pid = tl.program_id(0)
    h, split, b = pid % H, (pid // H) % splits, (pid // H // splits).to(tl.int64)
    start = tl.load(OFFSETS + b)
    length = (tl.load(OFFSETS + b + 1) - start).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, splits), BN) * BN
    low, high = split * part, tl.minimum(split * part + part, length)
    dk, dv, row = tl.arange(0, PK), tl.arange(0, PV), tl.arange(0, BN)
    q = tl.load(Q + b * H * DK + h * DK + dk, mask=dk < DK, other=0.0).to(tl.float32)
    out = tl.zeros([PV], tl.float32)
    for t in range(low, high, BN):
        inside = (t + row < high)[:, None]
        at = (start + t + row)[:, None]
        k = tl.load(K + at * (H * DK) + h * DK + dk[None, :], mask=inside & (dk < DK)[None, :], other=0.0)
        v = tl.load(V + at * (H * DV) + h * DV + dv[None, :], mask=inside & (dv < DV)[None, :], other=0.0)
        z = tl.sum(k.to(tl.float32) * q[None, :], 1) * alpha
        out += tl.sum((z / (1.0 + tl.exp(-z)))[:, None] * v.to(tl.float32), 0)
    if NORM_TENSOR:
        out = out / tl.load(NORM)
    else:
        out = out / norm
    tl.store(OUT + (split * sequences + b) * (H * DV) + h * DV + dv, out, mask=dv < DV)


@triton.jit(do_not_specialize=["splits"])
def materialised_backward_kernel(
    Q, K, V, OFFSETS, D_OUT, DK_OUT, DV_OUT, DQ, NORM, splits, sequences, alpha, norm, H: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, BN: tl.constexpr,
    NORM_TENSOR: tl.constexpr,
):  # fmt: skip
    """Per (sequence, split, head). Bytes: the head's K and V read, their gradients written.

    D_OUT [B, H * DV]; DK_OUT [T, H * DK]; DV_OUT [T, H * DV]; DQ fp32 [splits, B, H * DK]; others as forward.
    """
    pid = tl.program_id(0)
    h, split, b = pid % H, (pid // H) % splits, (pid // H // splits).to(tl.int64)
    start = tl.load(OFFSETS + b)
    length = (tl.load(OFFSETS + b + 1) - start).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, splits), BN) * BN
    low, high = split * part, tl.minimum(split * part + part, length)
    dk, dv, row = tl.arange(0, PK), tl.arange(0, PV), tl.arange(0, BN)
    q = tl.load(Q + b * H * DK + h * DK + dk, mask=dk < DK, other=0.0).to(tl.float32)
    d_out = tl.load(D_OUT + b * H * DV + h * DV + dv, mask=dv < DV, other=0.0).to(tl.float32)
    if NORM_TENSOR:
        d_out = d_out / tl.load(NORM)
    else:
        d_out = d_out / norm
    dq = tl.zeros([PK], tl.float32)
    for t in range(low, high, BN):
        inside = (t + row < high)[:, None]
        at = (start + t + row)[:, None]
        k_at = at * (H * DK) + h * DK + dk[None, :]
        v_at = at * (H * DV) + h * DV + dv[None, :]
        k = tl.load(K + k_at, mask=inside & (dk < DK)[None, :], other=0.0).to(tl.float32)
        v = tl.load(V + v_at, mask=inside & (dv < DV)[None, :], other=0.0).to(tl.float32)
        z = tl.sum(k * q[None, :], 1) * alpha
        sig = 1.0 / (1.0 + tl.exp(-z))
        ds = tl.sum(v * d_out[None, :], 1) * sig * (1.0 + z * (1.0 - sig)) * alpha
        dq += tl.sum(ds[:, None] * k, 0)
        dk_tile = (ds[:, None] * q[None, :]).to(DK_OUT.dtype.element_ty)
        dv_tile = ((z * sig)[:, None] * d_out[None, :]).to(DV_OUT.dtype.element_ty)
        tl.store(DK_OUT + k_at, dk_tile, mask=inside & (dk < DK)[None, :])
        tl.store(DV_OUT + v_at, dv_tile, mask=inside & (dv < DV)[None, :])
    tl.store(DQ + (split * sequences + b) * (H * DK) + h * DK + dk, dq, mask=dk < DK)
