"""Jagged ↔ padded dense by plain indexing: the oracle, and the path for float64 and for tensors without rows."""

from __future__ import annotations

import torch


def jagged_to_padded_dense(
    values: torch.Tensor, offsets: torch.Tensor, max_len: int, padding_value: float = 0.0
) -> torch.Tensor:
    """Rows ``[T, D]`` → ``[B, max_len, D]``, see the public function."""
    lengths = offsets.diff()
    column = torch.arange(max_len, device=values.device)
    present = column < lengths[:, None]
    if values.shape[0] == 0:
        empty = values.new_full((lengths.numel(), max_len, values.shape[1]), padding_value)
        return empty + values.sum()  # keeps the (empty) gradient path
    rows = (offsets[:-1, None] + column).clamp_max(values.shape[0] - 1)
    return values[rows].masked_fill(~present[..., None], padding_value)


def dense_to_jagged(dense: torch.Tensor, offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[B, L, D]`` → ``[T, D]``, see the public function."""
    batch, width, _ = dense.shape
    lengths = offsets.diff()
    sequence = torch.repeat_interleave(torch.arange(batch, device=dense.device), lengths, output_size=num_rows)
    column = torch.arange(num_rows, device=dense.device) - offsets[sequence]
    if dense.numel() == 0:
        return dense.new_zeros(num_rows, dense.shape[2]) + dense.sum()
    rows = dense[sequence, column.clamp_max(width - 1)]
    return rows.masked_fill((column >= width)[:, None], 0)
