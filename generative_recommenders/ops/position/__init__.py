"""Position and time embeddings of a jagged sequence: ``x · sqrt(D) + position[i] + time[j]``.

The indices are computed in whole numbers, never in the model's dtype: bf16 has 8 bits of mantissa and would merge
neighbouring buckets.
"""

from generative_recommenders.ops.position.reference import (
    SequenceRows,
    add_timestamp_positional_embeddings,
    position_indices,
    time_indices,
)

__all__ = [
    "SequenceRows",
    "add_timestamp_positional_embeddings",
    "position_indices",
    "time_indices",
]
