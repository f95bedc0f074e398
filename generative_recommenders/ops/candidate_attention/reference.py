"""Candidate attention in plain PyTorch, any floating dtype: the oracle of the kernels and the CPU backend.

One HSTU layer (Zhai et al., "Actions speak louder than words", 2024) restricted to its candidate rows. With
n = LayerNorm(x) and q, k, v, u = n W + b per head, a candidate c of a sequence sees the history rows j and itself:

    s_j = q_c . k_j        a_j = SiLU(alpha s_j) / N        attn_c = sum_j a_j v_j

*Materialised*: k and v of all rows, then these formulas. *Absorbed*: k and v are linear in n, so

    s_j = (W_k q_c) . n_j + q_c . b_k          attn_c = W_v^T (sum_j a_j n_j) + b_v sum_j a_j

need neither; autograd differentiates both. Sequences are padded to the longest of the batch here.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from generative_recommenders.ops.candidate_attention.call import Sizes
from generative_recommenders.ops.candidate_attention.rows import CandidateRows


def candidate_attention(
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    candidates: CandidateRows,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    uvqk_weight: torch.Tensor,
    uvqk_bias: torch.Tensor,
    sizes: Sizes,
    computation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and result as ``ops.candidate_attention.candidate_attention``."""
    width, num_heads, attn_dim, hidden_dim = x.shape[1], sizes.num_heads, sizes.attn_dim, sizes.hidden_dim
    norm_weight, norm_bias, weight, bias = (p.to(x.dtype) for p in (norm_weight, norm_bias, uvqk_weight, uvqk_bias))
    widths = [columns.stop - columns.start for columns in sizes.columns()]
    (w_u, w_v, w_q, w_k), (b_u, b_v, b_q, b_k) = weight.split(widths, dim=1), bias.split(widths)
    normed = F.layer_norm(x, (width,), norm_weight, norm_bias, sizes.eps)
    of_candidates = normed[candidates.rows]
    u = torch.addmm(b_u, of_candidates, w_u)
    if candidates.rows.numel() == 0:
        return x[candidates.rows], u, torch.addmm(b_v, of_candidates, w_v)  # no rows, but a gradient (of zeros)
    q = torch.addmm(b_q, of_candidates, w_q).view(-1, num_heads, attn_dim)
    row, exists = _padded_rows(seq_offsets)
    slot, filled = _padded_rows(candidates.offsets)
    n = normed[row] * exists[..., None]  # [B, L, D]
    q = q[slot] * filled[..., None, None]  # [B, M, H, d_qk]
    seen = _visible(row, exists, candidates.rows[slot], filled, seq_offsets, candidates.offsets)
    scale = sizes.alpha, sizes.attn_norm
    if computation == "absorbed":
        w_k = w_k.view(width, num_heads, attn_dim)
        absorbed_q = torch.einsum("bmhd,Dhd->bmhD", q, w_k)
        shift = torch.einsum("bmhd,hd->bmh", q, b_k.view(num_heads, attn_dim))
        a = _weights(torch.einsum("bmhD,blD->bmhl", absorbed_q, n) + shift[..., None], seen, *scale)
        summed = torch.einsum("bmhl,blD->bmhD", a, n)
        attn = torch.einsum("bmhD,Dhd->bmhd", summed, w_v.view(width, num_heads, hidden_dim))
        attn = attn + a.sum(-1)[..., None] * b_v.view(num_heads, hidden_dim)
    else:
        k = (n @ w_k + b_k).unflatten(2, (num_heads, attn_dim))
        v = (n @ w_v + b_v).unflatten(2, (num_heads, hidden_dim))
        a = _weights(torch.einsum("bmhd,blhd->bmhl", q, k), seen, *scale)
        attn = torch.einsum("bmhl,blhd->bmhd", a, v)
    return x[candidates.rows], u, attn[filled].flatten(1)


def _padded_rows(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers [B, L] of the sequences padded to the longest, and which of them exist (others are row 0)."""
    lengths = offsets.diff()
    position = torch.arange(int(lengths.max()), device=offsets.device)
    exists = position < lengths[:, None]
    return torch.where(exists, offsets[:-1, None] + position, 0), exists


def _visible(row, exists, candidate_row, filled, seq_offsets, target_offsets) -> torch.Tensor:
    """[B, M, L]: candidate m sees row l if it belongs to the history or is its own."""
    history_end = seq_offsets[1:] - target_offsets.diff()
    history = exists & (row < history_end[:, None])
    own = exists[:, None, :] & (row[:, None, :] == candidate_row[:, :, None])
    return (history[:, None, :] | own) & filled[:, :, None]


def _weights(scores: torch.Tensor, seen: torch.Tensor, alpha: float, attn_norm: float | torch.Tensor) -> torch.Tensor:
    """SiLU(alpha s) / N where seen, else 0: [B, M, H, L]."""
    return F.silu(alpha * scores) / attn_norm * seen[:, :, None, :]
