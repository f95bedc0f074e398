"""The front of an STU layer: LayerNorm, the fused UVQK projection and attention as one differentiable function.

With both recompute options on, the Triton backend keeps x and its statistics: the backward normalises and projects
again (V, Q and K only). Where the rest of the layer can be fused too, ``ops.stu`` serves the whole of it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from generative_recommenders.ops.attention.attention import attend
from generative_recommenders.ops.attention.backends import ATTENTION, kernels
from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.attention.uvqk import Projection, UvqkParameters, compute_dtype
from generative_recommenders.ops.dispatch import Backend


def hstu_preprocess_attention(
    x: torch.Tensor,
    parameters: UvqkParameters,
    projection: Projection,
    call: AttentionCall,
    backend: Backend | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm(x) W_uvqk + b, split into U, V, Q, K, and HSTU attention over them.

    Args:
        x: [T, D].
        parameters: of norm and projection. Under autocast of any dtype: the products run in the autocast dtype.
        projection: sizes, and what is redone in the backward.
        call, backend: as ``hstu_mha`` takes them one by one.

    Returns:
        u [T, H * d_v] before its SiLU, and the attention output [T, H * d_v].

    Raises:
        ValueError: sizes or dtypes that do not fit, or a backend that cannot serve the call.
    """
    parameters = parameters.checked(x, projection.columns)
    weight = parameters.weight
    if not torch.is_autocast_enabled(x.device.type) and x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and uvqk_weight {weight.dtype}: cast one, or run under autocast")
    if ATTENTION.choose(projection.shape(x), backend) is Backend.TRITON:
        return _FusedFront.apply(x, *parameters, projection, projection.checked_call(x, call))
    normed = F.layer_norm(x, (x.shape[-1],), parameters.norm_weight, parameters.norm_bias, projection.eps)
    uvqk = torch.addmm(parameters.bias, normed, weight)
    cut = projection.u_columns
    return uvqk[:, :cut], attend(*projection.split(uvqk[:, cut:]), call, Backend.PYTORCH).flatten(1)


class _FusedFront(torch.autograd.Function):
    """x and parameters → u and attention output."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, projection: Projection, call: AttentionCall):
        dtype = compute_dtype(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        normed, mean, rstd = kernels().normalize(x, norm_weight, norm_bias, projection.eps, dtype)
        vqk: torch.Tensor | None
        u, vqk = projection.project(normed, weight, bias)
        out = projection.attend(vqk, call)
        normed = None if projection.recompute_normed_x else normed
        vqk = None if projection.recompute_uvqk else vqk
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias, normed, mean, rstd, vqk)
        ctx.projection, ctx.call, ctx.dtype = projection, call, dtype
        ctx.set_materialize_grads(False)
        return u, out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, du, d_out):
        projection, dtype = ctx.projection, ctx.dtype
        x, norm_weight, norm_bias, weight, bias, normed, mean, rstd, vqk = ctx.saved_tensors
        if normed is None:
            normed, mean, rstd = kernels().normalize(x, norm_weight, norm_bias, projection.eps, dtype)
        if vqk is None:
            vqk = projection.project_vqk(normed, weight, bias)
        # An output that nothing was computed from has no gradient: its columns stay zero.
        make = torch.zeros if du is None or d_out is None else torch.empty
        grad = make(x.shape[0], weight.shape[1], device=x.device, dtype=dtype)
        d_bias = torch.zeros(weight.shape[1], device=x.device, dtype=torch.float32)
        if du is not None:
            d_bias[: projection.u_columns] = kernels().sum_columns(grad[:, : projection.u_columns].copy_(du))
        if d_out is not None:
            d_bias[projection.u_columns :] = projection.attend_backward(d_out, vqk, grad, ctx.call)
        del vqk
        d_weight = torch.mm(normed.t(), grad)
        del normed
        d_normed = torch.mm(grad, weight.to(dtype).t())
        del grad
        dx, *d_norm = kernels().normalize_backward(x, d_normed, norm_weight, mean, rstd)
        gradients, parameters = (*d_norm, d_weight, d_bias), (norm_weight, norm_bias, weight, bias)
        return dx, *(g.to(p.dtype) for g, p in zip(gradients, parameters, strict=True)), None, None
