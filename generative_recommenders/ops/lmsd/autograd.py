"""``hstu_lmsd`` with gradients: custom operators with fake kernels, so that ``torch.compile`` sees two opaque calls."""

from __future__ import annotations

import torch

from generative_recommenders.ops.dispatch import Backend, pack, unpack
from generative_recommenders.ops.lmsd import backends, contract, reference
from generative_recommenders.ops.lmsd.contract import LmsdConfig


def hstu_lmsd(
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    dropout_ratio: float = 0.1,
    seed: int | torch.Tensor = 0,
    apply_u_silu: bool = True,
    concat_u: bool = True,
    concat_x: bool = True,
    row_indices: torch.Tensor | None = None,
    num_groups: int = 1,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """Fused LayerNorm, multiply, SiLU and dropout: ``[dropout(a), dropout(x), dropout(LN(x) * a)]``, ``a = SiLU(u)``.

    The result of an HSTU layer before its output projection (Zhai et al., "Actions speak louder than words", 2024).
    Differentiable in x, u, weight and bias, twice (the second time at the speed of plain PyTorch).

    Args:
        x, u: ``[N, D]``, one dtype of float32, float16, bfloat16, float64; any strides (rows that a kernel cannot
            address are copied first). D is a multiple of 8.
        weight, bias: ``[D]``, or ``[H]`` with ``num_groups`` = H > 1.
        eps: added to the variance.
        dropout_ratio: in [0, 1); pass 0 in evaluation.
        seed: signed 64-bit integer, or an int64 tensor of one element on the device of x. A decision depends on
            (seed, row number, column, segment) alone.
        apply_u_silu, concat_u, concat_x: see ``hstu_lmsd_forward``.
        row_indices: int64 or int32 ``[N]``, the row numbers to draw for instead of 0 .. N-1.
        num_groups: H > 1 takes statistics per block of D/H columns (group norm per head).
        backend: ``PYTORCH``, ``TRITON``, ``CUDNN`` or ``None`` (environment, then the best that can serve).

    Returns:
        ``[N, D * (1 + concat_u + concat_x)]`` in x's dtype.

    Raises:
        TypeError, ValueError: as ``hstu_lmsd_forward``.
    """
    number, tensor = (0, seed) if isinstance(seed, torch.Tensor) else (seed, None)
    flags = (apply_u_silu, concat_u, concat_x, num_groups)
    asked = pack(backend)
    return _lmsd_forward(x, u, weight, bias, row_indices, tensor, number, eps, dropout_ratio, *flags, asked)[0]


@torch.library.custom_op("generative_recommenders::lmsd_forward", mutates_args=())
def _lmsd_forward(
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    row_indices: torch.Tensor | None,
    seed_tensor: torch.Tensor | None,
    seed: int,
    eps: float,
    dropout_ratio: float,
    apply_u_silu: bool,
    concat_u: bool,
    concat_x: bool,
    num_groups: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    cfg = LmsdConfig(dropout_ratio, apply_u_silu, concat_u, concat_x, num_groups, eps)
    drawn_from = seed if seed_tensor is None else seed_tensor
    contract.check_inputs(x, u, weight, bias, cfg)
    contract.check_seed(drawn_from, x)
    contract.check_row_indices(row_indices, x)
    implementation, aligned = backends.choose(unpack(backend), x, weight, bias, cfg, row_indices, drawn_from)
    if aligned:
        x, u = contract.aligned(x), contract.aligned(u)
    y, mean, rstd, mask = implementation.forward(x, u, weight, bias, drawn_from, row_indices, cfg)
    return y, mean, rstd, _no_mask(x) if mask is None else mask


@_lmsd_forward.register_fake
def _(x, u, weight, bias, row_indices, seed_tensor, seed, eps, dropout_ratio, silu, concat_u, concat_x, groups, name):
    rows, columns = x.shape
    y = x.new_empty(rows, columns * (1 + int(concat_u) + int(concat_x)))
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean = x.new_empty((rows,) if groups == 1 else (rows, groups), dtype=dtype)
    mask = x.new_empty(rows, columns, dtype=torch.int8) if dropout_ratio > 0 else _no_mask(x)
    return y, mean, torch.empty_like(mean), mask


def _no_mask(x: torch.Tensor) -> torch.Tensor:
    """What stands for ``None`` among an operator's results."""
    return x.new_empty(0, 0, dtype=torch.int8)


@torch.library.custom_op("generative_recommenders::lmsd_backward", mutates_args=())
def _lmsd_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    mask: torch.Tensor,
    eps: float,
    dropout_ratio: float,
    apply_u_silu: bool,
    concat_u: bool,
    concat_x: bool,
    num_groups: int,
    compute_dweight: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    cfg = LmsdConfig(dropout_ratio, apply_u_silu, concat_u, concat_x, num_groups, eps)
    kept = mask if dropout_ratio > 0 else None
    contract.check_saved(dy, x, mean, rstd, kept, cfg)
    implementation, aligned = backends.choose(unpack(backend), x, weight, bias, cfg)
    if aligned:
        x, u = contract.aligned(x), contract.aligned(u)
    assert implementation.backward is not None
    grads = implementation.backward(dy, x, u, weight, bias, mean, rstd, kept, cfg, compute_dweight)
    dx, du, dweight, dbias = grads
    return dx, du, weight.new_empty(0) if dweight is None else dweight, dbias


@_lmsd_backward.register_fake
def _(dy, x, u, weight, bias, mean, rstd, mask, eps, dropout_ratio, silu, concat_u, concat_x, groups, dw, backend):
    dweight = torch.empty_like(weight) if dw else weight.new_empty(0)
    return x.new_empty(x.shape), u.new_empty(u.shape), dweight, torch.empty_like(bias)


def _save_forward(ctx, inputs, output):
    x, u, weight, bias, _, _, _, *ctx.config = inputs
    _, mean, rstd, mask = output
    ctx.mark_non_differentiable(mean, rstd, mask)
    ctx.set_materialize_grads(False)  # else every backward would fill a zero gradient of the mask
    ctx.save_for_backward(x, u, weight, bias, mean, rstd, mask)


def _differentiate_forward(ctx, dy, *_):
    if dy is None:
        return (None,) * 14
    *config, backend = ctx.config
    dweight_wanted = ctx.needs_input_grad[2]
    dx, du, dweight, dbias = _lmsd_backward(dy, *ctx.saved_tensors, *config, dweight_wanted, backend)
    return dx, du, dweight if dweight_wanted else None, dbias, *(None,) * 10


_lmsd_forward.register_autograd(_differentiate_forward, setup_context=_save_forward)


def _save_backward(ctx, inputs, output):
    dy, x, u, weight, bias, _, _, mask, *ctx.config = inputs
    ctx.save_for_backward(dy, x, u, weight, bias, mask)


def _differentiate_backward(ctx, *grads):
    """The second derivative: differentiate the reference backward with the statistics as functions of x."""
    *tensors, mask = ctx.saved_tensors
    eps, dropout_ratio, silu, concat_u, concat_x, groups, dweight_wanted, _ = ctx.config
    with torch.enable_grad():
        inputs = dy, x, u, weight, bias = [tensor.detach().requires_grad_() for tensor in tensors]
        mean, rstd = reference.statistics(x, eps, groups)
        kept = mask if dropout_ratio > 0 else None
        flags = (silu, concat_u, concat_x, groups)
        outputs = reference.backward(dy, x, u, weight, bias, mean, rstd, kept, dropout_ratio, *flags)
        wanted = [i for i in range(4) if grads[i] is not None and (dweight_wanted or i != 2)]
        second = torch.autograd.grad(
            [outputs[i] for i in wanted], inputs, [grads[i] for i in wanted], allow_unused=True
        )
    return *second, *(None,) * 11


_lmsd_backward.register_autograd(_differentiate_backward, setup_context=_save_backward)
