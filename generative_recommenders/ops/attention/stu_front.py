"""The front of an STU layer: LayerNorm, the fused UVQK projection and attention."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from generative_recommenders.ops.attention.attention import hstu_mha
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
    """LayerNorm(x) W_uvqk + b, split into U, V, Q, K, and HSTU attention over them, as one differentiable function.

    Args:
        x: [T, D]. norm_weight, norm_bias: [D].
        uvqk_weight: [D, H * (2 * hidden_dim + 2 * attn_dim)], columns in the order U, V, Q, K, each head after head.
        uvqk_bias: one entry per column of ``uvqk_weight``.
        num_heads: H. attn_dim: d_qk. hidden_dim: d_v.
        recompute_normed_x, recompute_uvqk: redo the normalised input and the projection in the backward instead of
            keeping them (Triton backend; the PyTorch backend keeps what autograd keeps).
        Others: as ``hstu_mha``.

    Returns:
        u [T, H * d_v] before its SiLU, and the attention output [T, H * d_v].

    Raises:
        ValueError: sizes that do not fit, or a backend that cannot serve the call.
    """
    columns = num_heads * 2 * (hidden_dim + attn_dim)
    if tuple(uvqk_weight.shape) != (x.shape[-1], columns):
        raise ValueError(f"uvqk_weight must be [{x.shape[-1]}, {columns}]: got {tuple(uvqk_weight.shape)}")
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
        backend,
    )
    return u, out.flatten(1)
