"""LMSD in plain PyTorch: readable in one sitting, runs anywhere, and is the oracle of every other backend.

With ``x_hat = (x - mean) * rstd``, ``ell = x_hat * weight + bias`` and ``a = SiLU(u)`` (or ``u``) the result is
``y = [dropout(a), dropout(x), dropout(ell * a)]``, the first two segments optional. Statistics are taken over all D
columns of a row, or with ``num_groups`` = H > 1 over each of H blocks of D/H columns, which then share one weight and
one bias per block (group norm per head). Arithmetic is float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import torch

from generative_recommenders.ops.common.philox import SEGMENT_U, SEGMENT_X, SEGMENT_Y, keep_decisions


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic and statistics of inputs of this dtype use."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw_mask(
    rows: torch.Tensor, num_columns: int, seed: int | torch.Tensor, dropout_ratio: float, concat_u: bool, concat_x: bool
) -> torch.Tensor:
    """The packed keep mask, int8 ``[N, D]``: bit s is segment s's decision, clear where the segment is not made."""
    mask = torch.zeros(rows.numel(), num_columns, dtype=torch.int8, device=rows.device)
    for segment, wanted in ((SEGMENT_Y, True), (SEGMENT_X, concat_x), (SEGMENT_U, concat_u)):
        if wanted:
            kept = keep_decisions(rows, num_columns, seed, segment, dropout_ratio)
            mask |= kept.to(torch.int8) << segment
    return mask


def _dropped(value: torch.Tensor, mask: torch.Tensor | None, segment: int, dropout_ratio: float) -> torch.Tensor:
    if mask is None:
        return value
    kept = (mask & (1 << segment)) != 0
    return torch.where(kept, value * (1.0 / (1.0 - dropout_ratio)), torch.zeros((), dtype=value.dtype))


def _grouped(value: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``[N, D]`` → ``[N, H, D/H]``."""
    return value.reshape(value.shape[0], num_groups, value.shape[1] // num_groups)


def _affine(parameter: torch.Tensor, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Weight or bias as something that multiplies ``[N, H, D/H]``: ``[1, D]`` for one group, else ``[H, 1]``."""
    return parameter.to(dtype).reshape((1, -1) if num_groups == 1 else (num_groups, 1))


def statistics(x: torch.Tensor, eps: float, num_groups: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and reciprocal standard deviation (biased variance plus ``eps``): ``[N]``, or ``[N, H]`` with groups."""
    grouped = _grouped(x.to(accumulate_dtype(x.dtype)), num_groups)
    mean = grouped.mean(-1)
    variance = (grouped - mean[..., None]).square().mean(-1)
    rstd = torch.rsqrt(variance + eps)
    return (mean.reshape(-1), rstd.reshape(-1)) if num_groups == 1 else (mean, rstd)


def forward(
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    eps: float,
    dropout_ratio: float,
    apply_u_silu: bool = True,
    concat_u: bool = True,
    concat_x: bool = True,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, mean, rstd)`` for a given packed mask (``None``: no dropout). Differentiable by autograd in y."""
    dtype = accumulate_dtype(x.dtype)
    mean, rstd = statistics(x, eps, num_groups)
    shape = (x.shape[0], num_groups, 1)
    wide_x, wide_u = x.to(dtype), u.to(dtype)
    x_hat = (_grouped(wide_x, num_groups) - mean.reshape(shape)) * rstd.reshape(shape)
    ell = x_hat * _affine(weight, num_groups, dtype) + _affine(bias, num_groups, dtype)
    a = wide_u * torch.sigmoid(wide_u) if apply_u_silu else wide_u
    segments = [_dropped(a, mask, SEGMENT_U, dropout_ratio)] if concat_u else []
    segments += [_dropped(wide_x, mask, SEGMENT_X, dropout_ratio)] if concat_x else []
    segments += [_dropped(ell.reshape(x.shape) * a, mask, SEGMENT_Y, dropout_ratio)]
    return torch.cat([segment.to(x.dtype) for segment in segments], dim=1), mean, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_ratio: float,
    apply_u_silu: bool = True,
    concat_u: bool = True,
    concat_x: bool = True,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dx, du, dweight, dbias)`` in the dtypes of x, u, weight and bias; itself differentiable by autograd."""
    dtype = accumulate_dtype(x.dtype)
    columns = x.shape[1]
    parts = iter(dy.to(dtype).split(columns, dim=1))
    da_cat = _dropped(next(parts), mask, SEGMENT_U, dropout_ratio) if concat_u else None
    dx_cat = _dropped(next(parts), mask, SEGMENT_X, dropout_ratio) if concat_x else None
    dz = _dropped(next(parts), mask, SEGMENT_Y, dropout_ratio)

    shape = (x.shape[0], num_groups, 1)
    wide_weight = _affine(weight, num_groups, dtype)
    x_hat = (_grouped(x.to(dtype), num_groups) - mean.reshape(shape)) * rstd.reshape(shape)
    ell = (x_hat * wide_weight + _affine(bias, num_groups, dtype)).reshape(x.shape)
    wide_u = u.to(dtype)
    sigmoid = torch.sigmoid(wide_u)
    a = wide_u * sigmoid if apply_u_silu else wide_u

    da = dz * ell if da_cat is None else dz * ell + da_cat
    du = da * (sigmoid + a * (1 - sigmoid)) if apply_u_silu else da

    dell = _grouped(dz * a, num_groups)
    dx_hat = dell * wide_weight
    centred = dx_hat - dx_hat.mean(-1, keepdim=True) - x_hat * (dx_hat * x_hat).mean(-1, keepdim=True)
    dx = (centred * rstd.reshape(shape)).reshape(x.shape)
    dx = dx if dx_cat is None else dx + dx_cat
    over = (0, 1) if num_groups == 1 else (0, 2)
    dweight, dbias = (dell * x_hat).sum(over), dell.sum(over)
    return dx.to(x.dtype), du.to(u.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)
