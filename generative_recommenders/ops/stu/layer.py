"""A whole STU layer, LayerNorm → U, V, Q, K → attention → LMSD → output projection → residual, as one function.

Why not a composition of functions: between functions gradients would be copied and summed. Here

- LMSD's and attention's backward write the gradients of U, V, Q and K into one buffer that two products read; of their
  column sums, the projection's bias gradient, U's leave LMSD's backward and only V's, Q's and K's are read back;
- the forward's LayerNorm copies x into the output, where the output projection is added to it;
- the backward's LayerNorm adds the residual's gradient;
- y = LMSD's output, where it is not kept, is written by LMSD's backward in the place of its own gradient.

Kept for the backward, in units of T * D elements at D = H * d_v = H * d_qk: x, U, attention output, a byte per element
for the dropout mask; without ``recompute_normed_x`` 1, ``recompute_uvqk`` 3, ``recompute_y`` 3 more.
"""

from __future__ import annotations

import dataclasses

import torch

from generative_recommenders.ops.attention.backends import ATTENTION, kernels
from generative_recommenders.ops.attention.call import AttentionCall, AttentionShape
from generative_recommenders.ops.attention.uvqk import Projection, UvqkParameters, compute_dtype
from generative_recommenders.ops.checks import matrix, vector
from generative_recommenders.ops.dispatch import Backend
from generative_recommenders.ops.lmsd.backends import LMSD
from generative_recommenders.ops.lmsd.backends import kernels as lmsd_kernels
from generative_recommenders.ops.lmsd.contract import LmsdConfig, LmsdShape
from generative_recommenders.ops.stu.call import OutputParameters


def why_not_fused(
    x: torch.Tensor, projection: Projection, use_group_norm: bool = False, backend: Backend | str | None = None
) -> str | None:
    """Why ``hstu_layer`` cannot serve rows x [T, D], or ``None``: both of its parts must run on Triton.

    Args:
        projection, backend: as ``hstu_layer``.
        use_group_norm: whether output statistics are taken per head.

    Raises:
        BackendUnavailable: the backend asked for by name cannot serve attention or LMSD.
    """
    return why_not_fused_shape(projection.shape(x), x.shape[0], projection, use_group_norm, backend)


def why_not_fused_shape(
    attention: AttentionShape,
    rows: int,
    projection: Projection,
    use_group_norm: bool = False,
    backend: Backend | str | None = None,
) -> str | None:
    """``why_not_fused`` of T = ``rows`` rows that need not be there: ``attention`` is what decides about theirs."""
    if use_group_norm:
        return "group norm"
    u_columns, columns = projection.u_columns, projection.columns
    if u_columns % 8 or columns % 8:
        return f"U's {u_columns} columns of {columns} are not multiples of 8"
    chosen = ATTENTION.choose(attention, backend)
    if chosen is not Backend.TRITON:
        return f"attention runs on {chosen.value}"
    dtype, plain = attention.product_dtype, LmsdConfig(0.0, True, True, True)
    chosen = LMSD.choose(LmsdShape(attention.device, dtype, (dtype, dtype), rows, u_columns, plain), backend)
    return None if chosen is Backend.TRITON else f"LMSD runs on {chosen.value}"


def hstu_layer(
    x: torch.Tensor,
    parameters: UvqkParameters,
    output: OutputParameters,
    projection: Projection,
    call: AttentionCall,
    dropout_ratio: float = 0.0,
    seed: int | torch.Tensor = 0,
    recompute_y: bool = True,
) -> torch.Tensor:
    """``x + LMSD(attention(V, Q, K), U) W_out`` with ``U, V, Q, K = LayerNorm(x) W_uvqk + b``; once differentiable.

    Args:
        x: [T, D].
        parameters, output: of any dtype.
        projection: sizes, the eps of both norms, and what of the projection is redone in the backward.
        call: as ``ops.attention.hstu_mha`` takes it one by one.
        dropout_ratio, seed: as ``ops.lmsd.hstu_lmsd``; pass 0 in evaluation.
        recompute_y: redo LMSD in the backward instead of keeping its result.

    Returns:
        [T, D] in the dtype of x, or under autocast in its dtype. Products run in the result's dtype, and gradients
        come back in each parameter's own.

    Raises:
        ValueError, TypeError: sizes, dtypes or numbers that do not fit. Ask ``why_not_fused`` first.
    """
    parameters, width = parameters.checked(x, projection.columns), projection.u_columns
    out_norm = (vector(f"output_{name}", getattr(output, name), width) for name in ("norm_weight", "norm_bias"))
    lmsd = LmsdConfig(dropout_ratio, True, True, True, eps=projection.eps)
    plan = _Plan(projection, projection.checked_call(x, call), compute_dtype(x), lmsd, seed, recompute_y)
    return _FusedLayer.apply(
        x, *parameters, *out_norm, matrix("output_weight", output.weight, x.shape[1], 3 * width), plan
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything of a layer's call but its tensors of rows and parameters."""

    front: Projection
    call: AttentionCall
    dtype: torch.dtype
    lmsd: LmsdConfig
    seed: int | torch.Tensor
    recompute_y: bool

    def room_for_dy(self, grad: torch.Tensor) -> torch.Tensor:
        """A buffer for LMSD's upstream gradient: the V, Q, K columns of ``grad`` until they get theirs, if they do."""
        free, width = grad[:, self.front.u_columns :], 3 * self.front.u_columns
        return free[:, :width] if free.shape[1] >= width else grad.new_empty(grad.shape[0], width)


class _FusedLayer(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, out_norm_weight, out_norm_bias, out_weight, plan: _Plan):
        front = plan.front
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, device=x.device, dtype=plan.dtype)
        normed, mean, rstd = kernels().normalize(x, norm_weight, norm_bias, front.eps, plan.dtype, copy=out)
        vqk: torch.Tensor | None
        u, vqk = front.project(normed, weight, bias)
        normed = None if front.recompute_normed_x else normed
        attention = front.attend(vqk, plan.call)
        vqk = None if front.recompute_uvqk else vqk
        y, *statistics, mask = lmsd_kernels().forward(
            attention, u, out_norm_weight, out_norm_bias, plan.seed, None, plan.lmsd
        )
        out.addmm_(y, out_weight.to(plan.dtype))
        y = None if plan.recompute_y else y
        parameters = (norm_weight, norm_bias, weight, bias, out_norm_weight, out_norm_bias, out_weight)
        ctx.save_for_backward(x, *parameters, normed, mean, rstd, u, vqk, attention, *statistics, mask, y)
        ctx.plan = plan
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        plan, front = ctx.plan, ctx.plan.front
        x, *parameters, normed, mean, rstd, u, vqk, attention, y_mean, y_rstd, mask, y = ctx.saved_tensors
        norm_weight, norm_bias, weight, bias, out_norm_weight, out_norm_bias, out_weight = parameters
        ctx.maybe_clear_saved_tensors()  # so that what is deleted below is freed there
        d_out = d_out.contiguous()
        d_out_weight = None if y is None else torch.mm(y.t(), d_out)
        restore_y, y = y is None, None
        grad = torch.empty(x.shape[0], weight.shape[1], device=x.device, dtype=plan.dtype)
        dy = torch.mm(d_out, out_weight.to(plan.dtype).t(), out=plan.room_for_dy(grad))
        d_attention, u_sums, d_out_norm_weight, d_out_norm_bias = lmsd_kernels().backward_for_layer(
            dy, attention, u, out_norm_weight, out_norm_bias, y_mean, y_rstd, mask, plan.lmsd,
            grad[:, : front.u_columns], restore_y,
        )  # fmt: skip
        if restore_y:
            d_out_weight = torch.mm(dy.t(), d_out)  # dy holds y now
        del dy, u, attention, mask
        if normed is None:
            normed, *_ = kernels().normalize(x, norm_weight, norm_bias, front.eps, plan.dtype)
        if vqk is None:
            vqk = front.project_vqk(normed, weight, bias)
        d_bias = torch.cat([u_sums, front.attend_backward(d_attention, vqk, grad, plan.call)])
        del vqk, d_attention
        d_weight = torch.mm(normed.t(), grad)
        del normed
        d_normed = torch.mm(grad, weight.to(plan.dtype).t())
        del grad
        dx, *d_norm = kernels().normalize_backward(x, d_normed, norm_weight, mean, rstd, residual=d_out)
        gradients = (*d_norm, d_weight, d_bias, d_out_norm_weight, d_out_norm_bias, d_out_weight)
        return dx, *(g.to(p.dtype) for g, p in zip(gradients, parameters, strict=True)), None
