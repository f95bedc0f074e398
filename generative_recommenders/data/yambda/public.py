"""What is known of the public data set without having it, for planning: vocabularies, events, samples, rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from generative_recommenders.data.crosses import cross_rows, is_cross


@dataclasses.dataclass(frozen=True)
class PublicSize:
    """One size of Yambda as a prepared cache of it would have it.

    Attributes:
        vocab: rows of each feature's table, the reserved row included.
        users, events: of the whole data set.
        train_samples: of ``train_days`` days before the hold-out.
        history_length, mean_history: history rows of the mean sample at that ``history_length``, interleaved.
    """

    vocab: Mapping[str, int]
    users: int
    events: int
    train_samples: int
    train_days: int
    history_length: int
    mean_history: float

    def rows(self, feature: str) -> int:
        """Rows of a feature's table; ``KeyError`` for a feature that the data set does not have."""
        return cross_rows(feature, self.users) if is_cross(feature) else self.vocab[feature]

    def mean_history_at(self, length: int, strategy: str) -> float:
        """History rows of the mean sample at another length: interleaved pools fill in proportion."""
        return float(length) if strategy == "last_n" else self.mean_history * length / self.history_length


#: Sizes whose vocabularies are published. The small ones have vocabularies that only their preparation knows.
PUBLIC = {
    "5b": PublicSize(
        vocab={"item_id": 9_390_624, "artist_id": 1_293_395, "album_id": 3_367_692, "uid": 1_000_001},
        users=1_000_000,
        events=4_760_000_000,
        train_samples=2_290_835_423,
        train_days=300,
        history_length=4086,
        mean_history=2654.0,
    )
}
