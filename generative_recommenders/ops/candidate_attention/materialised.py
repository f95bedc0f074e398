"""The materialised computation on Triton: keys and values of all rows, then one query row per sequence.

Linear in T and plain: LayerNorm and the K, V projection are PyTorch operators under autograd, the attention of one
candidate per sequence is a kernel. It exists to be compared with and for widths the absorbed kernels do not take.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from generative_recommenders.ops.candidate_attention.backends import kernels
from generative_recommenders.ops.candidate_attention.call import Sizes
from generative_recommenders.ops.candidate_attention.rows import CandidateRows


def materialised_attention(
    x, seq_offsets, candidates: CandidateRows, norm_weight, norm_bias, uvqk_weight, uvqk_bias, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``candidate_attention`` for one candidate per sequence; see there."""
    dtype, width = x.dtype, x.shape[1]
    norm_weight, norm_bias, uvqk_weight, uvqk_bias = (
        p.to(dtype) for p in (norm_weight, norm_bias, uvqk_weight, uvqk_bias)
    )
    u_cols, v_cols, q_cols, k_cols = sizes.columns()
    normed = F.layer_norm(x, (width,), norm_weight, norm_bias, sizes.eps)
    own = x.index_select(0, candidates.rows)
    own_normed = F.layer_norm(own, (width,), norm_weight, norm_bias, sizes.eps)
    u = torch.addmm(uvqk_bias[u_cols], own_normed, uvqk_weight[:, u_cols])
    q = torch.addmm(uvqk_bias[q_cols], own_normed, uvqk_weight[:, q_cols])
    k = torch.addmm(uvqk_bias[k_cols], normed, uvqk_weight[:, k_cols])
    v = torch.addmm(uvqk_bias[v_cols], normed, uvqk_weight[:, v_cols])
    return own, u, _OneQueryAttention.apply(q, k, v, seq_offsets, sizes)


class _OneQueryAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, seq_offsets, sizes):
        ctx.save_for_backward(q, k, v, seq_offsets)
        ctx.sizes = sizes
        return kernels().materialised_forward(q, k, v, seq_offsets, sizes)

    @staticmethod
    def backward(ctx, d_out):
        return *kernels().materialised_backward(*ctx.saved_tensors, d_out.contiguous(), ctx.sizes), None, None
