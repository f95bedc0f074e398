"""The Triton backend: launches, buffers and the second stage of the weight gradients around the kernels.

How a kernel is launched is a rule of the block width, the dtype and the pass, never of N, strides or seed. No
autotuning: the first call is as fast as the second, and a run's choice does not depend on what else the GPU was doing.
The rule's constants come from ``benchmarks/lmsd.py --sweep``.
"""

from __future__ import annotations

import torch

from generative_recommenders.ops.common import philox
from generative_recommenders.ops.common.launch import RowLaunch, padded
from generative_recommenders.ops.dispatch import triton_interpreted
from generative_recommenders.ops.lmsd import contract
from generative_recommenders.ops.lmsd.contract import LmsdConfig
from generative_recommenders.ops.lmsd.triton_kernels import lmsd_backward_kernel, lmsd_forward_kernel

MAX_WARPS = 16
REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor; 32 times the warps' caps must fit


def choose_launch(block: int, dtype: torch.dtype, backward: bool, dropout: bool) -> RowLaunch:
    """As few warps per row as registers allow, so that a row seldom leaves its warp and nothing waits at a barrier.

    - backward: 512 elements per warp (16 per thread), as many programs as are resident, since each keeps partial
      weight gradients for its whole life;
    - forward with dropout: 512 per warp, but rows of up to 256 get 256, one row per warp: Philox takes the registers;
    - forward without: 1024 per warp, for loads in flight; nothing else takes registers.

    The forward passes have nothing to keep, so they launch many more programs than fit and let the hardware even them
    out. Measured on an H200 at D = 256, 512 and 1024 (bfloat16); other widths follow the same rule.

    Args:
        block: columns of a unit, padded to a power of two.
        dtype: of x.
    """
    vector = 4 if dropout and not backward or dtype == torch.float32 else 8
    per_warp = 512 if backward or dropout else 1024
    if dropout and not backward and block <= 256:
        per_warp = 256
    warps = min(MAX_WARPS, max(1, block // per_warp))
    units = max(1, per_warp // block)
    if backward or (dropout and warps > 1):
        registers, programs = 168, max(1, 12 // warps)
    else:
        registers = 80 if per_warp == 256 else 128 if block <= 512 else 168
        programs = 256 // warps
    return RowLaunch(block, units, warps, programs, min(registers, REGISTER_FILE // (32 * warps)), vector)


def interpreter_launch(block: int, vector: int) -> RowLaunch:
    """Many units per program: the interpreter pays per program and per operation, not per element."""
    return RowLaunch(block, max(1, 16384 // block), 1, 2, vector=vector)


def forward(
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seed: int | torch.Tensor,
    row_indices: torch.Tensor | None,
    cfg: LmsdConfig,
    config: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``(y, mean, rstd, mask)``; ``config`` overrides the rule."""
    rows, columns = x.shape
    dropout = cfg.dropout_ratio > 0
    y = torch.empty(rows, cfg.num_segments * columns, dtype=x.dtype, device=x.device)
    shape = (rows,) if cfg.num_groups == 1 else (rows, cfg.num_groups)
    mean = torch.empty(shape, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    mask = torch.empty(rows, columns, dtype=torch.int8, device=x.device) if dropout else None
    if rows == 0:
        return y, mean, rstd, mask
    total, shapes, config = _geometry(x, cfg, False, config)
    seed_tensor, low, high = _split_seed(seed) if dropout else (None, 0, 0)
    row_indices = row_indices.contiguous() if dropout and row_indices is not None else None
    threshold = philox.signed32(philox.keep_threshold(cfg.dropout_ratio)) if dropout else 0
    lmsd_forward_kernel[config.grid(total, x.device)](
        x, u, weight.contiguous(), bias.contiguous(), y, mean, rstd,
        None if mask is None else mask.view(torch.int32), row_indices, seed_tensor,
        total, x.stride(0) // config.vector, u.stride(0) // config.vector, y.stride(0) // config.vector, columns // 4,
        low, high, threshold, 1.0 / (1.0 - cfg.dropout_ratio), 1.0 - cfg.dropout_ratio, cfg.eps,
        **shapes, **config.options(),
    )  # fmt: skip
    return y, mean, rstd, mask


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    mask: torch.Tensor | None,
    cfg: LmsdConfig,
    compute_dweight: bool,
    owned: tuple[torch.Tensor | None, ...] = (None,) * 4,
    config: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``(dx, du, dweight, dbias)``, into the caller's buffers where there are any."""
    *_, dweight, dbias = owned
    dy = contract.aligned(dy)
    dx, du, dw, db, _ = _backward_parts(
        dy, x, u, weight, bias, mean, rstd, mask, cfg, owned[:2], compute_dweight, config=config
    )
    return dx, du, None if dw is None else _sum_parts(dw, weight, dweight), _sum_parts(db, bias, dbias)


def backward_for_layer(
    dy: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    mask: torch.Tensor | None,
    cfg: LmsdConfig,
    du: torch.Tensor,
    restore_y: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dx, du's column sums, dweight, dbias)``, the last three float32, for a layer that owns its buffers.

    du is written to the given buffer (a column block will do). With ``restore_y`` forward's y takes the place of dy,
    which saves a layer that did not keep y a second forward pass. One group; rows as ``contract.why_unaligned`` wants.
    """
    dx, _, *parts = _backward_parts(
        dy, x, u, weight, bias, mean, rstd, mask, cfg, (None, du), True, restore_y, sum_du=True
    )
    dw, db, du_sums = (part.sum(0) for part in parts if part is not None)
    return dx, du_sums, dw, db


def _backward_parts(
    dy, x, u, weight, bias, mean, rstd, mask, cfg: LmsdConfig, owned, compute_dweight, restore_y=False, sum_du=False,
    config: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """``(dx, du)``, and float32 parts of dweight, dbias and du's column sums, the first and last only if wanted."""
    dx, du = owned
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device) if du is None else du
    total, shapes, config = _geometry(x, cfg, True, config)
    grid = config.grid(total, x.device)
    parts = (*grid, x.shape[1]) if cfg.num_groups == 1 else mean.shape
    db = torch.empty(parts, dtype=torch.float32, device=x.device)
    dw = torch.empty_like(db) if compute_dweight else None
    du_sums = torch.empty_like(db) if sum_du else None
    if x.shape[0] > 0:
        mask = None if mask is None else mask.contiguous()
        lmsd_backward_kernel[grid](
            dy, x, u, weight.contiguous(), bias.contiguous(), mean.contiguous(), rstd.contiguous(), mask,
            dx, du, dw, db, du_sums,
            total, dy.stride(0) // config.vector, x.stride(0) // config.vector, u.stride(0) // config.vector,
            dx.stride(0) // config.vector, du.stride(0) // config.vector,
            0 if mask is None else mask.stride(0) // config.vector, 1.0 / (1.0 - cfg.dropout_ratio),
            RESTORE_Y=restore_y, **shapes, **config.options(),
        )  # fmt: skip
    return dx, du, dw, db, du_sums


def _geometry(x: torch.Tensor, cfg: LmsdConfig, backward: bool, config: RowLaunch | None):
    """Units in all, the kernels' constant arguments, and the launch."""
    width = x.shape[1] // cfg.num_groups
    block = padded(width)
    dropout = cfg.dropout_ratio > 0
    if config is None:
        config = choose_launch(block, x.dtype, backward, dropout)
        if triton_interpreted():
            config = interpreter_launch(block, config.vector)
    shapes = {"WIDTH": width, "BLOCK": block, "GROUPS": cfg.num_groups, "UNITS": config.rows}
    shapes |= {"VECTOR": config.vector, "SILU": cfg.apply_u_silu, "CONCAT_U": cfg.concat_u, "CONCAT_X": cfg.concat_x}
    return x.shape[0] * cfg.num_groups, shapes | {"DROPOUT": dropout}, config


def _split_seed(seed: int | torch.Tensor) -> tuple[torch.Tensor | None, int, int]:
    """A seed tensor, or the halves of an integer as signed 32-bit values: a fixed argument type for every seed."""
    if isinstance(seed, torch.Tensor):
        return seed, 0, 0
    seed = philox.signed_seed(seed)
    return None, philox.signed32(seed & 0xFFFFFFFF), seed >> 32


def _sum_parts(parts: torch.Tensor, parameter: torch.Tensor, owned: torch.Tensor | None) -> torch.Tensor:
    """Add up the partial gradients in a fixed order, in float32, and round once to the parameter's dtype."""
    total = parts.sum(0)
    return total.to(parameter.dtype) if owned is None else owned.copy_(total)
