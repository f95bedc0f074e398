"""The absorbed computation on Triton: everything around the two passes over x, forward and backward, by hand.

The LayerNorm's affine part is folded into the projection (``_fold``), so that rows enter as x_hat, and the folded bias
is one more row of the folded weight: every product with it carries the bias terms along in column D (``DQ`` columns in
all). What is kept for the backward: x, 8 bytes a row of statistics, and tensors of C rows.

The gradient of a candidate's Q needs the sum over all rows that the pass itself computes, so the candidate rows'
residual, U and Q gradients are added in place to those C rows right behind the pass.
"""

from __future__ import annotations

import dataclasses

import torch

from generative_recommenders.ops.candidate_attention.rows import CandidateRows

MAX_WIDTH = 1024
OPERAND_BYTES = 32 * 1024  # of D x columns; shared memory holds two forms of it beside the tiles of rows
_PAD = 8  # columns behind D: the bias terms' one, and the rest to keep rows aligned


@dataclasses.dataclass(frozen=True)
class Sizes:
    """H, d_qk, d_v, the score factor, the LayerNorm's eps and the attention divisor (float, or fp32 tensor)."""

    num_heads: int
    attn_dim: int
    hidden_dim: int
    alpha: float
    eps: float
    attn_norm: float | torch.Tensor

    def columns(self) -> tuple[slice, slice, slice, slice]:
        """Columns of U, V, Q, K in the fused projection."""
        value, query = self.num_heads * self.hidden_dim, self.num_heads * self.attn_dim
        return (
            slice(0, value),
            slice(value, 2 * value),
            slice(2 * value, 2 * value + query),
            slice(2 * value + query, 2 * (value + query)),
        )


def why_not_absorbed(x: torch.Tensor, num_heads: int) -> str | None:
    """Why the Triton kernels cannot serve rows like x with this many heads, or ``None``."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} is not one of float32, float16, bfloat16"
    if x.shape[1] > MAX_WIDTH:
        return f"embedding width {x.shape[1]} is above {MAX_WIDTH}"
    least, most = operand_columns(x.shape[1], x.dtype, num_heads)
    if least > most:
        return f"{num_heads} heads at embedding width {x.shape[1]} in {x.dtype} need more shared memory than there is"
    return None


def operand_columns(width: int, dtype: torch.dtype, num_heads: int) -> tuple[int, int]:
    """Fewest columns that hold one candidate (both directions), and most that fit shared memory; powers of two."""
    power = lambda n: 1 << (n - 1).bit_length()  # noqa: E731
    return max(16, power(2 * num_heads)), OPERAND_BYTES // (max(16, power(width)) * dtype.itemsize)


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
        sums, stats = _passes().forward_pass(x, seq_offsets, candidates, qw, sizes)
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
        dx, ds_sums = _passes().backward_pass(x, seq_offsets, candidates, qw, gs, stats, sizes)
        ds_sums = ds_sums.to(x.dtype)
        dq = _project_per_head(ds_sums, folded[:, cols_k], heads)
        _outer_per_head(ds_sums, q, d_folded[:, cols_k], heads)
        d_own_hat = torch.mm(du, folded[:width, cols_u].t()).addmm_(dq, folded[:width, cols_q].t())
        for grad, cols in ((du, cols_u), (dq, cols_q)):
            torch.mm(own_hat.t(), grad, out=d_folded[:width, cols])
            torch.sum(grad, 0, out=d_folded[width, cols])
        _passes().add_candidate_rows(dx, rows, x, stats, d_own_hat, d_own)
        d_norm_weight, d_norm_bias, d_weight, d_bias = _unfold(d_folded, norm_weight, norm_bias, weight)
        return dx, d_norm_weight, d_norm_bias, d_weight, d_bias.to(ctx.bias_dtype), None, None, None


def _passes():
    """The kernel launches; imported on first use, so that importing the package does not import Triton."""
    from generative_recommenders.ops.candidate_attention import triton_launch

    return triton_launch


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
