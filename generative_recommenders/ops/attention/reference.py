"""HSTU attention in plain PyTorch: the oracle of every other backend, and the CPU training path.

Mathematics (Zhai et al., "Actions speak louder than words", 2024): Y = mask * SiLU(alpha * Q K^T) / N * V, no softmax.
Sequences are padded in chunks of similar cost, so that many short sequences are one batched product and a long one does
not blow up the memory; padding rows are zero and SiLU(0) = 0, so they add nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

# Scores held at once by one chunk (all heads); 2^24 float32 scores are 64 MiB.
CHUNK_SCORES = 1 << 24


def row_ids(
    lengths: torch.Tensor, max_len: int, num_targets: torch.Tensor | None, contextual_seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order ids that the mask compares, and each sequence's largest id.

    Rows of a contextual prefix share id 0, all candidates share the largest id, history rows count up in between.

    Args:
        lengths: int [B]. max_len: rows per padded sequence. num_targets: int [B] or None (no candidates).
        contextual_seq_len: rows of the prefix that attend to each other both ways, 0 for none.

    Returns:
        ids int64 [B, max_len] and id_max int64 [B, 1].
    """
    rows = torch.arange(max_len, device=lengths.device)
    id_max = lengths.long()
    if contextual_seq_len > 0:
        rows = (rows - contextual_seq_len + 1).clamp(min=0)
        id_max = id_max - contextual_seq_len + 1
    if num_targets is not None:
        id_max = id_max - num_targets.long()
    id_max = id_max[:, None]
    return torch.minimum(rows[None, :], id_max), id_max


def attention_mask(
    lengths: torch.Tensor,
    max_len: int,
    num_targets: torch.Tensor | None = None,
    causal: bool = True,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
) -> torch.Tensor:
    """Which row sees which: bool [B, max_len, max_len], True where row i (dim 1) sees row j (dim 2).

    Row i sees itself and every row of a smaller id (of any other id when not causal), within ``max_attn_len`` ids if
    that is positive; rows of the contextual prefix also see everything before the candidates. Padding rows see nothing
    and are not seen.
    """
    ids, id_max = row_ids(lengths, max_len, num_targets, contextual_seq_len)
    distance = ids[:, :, None] - ids[:, None, :]
    if not causal:
        distance = distance.abs()
    sees = distance > 0
    if max_attn_len > 0:
        sees &= distance <= max_attn_len
    if contextual_seq_len > 0:
        sees |= (ids == 0)[:, :, None] & (ids < id_max)[:, None, :]
    sees |= torch.eye(max_len, dtype=torch.bool, device=lengths.device)
    real = torch.arange(max_len, device=lengths.device)[None, :] < lengths[:, None]
    return sees & real[:, :, None] & real[:, None, :]


def chunks_of(lengths: list[int], heads: int, budget: int = CHUNK_SCORES) -> list[tuple[int, int]]:
    """Consecutive ranges of sequences whose padded scores stay under ``budget`` elements (one sequence at least)."""
    ranges, start, longest = [], 0, 0
    for end, length in enumerate(lengths):
        grown = max(longest, length)
        if end > start and (end + 1 - start) * grown * grown * heads > budget:
            ranges.append((start, end))
            start, grown = end, length
        longest = grown
    if len(lengths) > start:
        ranges.append((start, len(lengths)))
    return ranges


def hstu_mha_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    alpha: float,
    attn_norm: float | torch.Tensor,
    num_targets: torch.Tensor | None = None,
    causal: bool = True,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
) -> torch.Tensor:
    """HSTU attention by autograd-traced PyTorch operators, any dtype and device; arguments as ``hstu_mha``."""
    heads = q.shape[1]
    lengths = seq_offsets.diff()
    host_lengths = lengths.tolist()
    if sum(host_lengths) == 0:
        # Keeps the result tied to its inputs, so that their gradients are zero rather than missing.
        return v[:0] + (q[:0].sum() + k[:0].sum())
    starts = seq_offsets.tolist()
    outputs = []
    for first, last in chunks_of(host_lengths, heads):
        longest = max(host_lengths[first:last])
        if longest == 0:
            continue
        rows = slice(starts[first], starts[last])
        part = lengths[first:last]
        targets = None if num_targets is None else num_targets[first:last]
        mask = attention_mask(part, longest, targets, causal, max_attn_len, contextual_seq_len)
        outputs.append(_attend_chunk(q[rows], k[rows], v[rows], part, longest, mask, alpha, attn_norm))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_chunk(q, k, v, lengths, longest, mask, alpha, attn_norm) -> torch.Tensor:
    """One padded batch: jagged [rows, H, d] in and out, mask [B, longest, longest]."""
    batch = lengths.numel()
    sequence = torch.repeat_interleave(torch.arange(batch, device=q.device), lengths, output_size=q.shape[0])
    first_row = F.pad(lengths.cumsum(0), (1, 0))[:-1]
    slots = torch.arange(q.shape[0], device=q.device) - first_row[sequence] + sequence * longest

    def padded(jagged: torch.Tensor) -> torch.Tensor:
        dense = jagged.new_zeros(batch * longest, *jagged.shape[1:]).index_copy(0, slots, jagged)
        return dense.view(batch, longest, *jagged.shape[1:]).transpose(1, 2)

    scores = padded(q) @ padded(k).transpose(-1, -2)
    weights = F.silu(scores * alpha) / attn_norm
    weights = weights.masked_fill(~mask[:, None], 0)
    out = (weights.to(v.dtype) @ padded(v)).transpose(1, 2)
    return out.reshape(batch * longest, *v.shape[1:]).index_select(0, slots)
