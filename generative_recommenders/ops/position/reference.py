"""Plain-PyTorch position and time embeddings (any device)."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from generative_recommenders.ops.checks import WHOLE_NUMBERS, check_sequences, matrix, vector
from generative_recommenders.ops.jagged import row_sequence_ids

SECONDS_PER_TIME_UNIT = 60


@dataclasses.dataclass(frozen=True)
class SequenceRows:
    """What each row of a jagged batch needs to know of its sequence; computed once per batch.

    Attributes:
        offsets: int64 ``[B + 1]``.
        sequence: int64 ``[T]``, the row's sequence number.
        row: int64 ``[T]``, the row's number within its sequence.
    """

    offsets: torch.Tensor
    sequence: torch.Tensor
    row: torch.Tensor

    @classmethod
    def from_offsets(cls, offsets: torch.Tensor, num_rows: int) -> SequenceRows:
        """Rows of a batch with ``num_rows`` = T = ``offsets[-1]`` known on the host."""
        sequence = row_sequence_ids(offsets, num_rows)
        row = torch.arange(num_rows, device=offsets.device) - offsets[sequence]
        return cls(offsets, sequence, row)


def position_indices(
    rows: SequenceRows, num_targets: torch.Tensor, num_contextual: int, num_buckets: int
) -> torch.Tensor:
    """Row → position bucket, int64 ``[T]``: counted back from the end of the history.

    With h = rows before the candidates, row r takes ``h − min(r, h) + num_contextual``, clamped to the table;
    the contextual rows at the start take 0, 1, 2, …. Every candidate takes the same bucket.

    Args:
        num_targets: candidates per sequence, integer ``[B]``.
        num_contextual: contextual rows at the start of every sequence.
        num_buckets: rows of the position table.

    Raises:
        ValueError: sizes that do not fit; on a CPU also counts beyond a sequence's rows (on a GPU they are asserted).
    """
    if num_contextual < 0 or num_buckets < 1:
        raise ValueError(f"num_contextual={num_contextual} must be 0 or more and num_buckets={num_buckets} at least 1")
    check_sequences(rows.offsets, rows.row.numel(), num_targets=num_targets, prefix=num_contextual, name="offsets")
    history_end = (rows.offsets.diff() - num_targets)[rows.sequence]
    index = history_end - torch.minimum(rows.row, history_end) + num_contextual
    if num_contextual > 0:
        index = torch.where(rows.row < num_contextual, rows.row, index)
    return index.clamp_(0, num_buckets - 1)


def time_indices(rows: SequenceRows, timestamps: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Row → time bucket, int64 ``[T]``: floor(sqrt(Δt / 60 s)), clamped to ``0 … num_buckets``.

    Δt runs from the row's timestamp (int64 seconds ``[T]``) to the last row's, the query time; rows later than it take
    bucket 0. floor(sqrt(Δt / 60)) = isqrt(Δt // 60), so whole numbers are enough. The table has num_buckets + 1 rows.
    """
    if timestamps.dtype not in WHOLE_NUMBERS:
        raise TypeError(f"timestamps must be integer seconds, got {timestamps.dtype}")
    timestamps = vector("timestamps", timestamps, rows.row.numel())
    if timestamps.numel() == 0:
        return timestamps.long()
    last_row = (rows.offsets[1:] - 1).clamp_min(0)
    query_time = timestamps[last_row]
    units = (query_time[rows.sequence] - timestamps).long().div(SECONDS_PER_TIME_UNIT, rounding_mode="floor")
    return _isqrt(units.clamp_(0, num_buckets**2))


def _isqrt(value: torch.Tensor) -> torch.Tensor:
    """Integer square root of int64 values: a float estimate, corrected in whole numbers."""
    root = value.float().sqrt().long()
    root = torch.where(root * root > value, root - 1, root)
    return torch.where((root + 1) * (root + 1) <= value, root + 1, root)


def add_timestamp_positional_embeddings(
    x: torch.Tensor,
    rows: SequenceRows,
    timestamps: torch.Tensor,
    num_targets: torch.Tensor,
    position_weight: torch.Tensor,
    time_weight: torch.Tensor,
    num_contextual: int = 0,
) -> torch.Tensor:
    """``x · sqrt(D) + position_weight[i] + time_weight[j]``.

    Args:
        x: rows ``[T, D]``, any float dtype.
        rows: the batch's ``SequenceRows``.
        timestamps: int64 ``[T]`` seconds; contextual rows have 0.
        num_targets: candidates per sequence, integer ``[B]``.
        position_weight: ``[position buckets, D]``.
        time_weight: ``[time buckets + 1, D]``.
        num_contextual: contextual rows at the start of every sequence.

    Returns:
        ``[T, D]`` in the promoted dtype of x and the tables.
    """
    matrix("x", x, position_weight.shape[1], rows.row.numel())
    position = position_indices(rows, num_targets, num_contextual, position_weight.shape[0])
    time = time_indices(rows, timestamps, time_weight.shape[0] - 1)
    encoded = torch.add(F.embedding(position, position_weight), x, alpha=math.sqrt(x.shape[1]))
    return encoded + F.embedding(time, time_weight)
