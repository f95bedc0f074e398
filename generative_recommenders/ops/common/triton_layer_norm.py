"""LayerNorm both ways, the memory-bound kernels of an STU layer's input.

Each reads its inputs once and writes its outputs once: per row of D columns the forward moves 2 * D elements (3 * D if
it copies its input on the way), the backward 3 * D (one D more with a residual gradient). Sums over rows are
per-program partials, added in a fixed order afterwards, so that two runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from generative_recommenders.ops.common.launch import padded, row_launch
from generative_recommenders.ops.common.triton_norm import norm_backward


@triton.jit(do_not_specialize=("rows",))
def layer_norm_forward_kernel(
    X, Weight, Bias, N, Copy, Mean, Rstd, rows, x_stride, n_stride, copy_stride, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """N = (X - mean) * rstd * weight + bias, statistics in fp32; ROWS rows per program. HAS_COPY: also Copy = X."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BD)
    inside = c < D
    keep = (r < rows)[:, None] & inside[None, :]
    at = r.to(tl.int64)[:, None]
    x = tl.load(X + at * x_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
    if HAS_COPY:
        tl.store(Copy + at * copy_stride + c[None, :], x.to(Copy.dtype.element_ty), mask=keep)
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / D + eps)
    weight = tl.load(Weight + c, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(Bias + c, mask=inside, other=0.0).to(tl.float32)
    y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(N + at * n_stride + c[None, :], y.to(N.dtype.element_ty), mask=keep)
    tl.store(Mean + r, mean, mask=r < rows)
    tl.store(Rstd + r, rstd, mask=r < rows)


@triton.jit(do_not_specialize=("rows", "tiles"))
def layer_norm_backward_kernel(
    X, DN, Weight, Mean, Rstd, Residual, DX, Partial, rows, tiles,
    x_stride, dn_stride, residual_stride, dx_stride,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """DX from DN (plus the residual path's gradient), and in Partial this program's weight and bias gradients."""
    c = tl.arange(0, BD)
    inside = c < D
    weight = tl.load(Weight + c, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BD), tl.float32)
    d_bias = tl.zeros((ROWS, BD), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = tile * ROWS + tl.arange(0, ROWS)
        keep = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None]
        x = tl.load(X + at * x_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        dn = tl.load(DN + at * dn_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        mean = tl.load(Mean + r, mask=r < rows, other=0.0)
        rstd = tl.load(Rstd + r, mask=r < rows, other=0.0)
        xhat = tl.where(keep, (x - mean[:, None]) * rstd[:, None], 0.0)
        d_weight += dn * xhat
        d_bias += dn
        dx = norm_backward(dn * weight[None, :], xhat, rstd[:, None], D)
        if HAS_RESIDUAL:
            dx += tl.load(Residual + at * residual_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        tl.store(DX + at * dx_stride + c[None, :], dx.to(DX.dtype.element_ty), mask=keep)
    at = tl.program_id(0) * 2 * D + c
    tl.store(Partial + at, tl.sum(d_weight, axis=0), mask=inside)
    tl.store(Partial + at + D, tl.sum(d_bias, axis=0), mask=inside)


def normalize(
    x, weight, bias, eps: float, dtype: torch.dtype, copy: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerNorm of x [T, D] in ``dtype``, with fp32 mean and reciprocal deviation [T]; x itself goes to ``copy``."""
    rows, width = x.shape
    normed = torch.empty(rows, width, device=x.device, dtype=dtype)
    mean = torch.empty(rows, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if rows > 0:
        block = padded(width)
        tile = max(1, 4096 // block) if x.device.type == "cuda" else 32
        layer_norm_forward_kernel[(triton.cdiv(rows, tile),)](
            x, weight, bias, normed, copy, mean, rstd,
            rows, x.stride(0), normed.stride(0), 0 if copy is None else copy.stride(0), eps,
            D=width, BD=block, ROWS=tile, HAS_COPY=copy is not None, num_warps=4,
        )  # fmt: skip
    return normed, mean, rstd


def normalize_backward(x, d_normed, weight, mean, rstd, residual=None):
    """Gradients (dx in x's dtype, d_weight and d_bias in fp32); ``residual`` [T, D] is added to dx."""
    rows, width = x.shape
    dx = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    if rows == 0:
        return dx, *torch.zeros(2, width, device=x.device, dtype=torch.float32).unbind()
    launch = row_launch(width, x.device, resident=16)
    grid = launch.grid(rows, x.device)
    partial = torch.empty(*grid, 2, width, device=x.device, dtype=torch.float32)
    layer_norm_backward_kernel[grid](
        x, d_normed, weight, mean, rstd, residual, dx, partial, rows, triton.cdiv(rows, launch.rows),
        x.stride(0), d_normed.stride(0), 0 if residual is None else residual.stride(0), dx.stride(0),
        D=width, BD=launch.block, ROWS=launch.rows, HAS_RESIDUAL=residual is not None, **launch.options(),
    )  # fmt: skip
    return dx, *partial.sum(0).unbind()
