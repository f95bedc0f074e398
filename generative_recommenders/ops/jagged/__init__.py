"""Jagged tensors: B sequences stored one after the other as rows ``[T, D]`` with ``offsets`` int64 ``[B + 1]``.

FBGEMM's operators do the work where FBGEMM has one (running sums, jagged ↔ padded dense; it has none in float64, which
takes plain indexing). It has no operator that interleaves jagged tensors: joining and splitting sequences here is one
scatter or gather per part, with the opposite move as the exact gradient. Nothing here ever builds a padded copy of a
jagged tensor unless it is asked for one.

Every function takes empty sequences, an empty batch (B = 0) and a padded length of 0, forward and backward. Offsets,
lengths and row numbers that do not fit are a ``ValueError`` on a CPU and a device-side assertion on a GPU (``checks``).
"""

from generative_recommenders.ops.jagged.jagged import (
    complete_cumsum,
    concat_2d_jagged,
    dense_to_jagged,
    jagged_to_padded_dense,
    row_sequence_ids,
    split_2d_jagged,
)
from generative_recommenders.ops.jagged.rows import JaggedJoin, interleave, place_rows, take_rows

__all__ = [
    "JaggedJoin",
    "complete_cumsum",
    "concat_2d_jagged",
    "dense_to_jagged",
    "interleave",
    "jagged_to_padded_dense",
    "place_rows",
    "row_sequence_ids",
    "split_2d_jagged",
    "take_rows",
]
