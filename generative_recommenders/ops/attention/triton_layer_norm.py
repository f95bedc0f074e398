"""The memory-bound kernels of the fused STU front: LayerNorm both ways, and copy + column sum of gradients.

Each reads its inputs once and writes its outputs once: per row of D columns the forward moves 2 * D elements, the
backward 3 * D (one D more with a residual gradient), the column sum one read per element (and a write where it copies).
Sums over rows are per-program partials, added in a fixed order afterwards, so that two runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COMPILE_CONSTANTS = dict(D=512, BD=512, ROWS=8, HAS_RESIDUAL=True, COPY=True, BC=512)


@triton.jit(do_not_specialize=("rows",))
def layer_norm_forward(
    X, Weight, Bias, N, Mean, Rstd, rows, x_stride, n_stride, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """N = (X - mean) * rstd * weight + bias, statistics in fp32; ROWS rows per program."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BD)
    inside = c < D
    keep = (r < rows)[:, None] & inside[None, :]
    at = r.to(tl.int64)[:, None]
    x = tl.load(X + at * x_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
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
def layer_norm_backward(
    X, DN, Weight, Mean, Rstd, Residual, DX, PartialWeight, PartialBias, rows, tiles,
    x_stride, dn_stride, residual_stride, dx_stride,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """DX from DN (plus the residual path's gradient), and this program's share of the weight and bias gradients.

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dn * weight.
    """
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
        g = dn * weight[None, :]
        mean_g = tl.sum(g, axis=1) / D
        mean_gx = tl.sum(g * xhat, axis=1) / D
        dx = (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]
        if HAS_RESIDUAL:
            dx += tl.load(Residual + at * residual_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        tl.store(DX + at * dx_stride + c[None, :], dx.to(DX.dtype.element_ty), mask=keep)
    at = tl.program_id(0) * D + c
    tl.store(PartialWeight + at, tl.sum(d_weight, axis=0), mask=inside)
    tl.store(PartialBias + at, tl.sum(d_bias, axis=0), mask=inside)


@triton.jit(do_not_specialize=("rows", "tiles"))
def column_sums(
    Source, Target, Partial, rows, columns, tiles, source_stride, target_stride, partial_stride,
    ROWS: tl.constexpr, BC: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Partial sums over rows of Source [rows, columns], copying it to Target on the way if COPY."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < columns
    total = tl.zeros((ROWS, BC), tl.float32)
    # Neighbouring programs work on neighbouring rows, so that reads and writes stay within open memory pages.
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        r = tile * ROWS + tl.arange(0, ROWS)
        keep = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None]
        value = tl.load(Source + at * source_stride + c[None, :], mask=keep, other=0.0)
        if COPY:
            tl.store(Target + at * target_stride + c[None, :], value.to(Target.dtype.element_ty), mask=keep)
        total += value.to(tl.float32)
    tl.store(Partial + tl.program_id(1) * partial_stride + c, tl.sum(total, axis=0), mask=inside)


KERNELS = (layer_norm_forward, layer_norm_backward, column_sums)


def _programs(device: torch.device, per_processor: int) -> int:
    if device.type != "cuda":
        return 2
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count


def _tile_rows(columns: int, device: torch.device) -> int:
    if device.type != "cuda":
        return 32
    return max(1, 4096 // triton.next_power_of_2(columns))


def normalize(x, weight, bias, eps: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerNorm of x [T, D] in ``dtype``, with fp32 mean and reciprocal deviation [T]."""
    rows, width = x.shape
    normed = torch.empty(rows, width, device=x.device, dtype=dtype)
    mean = torch.empty(rows, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if rows > 0:
        tile = _tile_rows(width, x.device)
        layer_norm_forward[(triton.cdiv(rows, tile),)](
            x, weight, bias, normed, mean, rstd, rows, x.stride(0), normed.stride(0), eps,
            D=width, BD=triton.next_power_of_2(width), ROWS=tile, num_warps=4,
        )  # fmt: skip
    return normed, mean, rstd


def normalize_backward(x, d_normed, weight, mean, rstd, residual=None):
    """Gradients (dx in x's dtype, d_weight and d_bias in fp32); ``residual`` [T, D] is added to dx."""
    rows, width = x.shape
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    dx = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    if rows == 0:
        zero = torch.zeros(width, device=x.device, dtype=torch.float32)
        return dx, zero, zero.clone()
    tile = _tile_rows(width, x.device)
    programs = min(_programs(x.device, 4), triton.cdiv(rows, tile))
    partial = torch.empty(2, programs, width, device=x.device, dtype=torch.float32)
    layer_norm_backward[(programs,)](
        x, d_normed, weight, mean, rstd, residual, dx, partial[0], partial[1],
        rows, triton.cdiv(rows, tile),
        x.stride(0), d_normed.stride(0), 0 if residual is None else residual.stride(0), dx.stride(0),
        D=width, BD=triton.next_power_of_2(width), ROWS=tile, HAS_RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    sums = partial.sum(1)
    return dx, sums[0], sums[1]


def sum_columns(source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 column sums of source [T, C]; also copies it to ``target`` [T, C] if given. Both may be column slices."""
    rows, columns = source.shape
    if source.stride(1) != 1:
        source = source.contiguous()
    if rows == 0:
        return torch.zeros(columns, device=source.device, dtype=torch.float32)
    width = min(512, triton.next_power_of_2(columns))
    tile = 32 if source.device.type != "cuda" else 4096 // width
    slabs = triton.cdiv(columns, width)
    programs = max(1, min(triton.cdiv(_programs(source.device, 16), slabs), triton.cdiv(rows, tile)))
    partial = torch.empty(programs, columns, device=source.device, dtype=torch.float32)
    column_sums[(slabs, programs)](
        source, source if target is None else target, partial,
        rows, columns, triton.cdiv(rows, tile),
        source.stride(0), (source if target is None else target).stride(0), partial.stride(0),
        ROWS=tile, BC=width, COPY=target is not None, num_warps=4,
    )  # fmt: skip
    return partial.sum(0)
