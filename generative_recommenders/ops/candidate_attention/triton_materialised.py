"""Triton kernels of the materialised candidate attention: one query row per (sequence, head) against all keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32


@triton.jit(do_not_specialize=["splits"])
def materialised_forward_kernel(
    Q,  # [B, H * DK]
    K,  # [T, H * DK]
    V,  # [T, H * DV]
    OFFSETS,  # int64 [B + 1]
    OUT,  # fp32 [splits, B, H * DV]
    NORM,  # fp32 [1], the normaliser, read if NORM_TENSOR
    splits,
    sequences,
    alpha,
    norm,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PK: tl.constexpr,
    PV: tl.constexpr,
    BN: tl.constexpr,
    NORM_TENSOR: tl.constexpr,
):
    """Per (sequence, split, head). Bytes: the head's K and V once."""
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
    Q,
    K,
    V,
    OFFSETS,
    D_OUT,  # [B, H * DV]
    DK_OUT,  # [T, H * DK]
    DV_OUT,  # [T, H * DV]
    DQ,  # fp32 [splits, B, H * DK]
    NORM,
    splits,
    sequences,
    alpha,
    norm,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PK: tl.constexpr,
    PV: tl.constexpr,
    BN: tl.constexpr,
    NORM_TENSOR: tl.constexpr,
):
    """Per (sequence, split, head). Bytes: the head's K and V read, their gradients written."""
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


def _splits(rows: int, sequences: int) -> int:
    return max(1, min(16, rows // max(1, sequences) // 512))


def _common(q, k, v, seq_offsets, sizes) -> dict:
    tensor_norm = isinstance(sizes.attn_norm, torch.Tensor)
    return dict(
        Q=q,
        K=k,
        V=v,
        OFFSETS=seq_offsets,
        NORM=sizes.attn_norm if tensor_norm else q,
        sequences=seq_offsets.numel() - 1,
        alpha=float(sizes.alpha),
        norm=1.0 if tensor_norm else float(sizes.attn_norm),
        H=sizes.num_heads,
        DK=sizes.attn_dim,
        DV=sizes.hidden_dim,
        PK=triton.next_power_of_2(sizes.attn_dim),
        PV=triton.next_power_of_2(sizes.hidden_dim),
        BN=ROWS,
        NORM_TENSOR=tensor_norm,
    )


def forward(q, k, v, seq_offsets, sizes) -> torch.Tensor:
    """q ``[B, H d_qk]``, k ``[T, H d_qk]``, v ``[T, H d_v]`` (contiguous) → ``[B, H d_v]`` in q's dtype."""
    sequences = seq_offsets.numel() - 1
    if sequences == 0:
        return v.new_empty(0, v.shape[1])
    splits = _splits(k.shape[0], sequences)
    out = v.new_empty(splits, sequences, v.shape[1], dtype=torch.float32)
    materialised_forward_kernel[(sequences * splits * sizes.num_heads,)](
        OUT=out, splits=splits, **_common(q, k, v, seq_offsets, sizes)
    )
    return out.sum(0).to(q.dtype)


def backward(q, k, v, seq_offsets, d_out, sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    sequences = seq_offsets.numel() - 1
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    if sequences == 0:
        return torch.empty_like(q), dk, dv
    splits = _splits(k.shape[0], sequences)
    dq = q.new_empty(splits, *q.shape, dtype=torch.float32)
    materialised_backward_kernel[(sequences * splits * sizes.num_heads,)](
        D_OUT=d_out, DK_OUT=dk, DV_OUT=dv, DQ=dq, splits=splits, **_common(q, k, v, seq_offsets, sizes)
    )
    return dq.sum(0).to(q.dtype), dk, dv
