"""The front of an STU layer: LayerNorm, the fused UVQK projection and attention as one differentiable function.

Memory. With both recompute options on, the Triton backend keeps x alone: the backward normalises and projects again
(V, Q and K only). The gradients of U, V, Q and K are written straight into one [T, 2 (d_v + d_qk) H] buffer, which the
two products of the projection's backward read.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from generative_recommenders.ops.attention.attention import (
    backend_checks,
    check_attention_inputs,
    hstu_mha,
    make_call,
)
from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.dispatch import Backend, choose_backend


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
    return_residual: bool = False,
) -> tuple[torch.Tensor, ...]:
    """LayerNorm(x) W_uvqk + b, split into U, V, Q, K, and HSTU attention over them.

    Args:
        x: [T, D]. norm_weight, norm_bias: [D].
        uvqk_weight: [D, H * (2 * hidden_dim + 2 * attn_dim)], columns in the order U, V, Q, K, each head after head.
        uvqk_bias: one entry per column of ``uvqk_weight``.
        num_heads: H. attn_dim: d_qk. hidden_dim: d_v.
        recompute_normed_x, recompute_uvqk: redo the normalised input and the projection in the backward instead of
            keeping them (Triton backend; the PyTorch backend keeps what autograd keeps).
        return_residual: also return x itself, to be added to the layer's output: its gradient then joins the
            LayerNorm's in one kernel instead of a separate sum over [T, D].
        Others: as ``hstu_mha``. Under autocast the products run in the autocast dtype with parameters of any dtype.

    Returns:
        u [T, H * d_v] before its SiLU, the attention output [T, H * d_v], and with ``return_residual`` x.

    Raises:
        ValueError: sizes or dtypes that do not fit, or a backend that cannot serve the call.
    """
    columns = num_heads * 2 * (hidden_dim + attn_dim)
    if x.dim() != 2 or tuple(uvqk_weight.shape) != (x.shape[1], columns):
        raise ValueError(
            f"x must be [T, D] and uvqk_weight [D, {columns}]: got {tuple(x.shape)} and {tuple(uvqk_weight.shape)}"
        )
    dtype = _compute_dtype(x, uvqk_weight)
    if choose_backend("attention", backend, backend_checks(x, attn_dim, hidden_dim, dtype)) is Backend.TRITON:
        _check(
            x, num_heads, attn_dim, hidden_dim, seq_offsets, max_seq_len, num_targets, max_attn_len, contextual_seq_len
        )
        call = make_call(
            x, seq_offsets, max_seq_len, alpha, attn_norm, num_targets, causal, max_attn_len, contextual_seq_len
        )
        plan = _Plan(num_heads, attn_dim, hidden_dim, norm_eps, dtype, call, recompute_normed_x, recompute_uvqk)
        u, out, residual = _FusedFront.apply(x, norm_weight, norm_bias, uvqk_weight, uvqk_bias, plan)
        return (u, out, residual) if return_residual else (u, out)
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
    return (u, out, x) if return_residual else (u, out)


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and uvqk_weight {weight.dtype}: cast one, or run under autocast")
    return x.dtype


def _check(x, heads, d_qk, d_v, seq_offsets, max_seq_len, num_targets, max_attn_len, contextual_seq_len) -> None:
    q = x[:, :1, None].expand(-1, heads, d_qk)
    v = x[:, :1, None].expand(-1, heads, d_v)
    check_attention_inputs(q, q, v, seq_offsets, max_seq_len, num_targets, max_attn_len, contextual_seq_len)


class _Plan:
    """Sizes and options of one fused front, and its views of the V, Q, K columns."""

    def __init__(self, heads, d_qk, d_v, eps, dtype, call: AttentionCall, recompute_normed_x, recompute_uvqk):
        self.heads, self.d_qk, self.d_v = heads, d_qk, d_v
        self.eps, self.dtype, self.call = eps, dtype, call
        self.recompute_normed_x, self.recompute_uvqk = recompute_normed_x, recompute_uvqk
        self.u_columns = heads * d_v

    def split_vqk(self, vqk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) views [T, H, d] of the columns V, Q, K."""
        v, q, k = vqk.split([self.heads * d for d in (self.d_v, self.d_qk, self.d_qk)], dim=1)
        return tuple(t.unflatten(1, (self.heads, -1)) for t in (q, k, v))


class _FusedFront(torch.autograd.Function):
    """x and parameters → u, attention output and x again (the residual path)."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, plan: _Plan):
        from generative_recommenders.ops.attention.kernels import forward_into
        from generative_recommenders.ops.attention.triton_layer_norm import normalize

        if x.stride(1) != 1:
            x = x.contiguous()
        normed, mean, rstd = normalize(x, norm_weight, norm_bias, plan.eps, plan.dtype)
        w, b = weight.to(plan.dtype), bias.to(plan.dtype)
        cut = plan.u_columns
        if plan.recompute_uvqk:
            # Two buffers, so that U can live on (LMSD keeps it) without V, Q and K.
            u = torch.addmm(b[:cut], normed, w[:, :cut])
            vqk = torch.addmm(b[cut:], normed, w[:, cut:])
        else:
            uvqk = torch.addmm(b, normed, w)
            u, vqk = uvqk[:, :cut], uvqk[:, cut:]
        q, k, v = plan.split_vqk(vqk)
        out = torch.empty(x.shape[0], plan.heads, plan.d_v, device=x.device, dtype=plan.dtype)
        forward_into(q, k, v, out, plan.call)
        kept_normed = (None, None, None) if plan.recompute_normed_x else (normed, mean, rstd)
        kept_vqk = None if plan.recompute_uvqk else vqk
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias, *kept_normed, kept_vqk)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return u, out.flatten(1), x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, du, dout, d_residual):
        from generative_recommenders.ops.attention.kernels import backward_into
        from generative_recommenders.ops.attention.triton_layer_norm import (
            normalize,
            normalize_backward,
            sum_columns,
        )

        plan: _Plan = ctx.plan
        x, norm_weight, norm_bias, weight, bias, normed, mean, rstd, vqk = ctx.saved_tensors
        w, b, cut = weight.to(plan.dtype), bias.to(plan.dtype), plan.u_columns
        if normed is None:
            normed, mean, rstd = normalize(x, norm_weight, norm_bias, plan.eps, plan.dtype)
        if vqk is None:
            vqk = torch.addmm(b[cut:], normed, w[:, cut:])
        grad = torch.empty(x.shape[0], weight.shape[1], device=x.device, dtype=plan.dtype)
        d_bias = torch.zeros(weight.shape[1], device=x.device, dtype=torch.float32)
        if du is not None:
            d_bias[:cut] = sum_columns(du, target=grad[:, :cut])
        else:
            grad[:, :cut].zero_()
        if dout is not None:
            dq, dk, dv = plan.split_vqk(grad[:, cut:])
            dout = dout.to(plan.dtype).unflatten(1, (plan.heads, plan.d_v))
            backward_into(dout, *plan.split_vqk(vqk), dq, dk, dv, plan.call)
            d_bias[cut:] = sum_columns(grad[:, cut:])
        else:
            grad[:, cut:].zero_()
        del vqk
        d_weight = torch.mm(normed.t(), grad).to(weight.dtype)
        del normed
        d_normed = torch.mm(grad, w.t())
        del grad
        dx, d_norm_weight, d_norm_bias = normalize_backward(x, d_normed, norm_weight, mean, rstd, d_residual)
        return (
            dx,
            d_norm_weight.to(norm_weight.dtype),
            d_norm_bias.to(norm_bias.dtype),
            d_weight,
            d_bias.to(bias.dtype),
            None,
        )
