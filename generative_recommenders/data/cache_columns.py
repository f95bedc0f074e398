"""The columns of an event cache, wherever they lie, and what follows from them alone."""

from __future__ import annotations

import bisect
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from generative_recommenders.data.identity import Vocabulary
from generative_recommenders.data.schema import LISTEN_PLUS, SKIP
from generative_recommenders.errors import UserError

#: Columns every cache has, and their types on disk. ``anchors`` is u32 where every event number fits, else i64.
COLUMN_TYPES = {
    "user_offsets": np.int64,
    "user_ids": np.int64,
    "item": np.uint32,
    "time": np.uint32,
    "bits": np.uint8,
    "organic": np.uint8,
    "item_count": np.int64,
    "anchors": None,
}


@dataclasses.dataclass(frozen=True, eq=False)
class CacheColumns:
    """Events of all users in columns; E events, U users, V items with reserved id 0, A anchors.

    ``user_offsets`` int64 [U+1]: events of user u are [user_offsets[u], user_offsets[u+1]). ``user_ids`` int64 [U]:
    original ids, ascending (in an extension, generation by generation); the feature value of user u is u + 1. ``item``
    u32 [E]: dense item id, 0 unknown. ``time`` u32 [E]: seconds. ``bits`` u8 [E]: 1 listen_plus, 2 like, 4 skip, 0 an
    event that enters no history. ``organic`` u8 [E]: 0 or 1. ``attributes``: name → u32 [V], the dense attribute id of
    each item, 0 unknown.
    ``context``: name → u32 [E], further contextual values known at request time, 0 unknown. ``labels``:
    name → int64 [E], outcomes beside ``bits``; never features. ``vocab``: name → rows of the id space (max id + 1), for
    ``uid``, ``item_id``, every attribute and every context column. ``item_count``
    int64 [V]: events per item. ``anchors`` u32 or int64 [A]: event numbers, ascending by (time, user, position): turn
    them into int64 before arithmetic. ``counters``: events per type, nulls and unknown ids met during preparation.
    ``ids``: the raw ids behind each space of ``vocab``, where they are known. ``manifest``: of a prepared cache, which
    vouches for its columns; whoever replaces columns drops it.
    """

    user_offsets: np.ndarray
    user_ids: np.ndarray
    item: np.ndarray
    time: np.ndarray
    bits: np.ndarray
    organic: np.ndarray
    attributes: Mapping[str, np.ndarray]
    vocab: Mapping[str, int]
    item_count: np.ndarray
    anchors: np.ndarray
    min_history: int
    context: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    counters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ids: Mapping[str, Vocabulary] = dataclasses.field(default_factory=dict)
    manifest: Mapping | None = dataclasses.field(default=None, repr=False)
    path: pathlib.Path | None = None

    @property
    def num_events(self) -> int:
        """E."""
        return len(self.item)

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.user_ids)

    @property
    def num_anchors(self) -> int:
        """A."""
        return len(self.anchors)

    @property
    def anchor_time(self) -> np.ndarray:
        """u32 [A], ascending: the time of every anchor. Gathers all of them; ``anchor_range`` does not."""
        return self.time[self.anchors]

    def anchor_range(self, start: int, end: int) -> tuple[int, int]:
        """(lo, hi) such that ``anchors[lo:hi]`` are the anchors with ``start <= time < end``: two binary searches."""
        numbers = range(self.num_anchors)
        lo = bisect.bisect_left(numbers, start, key=self._time_of_anchor)
        return lo, bisect.bisect_left(numbers, max(start, end), lo=lo, key=self._time_of_anchor)

    def _time_of_anchor(self, number: int) -> int:
        return int(self.time[self.anchors[number]])

    def time_range(self) -> tuple[int, int]:
        """Smallest and largest anchor time; ``UserError`` if there is no anchor."""
        if not self.num_anchors:
            if not np.isin(self.bits, (LISTEN_PLUS, SKIP)).any():
                raise UserError(f"{self.name} has no sample: none of its events has a positive or negative outcome")
            raise UserError(f"{self.name} has no sample: no listen has min_history={self.min_history} earlier events")
        return self._time_of_anchor(0), self._time_of_anchor(self.num_anchors - 1)

    def user_of(self, events: np.ndarray) -> np.ndarray:
        """int64 user number of each event number."""
        return np.searchsorted(self.user_offsets, np.asarray(events, dtype=np.int64), side="right") - 1

    @property
    def cross_users(self) -> int:
        """Users that the tables of crosses are sized by: U, unless preparation fixed another number."""
        return (self.manifest or {}).get("cross_users", self.num_users)

    @property
    def generations(self) -> Mapping[str, Sequence[int]]:
        """Id space → how many ids it had after each preparation of a chain of extensions; empty without extension.

        Ids ascend by their originals within a generation.
        """
        return (self.manifest or {}).get("generations", {})

    @property
    def name(self) -> str:
        """How messages call this cache."""
        return "the event cache in memory" if self.path is None else f"the event cache {self.path}"
