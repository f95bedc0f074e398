"""The absorbed computation on Triton: everything around the two passes over x, forward and backward, by hand.

The LayerNorm's affine part is folded into the projection (``_fold``), so that rows enter as x_hat, and the folded bias
is one more row of the folded weight: every product with it carries the bias terms along in column D (``DQ`` columns in
all). What is kept for the backward: x, 8 bytes a row of statistics, and tensors of C rows.

The gradient of a candidate's Q needs the sum over all rows that the pass itself computes, so the candidate rows'
residual, U and Q gradients are added in place to those C rows right behind the pass.
"""

from __future__ import annotations

import torch

from generative_recommenders.ops.candidate_attention.backends import kernels
from generative_recommenders.ops.candidate_attention.call import Sizes
from generative_recommenders.ops.candidate_attention.rows import CandidateRows

_PAD = 8  # columns behind D: the bias terms' one, and the rest to keep rows aligned


def absorbed_attention(
    x, seq_offsets, candidates: CandidateRows, norm_weight, norm_bias, uvqk_weight, uvqk_bias, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``candidate_attention`` on Triton; see there."""
    x = x if x.stride(1) == 1 or x.numel() == 0 else x.contiguous()
    return _Absorbed.apply(x, norm_weight, norm_bias, uvqk_weight, uvqk_bias, seq_offsets, candidates, sizes)


class _Absorbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, seq_offsets, candidates, sizes):
        folded = _fold(norm_weight, norm_bias, weight, bias, x.dtype)
        width, heads = x.shape[1], sizes.num_heads
        cols_u, cols_v, cols_q, cols_k = sizes.columns()
        own = x.index_select(0, candidates.rows)
        own_hat = torch.nn.functional.layer_norm(own, (width,), eps=sizes.eps)
        u = torch.addmm(folded[width, cols_u], own_hat, folded[:width, cols_u])
        q = torch.addmm(folded[width, cols_q], own_hat, folded[:width, cols_q])
        qw = _per_head_product(q, folded[:, cols_k], heads)
        sums, stats = kernels().absorbed_forward(x, seq_offsets, candidates, qw, sizes)
        sums = sums.to(x.dtype)
        attn = _project_per_head(sums, folded[:, cols_v], heads)
        ctx.save_for_backward(
            x, norm_weight, norm_bias, weight, seq_offsets, folded, own_hat, q, qw, sums, stats, candidates.rows
        )
        ctx.candidates, ctx.sizes, ctx.bias_dtype = candidates, sizes, bias.dtype
        return own, u, attn

    @staticmethod
    def backward(ctx, d_own, du, d_attn):
        x, norm_weight, norm_bias, weight, seq_offsets, folded, own_hat, q, qw, sums, stats, rows = ctx.saved_tensors
        candidates, sizes = ctx.candidates, ctx.sizes
        width, heads = x.shape[1], sizes.num_heads
        cols_u, cols_v, cols_q, cols_k = sizes.columns()
        d_folded = torch.empty_like(folded)
        gs = _per_head_product(d_attn, folded[:, cols_v], heads)
        _outer_per_head(sums, d_attn, d_folded[:, cols_v], heads)
        dx, ds_sums = kernels().absorbed_backward(x, seq_offsets, candidates, qw, gs, stats, sizes)
        ds_sums = ds_sums.to(x.dtype)
        dq = _project_per_head(ds_sums, folded[:, cols_k], heads)
        _outer_per_head(ds_sums, q, d_folded[:, cols_k], heads)
        d_own_hat = torch.mm(du, folded[:width, cols_u].t()).addmm_(dq, folded[:width, cols_q].t())
        for grad, cols in ((du, cols_u), (dq, cols_q)):
            torch.mm(own_hat.t(), grad, out=d_folded[:width, cols])
            torch.sum(grad, 0, out=d_folded[width, cols])
        kernels().add_candidate_rows(dx, rows, x, stats, d_own_hat, d_own)
        d_norm_weight, d_norm_bias, d_weight, d_bias = _unfold(d_folded, norm_weight, norm_bias, weight)
        return dx, d_norm_weight, d_norm_bias, d_weight, d_bias.to(ctx.bias_dtype), None, None, None


def _fold(norm_weight, norm_bias, weight, bias, dtype) -> torch.Tensor:
    """[D + 8, columns]: norm_weight * W, then norm_bias W + b in row D, then zeros, in x's dtype."""
    width = weight.shape[0]
    folded = weight.new_empty(width + _PAD, weight.shape[1], dtype=dtype)
    torch.mul(weight, norm_weight[:, None], out=folded[:width])
    folded[width:] = 0
    folded[width] = torch.addmv(bias.to(weight.dtype), weight.t(), norm_bias.to(weight.dtype))
    return folded


def _unfold(d_folded, norm_weight, norm_bias, weight):
    """Gradients of norm weight, norm bias, W and b from that of the folded weight."""
    width = weight.shape[0]
    d_weight, d_bias = d_folded[:width].to(weight.dtype), d_folded[width].to(weight.dtype)
    d_norm_weight = torch.linalg.vecdot(d_weight, weight)
    d_norm_bias = torch.mv(weight, d_bias)
    d_weight = torch.addcmul(norm_bias[:, None] * d_bias, d_weight, norm_weight[:, None])
    return d_norm_weight.to(norm_weight.dtype), d_norm_bias.to(norm_bias.dtype), d_weight, d_bias


def _heads_first(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[C, H * d] → [H, C, d], a view."""
    return rows.unflatten(1, (heads, -1)).transpose(0, 1)


def _per_head_product(rows, weight, heads) -> torch.Tensor:
    """rows [C, H * d], weight [DQ, H * d] → fp32 [C, H, DQ]: per head rows_h weight_h^T."""
    left, right = _heads_first(rows, heads), weight.unflatten(1, (heads, -1)).permute(1, 2, 0)
    out = rows.new_empty(rows.shape[0], heads, weight.shape[0], dtype=torch.float32)
    if rows.dtype == torch.float32:
        torch.bmm(left, right, out=out.transpose(0, 1))
    elif rows.is_cuda:
        torch.bmm(left, right, out_dtype=torch.float32, out=out.transpose(0, 1))
    else:  # the CPU has no product of half-precision operands with an fp32 result
        torch.bmm(left.float(), right.float(), out=out.transpose(0, 1))
    return out


def _project_per_head(sums, weight, heads) -> torch.Tensor:
    """sums [C, H, DQ], weight [DQ, H * d] → [C, H * d]."""
    right = weight.unflatten(1, (heads, -1)).transpose(0, 1)
    out = sums.new_empty(sums.shape[0], heads, right.shape[2])
    torch.bmm(sums.transpose(0, 1), right, out=out.transpose(0, 1))
    return out.flatten(1)


def _outer_per_head(sums, rows, out, heads) -> None:
    """out [DQ, H * d] = per head sums_h^T rows_h, summed over candidates."""
    view = out.unflatten(1, (heads, -1)).transpose(0, 1)
    torch.bmm(sums.permute(1, 2, 0), _heads_first(rows, heads), out=view)
