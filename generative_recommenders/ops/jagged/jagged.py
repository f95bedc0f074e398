"""The public functions on jagged tensors; the package says what they share."""

from __future__ import annotations

from collections.abc import Sequence

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch

from generative_recommenders.ops.checks import check_counts, check_sequences
from generative_recommenders.ops.jagged import reference
from generative_recommenders.ops.jagged.rows import interleave


def complete_cumsum(lengths: torch.Tensor) -> torch.Tensor:
    """Lengths ``[B]`` (int32 or int64) → offsets int64 ``[B + 1]`` with a leading 0, without a device sync."""
    if lengths.dim() != 1:
        raise ValueError(f"lengths must have one dimension [B], got shape {tuple(lengths.shape)}")
    check_counts("lengths", lengths)
    if lengths.numel() == 0:
        return torch.zeros(1, dtype=torch.int64, device=lengths.device)
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long())


def row_sequence_ids(offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The sequence number of each of ``num_rows`` = ``offsets[-1]`` rows: int64 ``[T]``.

    ``num_rows`` comes from the host (a tensor's row count), so no device sync is needed.
    """
    check_sequences(offsets, num_rows, name="offsets")
    sequences = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(sequences, offsets.diff(), output_size=num_rows)


def jagged_to_padded_dense(
    values: torch.Tensor, offsets: torch.Tensor, max_len: int, padding_value: float = 0.0
) -> torch.Tensor:
    """Rows ``[T, D]`` → ``[B, max_len, D]``; rows past ``max_len`` are cut, missing ones are ``padding_value``."""
    _check(values, offsets, max_len)
    if values.dtype == torch.float64 or values.numel() == 0:
        return reference.jagged_to_padded_dense(values, offsets, max_len, padding_value)
    return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [max_len], padding_value)


def dense_to_jagged(dense: torch.Tensor, offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[B, L, D]`` → the first ``length`` rows of every sequence ``[T, D]``; rows beyond L are zero.

    ``num_rows`` = T = ``offsets[-1]``, known on the host.
    """
    if dense.dim() != 3 or dense.shape[0] != offsets.numel() - 1:
        raise ValueError(f"dense must be [B={offsets.numel() - 1}, L, D], got shape {tuple(dense.shape)}")
    check_sequences(offsets, num_rows, name="offsets")
    if dense.dtype == torch.float64 or dense.numel() == 0 or num_rows == 0:
        return reference.dense_to_jagged(dense, offsets, num_rows)
    return torch.ops.fbgemm.dense_to_jagged(dense, [offsets], num_rows)[0]


def concat_2d_jagged(
    values_left: torch.Tensor, values_right: torch.Tensor, offsets_left: torch.Tensor, offsets_right: torch.Tensor
) -> torch.Tensor:
    """Join each left sequence with its right one: ``[Tl, D]``, ``[Tr, D]`` → ``[Tl + Tr, D]``.

    The offsets of the result are ``offsets_left + offsets_right``.
    """
    join = interleave([offsets_left, offsets_right], [values_left.shape[0], values_right.shape[0]])
    return join.place([values_left, values_right])


def split_2d_jagged(
    values: torch.Tensor,
    offsets_left: torch.Tensor,
    offsets_right: torch.Tensor,
    num_rows: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``concat_2d_jagged``.

    ``num_rows`` = (Tl, Tr) if the caller knows them on the host; else one device sync reads them.
    """
    if num_rows is None:
        num_rows = (int(offsets_left[-1]), int(offsets_right[-1]))
    if sum(num_rows) != values.shape[0]:
        raise ValueError(f"split of {values.shape[0]} rows into {tuple(num_rows)}: the counts do not add up")
    left, right = interleave([offsets_left, offsets_right], num_rows).split(values)
    return left, right


def _check(values: torch.Tensor, offsets: torch.Tensor, max_len: int) -> None:
    if values.dim() != 2:
        raise ValueError(f"jagged values must be rows [T, D], got shape {tuple(values.shape)}")
    if max_len < 0:
        raise ValueError(f"max_len must be 0 or more, got {max_len}")
    check_sequences(offsets, values.shape[0], name="offsets")
