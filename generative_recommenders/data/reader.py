"""From anchors to a batch: histories, labels, attributes and crosses, written straight into the jagged tensors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from generative_recommenders.data.batch import Batch
from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.crosses import cross_ids, cross_parts, is_cross
from generative_recommenders.data.history import (
    SCAN_LIMIT,
    check_history_options,
    gather_history,
    look_up,
    pick_history,
)
from generative_recommenders.data.schema import FeatureSchema
from generative_recommenders.errors import UserError

if TYPE_CHECKING:  # loaded with the first batch, see batch.py
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

HOUR = 3600
NO_LIMIT = 2**62


@dataclasses.dataclass(frozen=True)
class HistoryOptions:
    """How histories are taken (history.py): rows at most, strategy, tie rule, events looked at."""

    length: int
    strategy: str = "interleaved"
    ties: str = "exclude"
    scan_limit: int = SCAN_LIMIT

    def __post_init__(self) -> None:
        check_history_options(self.length, self.strategy, self.ties, self.scan_limit)

    @property
    def slots(self) -> int:
        """Most rows a history can have."""
        return self.length // 3 * 3 if self.strategy == "interleaved" else self.length


class BatchReader:
    """Builds batches of a cache for a schema; threads may share it.

    An item feature is ``item_id``, an item attribute of the cache, or a context column (for a history row the value at
    that event, for the candidate the value at the anchor). A contextual feature is ``uid``, a context column at the
    anchor, or a cross (crosses.py) of the user, the candidate's item features, a context column, the anchor's hour of
    day and its ``is_organic``. Hour and is_organic belong to the request: they are known before the outcome.
    """

    def __init__(self, cache: EventCache, schema: FeatureSchema, history: HistoryOptions) -> None:
        self.cache, self.schema, self.history = cache, schema, history
        # Plain views: a compiled loop is then not compiled again for the memory-mapped type.
        self._plain = {name: np.asarray(getattr(cache, name)) for name in ("item", "time", "bits", "organic")}
        self._attributes = {name: np.asarray(table) for name, table in cache.attributes.items()}
        self._context = {name: np.asarray(column) for name, column in cache.context.items()}
        if schema.item_features[0] != "item_id":
            raise UserError(f"the first item feature is {schema.item_features[0]!r}: it must be 'item_id'")
        for name in schema.item_features:
            if name != "item_id" and name not in self._attributes and name not in self._context:
                raise UserError(self._unknown("item feature", name, ["item_id", *self._attributes, *self._context]))
            self._check_rows(name)
            if name in self._attributes:
                self._check_ids(name, self._attributes[name])  # once, and not what every batch takes of it
        for name in schema.contextual_features:
            if is_cross(name):
                for part in cross_parts(name):
                    self.key_source(name, part)
            elif name != "uid" and name not in self._context:
                raise UserError(self._unknown("contextual feature", name, ["uid", *self._context, "a cross a_x_b"]))
            else:
                self._check_rows(name)

    def read(self, sample_ids: np.ndarray) -> Batch:
        """The batch of these anchor numbers (int64 [B])."""
        import torch

        cache = self.cache
        anchors = np.asarray(cache.anchors[sample_ids], dtype=np.int64)
        users = cache.user_of(anchors)
        options = self.history
        picked, counts = pick_history(
            anchors,
            cache.user_offsets[users].astype(np.int64),
            self._plain["time"],
            self._plain["bits"],
            options.length,
            options.strategy,
            options.ties,
            options.scan_limit,
        )
        candidates = self._candidates(anchors)
        return Batch(
            uih=self._uih(anchors, users, picked, counts, candidates),
            candidates=_keyed(self.schema.candidate_keys, candidates),
            user_ids=torch.from_numpy(cache.user_ids[users].astype(np.int64)),
            sample_ids=torch.from_numpy(np.array(sample_ids, dtype=np.int64)),
        )

    def _candidates(self, anchors: np.ndarray) -> np.ndarray:
        """int64 [keys, B] in the order of ``candidate_keys``."""
        rows = np.empty((len(self.schema.candidate_keys), len(anchors)), np.int64)
        items = self._plain["item"][anchors]
        self._check_ids("item_id", items)
        for row, name in zip(rows, self.schema.item_features, strict=False):
            row[:] = self._item_feature(name, anchors, items)
            if name in self._context:
                self._check_ids(name, row)
        others = [self._plain["time"], self._plain["bits"], *(self.cache.labels[n] for n in self.schema.label_features)]
        for row, column in zip(rows[len(self.schema.item_features) :], others, strict=True):
            row[:] = column[anchors]
        return rows

    def _item_feature(self, name: str, events: np.ndarray, items: np.ndarray) -> np.ndarray:
        if name == "item_id":
            return items
        return self._attributes[name][items] if name in self._attributes else self._context[name][events]

    def _uih(
        self,
        anchors: np.ndarray,
        users: np.ndarray,
        picked: np.ndarray,
        counts: np.ndarray,
        candidates: np.ndarray,
    ) -> KeyedJaggedTensor:
        schema, size, total = self.schema, len(anchors), int(counts.sum())
        num_context = len(schema.contextual_features)
        num_history = len(schema.item_features) + 2
        values = np.empty(num_context * size + num_history * total, np.int64)
        context = values[: num_context * size].reshape(num_context, size)
        history = values[num_context * size :].reshape(num_history, total)
        for row, name in zip(context, schema.contextual_features, strict=True):
            self._fill_context(row, name, anchors, users, candidates)
        self._fill_history(history, picked, counts)
        lengths = np.ones((num_context + num_history, size), np.int32)
        lengths[num_context:] = counts
        return _jagged(schema.uih_keys, values, lengths)

    def _fill_context(
        self, row: np.ndarray, name: str, anchors: np.ndarray, users: np.ndarray, candidates: np.ndarray
    ) -> None:
        if is_cross(name):
            keys = [self._cross_key(name, part, anchors, users, candidates) for part in cross_parts(name)]
            cross_ids(keys, self.schema.table_rows[name], out=row)
        elif name == "uid":
            row[:] = users + 1
        else:
            row[:] = self._context[name][anchors]
            self._check_ids(name, row)

    def _fill_history(self, rows: np.ndarray, picked: np.ndarray, counts: np.ndarray) -> None:
        """int64 [item features + 2, T] in the order of ``uih_keys``; the item's id comes first."""
        items = rows[0]
        if not gather_history(picked, counts, self._plain["item"], items, self.cache.vocab["item_id"]):
            self._check_ids("item_id", items)  # before attributes are looked up with them
        for row, name in zip(rows[1:], self.schema.item_features[1:], strict=False):
            if name in self._attributes:
                look_up(self._attributes[name], items, row)
            elif not gather_history(picked, counts, self._context[name], row, self.cache.vocab[name]):
                self._check_ids(name, row)
        gather_history(picked, counts, self._plain["bits"], rows[-2], NO_LIMIT)
        gather_history(picked, counts, self._plain["time"], rows[-1], NO_LIMIT)

    def _cross_key(
        self, cross: str, part: str, anchors: np.ndarray, users: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray:
        source = self.key_source(cross, part)
        if source == "uid":
            return users + 1
        if source == "hour":
            return self._plain["time"][anchors].astype(np.int64) // HOUR % 24
        if source == "is_organic":
            return self._plain["organic"][anchors]
        if source in self.schema.item_features:
            return candidates[self.schema.item_features.index(source)]
        return self._context[source][anchors]

    def key_source(self, cross: str, part: str) -> str:
        """The id space that a part of a cross's name stands for, or ``hour`` or ``is_organic`` itself."""
        if part in ("user", "hour", "is_organic") and part in self._context:
            raise UserError(
                f"cross {cross!r}: {part!r} is a word that crosses have of their own, and a context column of "
                f"{self.cache.name}, too: rename the column and prepare again"
            )
        if part in ("hour", "is_organic"):
            return part
        if part == "user":
            return "uid"
        for name in (f"{part}_id", part):
            if name in self.schema.item_features or name in self._context:
                return name
        known = ["user", "hour", "is_organic", *(name.removesuffix("_id") for name in self.schema.item_features)]
        raise UserError(self._unknown(f"part of the cross {cross!r}", part, [*known, *self._context]))

    def _check_rows(self, name: str) -> None:
        need, rows = self.cache.vocab[name], self.schema.table_rows[name]
        if rows < need:
            raise UserError(f"table_rows[{name!r}] is {rows}, but its ids run to {need - 1}: give at least {need}")

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        """Ids are looked up with, so one past its vocabulary is named here and not read past the end of a table."""
        largest, rows = int(ids.max(initial=0)), self.cache.vocab[name]
        if largest >= rows:
            raise UserError(
                f"{self.cache.name}: feature {name!r} has the id {largest}, past its vocabulary of {rows} (table of "
                f"{self.schema.table_rows[name]} rows): the cache is damaged, prepare it again"
            )

    def _unknown(self, what: str, name: str, known: list[str]) -> str:
        return f"{what} {name!r} is not in {self.cache.name}: possible are {', '.join(known)}"


def _keyed(keys: tuple[str, ...], rows: np.ndarray) -> KeyedJaggedTensor:
    """One value per key and sample, rows int64 [keys, B]."""
    return _jagged(keys, rows, np.ones(rows.size, np.int32))


def _jagged(keys: tuple[str, ...], values: np.ndarray, lengths: np.ndarray) -> KeyedJaggedTensor:
    """Values key after key, int64; lengths int32 per key and sample."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=list(keys), values=torch.from_numpy(values.reshape(-1)), lengths=torch.from_numpy(lengths.reshape(-1))
    )
