"""The front of an STU layer: LayerNorm, the fused UVQK projection and attention as one differentiable function.

With both recompute options on, the Triton backend keeps x and its statistics: the backward normalises and projects
again (V, Q and K only). Where the rest of the layer can be fused too, ``ops.stu`` serves the whole of it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from generative_recommenders.ops.attention.attention import hstu_mha, make_row_call
from generative_recommenders.ops.attention.backends import ATTENTION, kernels
from generative_recommenders.ops.attention.uvqk import Projection, compute_dtype
from generative_recommenders.ops.checks import vector
from generative_recommenders.ops.dispatch import Backend


def hstu_preprocess_attention(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    uvqk_weight: torch.Tensor,
    uvqk_bias: torch.Tensor,
    num_heads: int,
    attn_dim: int,
    hidden_dim: int,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    attn_norm: float | torch.Tensor,
    num_targets: torch.Tensor | None = None,
    causal: bool = True,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    recompute_normed_x: bool = True,
    recompute_uvqk: bool = True,
    backend: Backend | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm(x) W_uvqk + b, split into U, V, Q, K, and HSTU attention over them.

    Args:
        x: [T, D]. norm_weight, norm_bias: [D].
        uvqk_weight: [D, H * (2 * hidden_dim + 2 * attn_dim)], columns in the order U, V, Q, K, each head after head.
        uvqk_bias: one entry per column of ``uvqk_weight``.
        num_heads: H. attn_dim: d_qk. hidden_dim: d_v.
        recompute_normed_x, recompute_uvqk: redo the normalised input and the projection in the backward instead of
            keeping them (Triton backend; the PyTorch backend keeps what autograd keeps).
        Others: as ``hstu_mha``. Under autocast the products run in the autocast dtype with parameters of any dtype.

    Returns:
        u [T, H * d_v] before its SiLU, and the attention output [T, H * d_v].

    Raises:
        ValueError: sizes or dtypes that do not fit, or a backend that cannot serve the call.
    """
    columns = num_heads * 2 * (hidden_dim + attn_dim)
    if x.dim() != 2 or tuple(uvqk_weight.shape) != (x.shape[1], columns):
        raise ValueError(
            f"x must be [T, D] and uvqk_weight [D, {columns}]: got {tuple(x.shape)} and {tuple(uvqk_weight.shape)}"
        )
    norm_weight, norm_bias = vector("norm_weight", norm_weight, x.shape[1]), vector("norm_bias", norm_bias, x.shape[1])
    uvqk_bias = vector("uvqk_bias", uvqk_bias, columns)
    dtype = compute_dtype(x)
    if not torch.is_autocast_enabled(x.device.type) and x.dtype != uvqk_weight.dtype:
        raise ValueError(f"x is {x.dtype} and uvqk_weight {uvqk_weight.dtype}: cast one, or run under autocast")
    if ATTENTION.choose(Projection.shape(x, attn_dim, hidden_dim), backend) is Backend.TRITON:
        call = make_row_call(
            x, num_heads, attn_dim, hidden_dim, seq_offsets, max_seq_len, alpha, attn_norm, num_targets, causal,
            max_attn_len, contextual_seq_len,
        )  # fmt: skip
        plan = Projection(num_heads, attn_dim, hidden_dim, norm_eps, dtype, call, recompute_normed_x, recompute_uvqk)
        return _FusedFront.apply(x, norm_weight, norm_bias, uvqk_weight, uvqk_bias, plan)
    normed = F.layer_norm(x, (x.shape[-1],), norm_weight, norm_bias, norm_eps)
    uvqk = torch.addmm(uvqk_bias, normed, uvqk_weight)
    u, v, q, k = uvqk.split([num_heads * d for d in (hidden_dim, hidden_dim, attn_dim, attn_dim)], dim=1)
    out = hstu_mha(
        q.unflatten(1, (num_heads, attn_dim)),
        k.unflatten(1, (num_heads, attn_dim)),
        v.unflatten(1, (num_heads, hidden_dim)),
        seq_offsets,
        max_seq_len,
        alpha,
        attn_norm,
        num_targets,
        causal,
        max_attn_len,
        contextual_seq_len,
        Backend.PYTORCH,
    ).flatten(1)
    return u, out


class _FusedFront(torch.autograd.Function):
    """x and parameters → u and attention output."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, plan: Projection):
        if x.stride(1) != 1:
            x = x.contiguous()
        normed, mean, rstd = kernels().normalize(x, norm_weight, norm_bias, plan.eps, plan.dtype)
        u, vqk = plan.project(normed, weight, bias)
        out = plan.attend(vqk)
        normed = None if plan.recompute_normed_x else normed
        vqk = None if plan.recompute_uvqk else vqk
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias, normed, mean, rstd, vqk)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return u, out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, du, d_out):
        plan: Projection = ctx.plan
        x, norm_weight, norm_bias, weight, bias, normed, mean, rstd, vqk = ctx.saved_tensors
        if normed is None:
            normed, mean, rstd = kernels().normalize(x, norm_weight, norm_bias, plan.eps, plan.dtype)
        if vqk is None:
            vqk = plan.project_vqk(normed, weight, bias)
        # An output that nothing was computed from has no gradient: its columns stay zero.
        make = torch.zeros if du is None or d_out is None else torch.empty
        grad = make(x.shape[0], weight.shape[1], device=x.device, dtype=plan.dtype)
        d_bias = torch.zeros(weight.shape[1], device=x.device, dtype=torch.float32)
        if du is not None:
            d_bias[: plan.u_columns] = kernels().sum_columns(grad[:, : plan.u_columns].copy_(du))
        if d_out is not None:
            d_bias[plan.u_columns :] = plan.attend_backward(d_out, vqk, grad)
        del vqk
        d_weight = torch.mm(normed.t(), grad).to(weight.dtype)
        del normed
        d_normed = torch.mm(grad, weight.to(plan.dtype).t())
        del grad
        dx, d_norm_weight, d_norm_bias = kernels().normalize_backward(x, d_normed, norm_weight, mean, rstd)
        return (
            dx,
            d_norm_weight.to(norm_weight.dtype),
            d_norm_bias.to(norm_bias.dtype),
            d_weight,
            d_bias.to(bias.dtype),
            None,
        )
