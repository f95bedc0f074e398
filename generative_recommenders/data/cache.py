"""The event cache: what preparation writes and sampling reads. docs/cache_format.md describes the files.

A cache is a folder of plain ``.npy`` columns, a ``manifest.json`` with counts and checksums, and a marker that is
written last: without the marker the folder is not a cache. Columns are memory-mapped, so opening takes the same time at
any size.

Order. Users ascend by their original id; the events of one user are contiguous and ordered by content: (time, item,
event type, is_organic, played ratio), items by their original ids. Dense ids keep the order of the original ids, so row
order, threads and memory limits leave no trace in the bytes. A cache that extends an earlier one keeps that one's
numbers: its new ids follow, in their order, and a user or an item that it knows may have no event.

Anchors are the events that samples predict (anchor_rule.py).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from generative_recommenders.data.anchor_rule import find_anchors
from generative_recommenders.data.cache_check import check_shapes, check_values
from generative_recommenders.data.cache_columns import COLUMN_TYPES, CacheColumns
from generative_recommenders.data.identity import UnknownIds, Vocabulary, content_of_columns, content_of_manifest
from generative_recommenders.data.vocabulary_files import vocabularies_of
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

SCHEMA_VERSION = 1
#: Of caches whose numbering is not that of their own events (``generations``, ``cross_users``): older code cannot tell.
EXTENDED_VERSION = 2
MANIFEST = "manifest.json"
MARKER = "COMPLETE"

ATTRIBUTE_PREFIX = "attribute_"
CONTEXT_PREFIX = "context_"


@dataclasses.dataclass(frozen=True, eq=False)
class EventCache(CacheColumns):
    """Columns of events that are prepared on disk or made in memory, and what they stand for."""

    @functools.cached_property
    def content(self) -> str:
        """Fingerprint of everything in the cache; of a prepared one by its manifest, without reading a column."""
        if self.manifest is not None:
            return content_of_manifest(self.manifest, self.ids)
        columns = {name: getattr(self, name) for name in COLUMN_TYPES}
        for kind in ("attributes", "context", "labels"):
            columns |= {f"{kind}_{name}": column for name, column in getattr(self, kind).items()}
        spaces = sorted((space, ids.fingerprint) for space, ids in self.ids.items())
        return content_of_columns(columns, [self.min_history, sorted(self.vocab.items()), spaces])

    def ids_of(self, space: str) -> Vocabulary | UnknownIds:
        """What the rows of a space of ``vocab`` stand for."""
        if space in self.ids:
            return self.ids[space]
        return UnknownIds(self.vocab[space], self.content, f"{self.name} has no raw ids of {space!r}, only dense ones")

    def validate(self) -> EventCache:
        """Check shapes, types, ranges and order of everything; ``UserError`` names the first fault. Reads it all."""
        check_shapes(self)
        check_values(self)
        return self

    @classmethod
    def open(cls, path: str | pathlib.Path) -> EventCache:
        """Map a prepared cache. ``UserError`` if it is absent, incomplete, of another version or of the wrong size."""
        folder = user_path(path)
        manifest = read_manifest(folder)
        columns: dict[str, Any] = {
            name: _map_column(folder, name, entry) for name, entry in manifest["columns"].items()
        }
        missing = [name for name in COLUMN_TYPES if name not in columns]
        if missing:
            raise UserError(f"{folder / MANIFEST} lists no column {missing[0]!r}: prepare the cache again")
        return cls(
            **{name: columns[name] for name in COLUMN_TYPES},
            attributes=_with_prefix(columns, ATTRIBUTE_PREFIX),
            context=_with_prefix(columns, CONTEXT_PREFIX),
            vocab=manifest["vocab"],
            min_history=manifest["min_history"],
            counters=manifest["counters"],
            ids=vocabularies_of(folder, manifest),
            manifest=manifest,
            path=folder,
        )


def cache_from_events(
    user: np.ndarray,
    item: np.ndarray,
    time: np.ndarray,
    bits: np.ndarray,
    *,
    min_history: int,
    organic: np.ndarray | None = None,
    attributes: Mapping[str, Mapping[int, int | str]] | None = None,
    context: Mapping[str, np.ndarray] | None = None,
) -> EventCache:
    """A cache in memory from events in any order: for data that fits, and for tests.

    ``user``, ``item`` [E]: original integer ids (ordered by value). ``time`` [E]: seconds, 0 … 2³²-1. ``bits`` [E]:
    1 listen_plus, 2 like, 4 skip, 0 other. ``organic`` [E]: 0 or 1, default 1. ``attributes``: name → {original item
    id: original attribute id, whole number or text}; an item without an entry gets 0. ``context``: name → original
    ids [E], numbered from 1.
    """
    columns = {"user": user, "item": item, "time": time, "bits": bits}
    columns = {name: np.asarray(values) for name, values in columns.items()}
    columns["organic"] = np.ones(len(columns["user"]), np.uint8) if organic is None else np.asarray(organic)
    extra = {name: np.asarray(values) for name, values in sorted((context or {}).items())}
    _check_input(columns, extra)
    user_ids, user_number = np.unique(columns["user"].astype(np.int64), return_inverse=True)
    item_ids, dense = np.unique(columns["item"].astype(np.int64), return_inverse=True)
    renumbered = {name: np.unique(values, return_inverse=True) for name, values in extra.items()}
    keys = [columns["organic"], columns["bits"], dense, columns["time"], user_number]
    order = np.lexsort([codes for _, codes in reversed(renumbered.values())] + keys)
    offsets = np.zeros(len(user_ids) + 1, np.int64)
    np.cumsum(np.bincount(user_number, minlength=len(user_ids)), out=offsets[1:])
    times, sorted_bits = columns["time"][order].astype(np.uint32), columns["bits"][order].astype(np.uint8)
    tables: dict[str, np.ndarray] = {}
    raw: dict[str, Sequence[int] | Sequence[str] | np.ndarray] = {"uid": user_ids, "item_id": item_ids}
    for name, mapping in (attributes or {}).items():
        tables[name], raw[name] = _dense_attribute(item_ids, mapping)
    raw |= {name: ids for name, (ids, _) in renumbered.items()}
    return EventCache(
        user_offsets=offsets,
        user_ids=user_ids,
        item=(dense[order] + 1).astype(np.uint32),
        time=times,
        bits=sorted_bits,
        organic=columns["organic"][order].astype(np.uint8),
        attributes=tables,
        context={name: (codes[order] + 1).astype(np.uint32) for name, (_, codes) in renumbered.items()},
        vocab={name: len(ids) + 1 for name, ids in raw.items()},
        ids={name: Vocabulary.of(ids) for name, ids in raw.items()},
        item_count=np.bincount(dense + 1, minlength=len(item_ids) + 1).astype(np.int64),
        anchors=find_anchors(offsets, times, sorted_bits, min_history),
        min_history=min_history,
        counters={"events": len(order)},
    ).validate()


def column_file(name: str) -> str:
    """File of a column within the cache's folder."""
    return f"{name}.npy"


def read_manifest(folder: pathlib.Path) -> dict:
    """The manifest of a complete cache; ``UserError`` if the folder is absent, unfinished or of another version."""
    if not folder.is_dir():
        raise UserError(f"event cache {folder} does not exist: prepare it first, or correct the path")
    if not (folder / MARKER).is_file():
        raise UserError(f"event cache {folder} is not complete (no {MARKER} in it): run its preparation (again)")
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = json.loads(text)
        version = manifest.get("schema_version")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST} cannot be read ({error}): prepare the cache again") from None
    if version not in (SCHEMA_VERSION, EXTENDED_VERSION):
        raise UserError(
            f"event cache {folder} has version {version}, this code reads {SCHEMA_VERSION} and {EXTENDED_VERSION}: "
            "prepare again"
        )
    if hashlib.sha256(text).hexdigest().encode() != (folder / MARKER).read_bytes().strip():
        raise UserError(f"{folder / MANIFEST} was changed after preparation: prepare the cache again")
    return manifest


def _map_column(folder: pathlib.Path, name: str, entry: Mapping) -> np.ndarray:
    path = folder / column_file(name)
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise UserError(f"{path} has {size} bytes, its manifest says {entry['bytes']}: prepare the cache again")
        # An empty array cannot be mapped.
        column = np.load(path, mmap_mode="r" if entry["length"] else None)
    except UserError:
        raise
    except Exception as error:  # a damaged header raises errors of the tokenizer, the parser and many more
        raise UserError(f"{path} cannot be read ({error}): prepare the cache again") from None
    start = entry["bytes"] - column.nbytes
    found = (column.shape, column.dtype.str, getattr(column, "offset", start))
    if found != ((entry["length"],), entry["dtype"], start):
        raise UserError(f"{path} holds {column.dtype} {column.shape}, not what its manifest says: prepare it again")
    return column


def _with_prefix(columns: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): column for name, column in columns.items() if name.startswith(prefix)}


def _dense_attribute(
    item_ids: np.ndarray, mapping: Mapping[int, int | str]
) -> tuple[np.ndarray, Sequence[int] | Sequence[str]]:
    """u32 [V], and the original ids in the order of the dense ones."""
    raw = [mapping.get(int(item)) for item in item_ids]
    known: list = sorted({value for value in raw if value is not None})
    number: dict[int | str | None, int] = {value: index + 1 for index, value in enumerate(known)}
    table = np.array([0] + [number.get(value, 0) for value in raw], dtype=np.uint32)
    return table, known


def _check_input(columns: Mapping[str, np.ndarray], context: Mapping[str, np.ndarray]) -> None:
    count = len(columns["user"])
    if not count:
        raise UserError("no events: a cache needs at least one")
    for name, values in {**columns, **context}.items():
        if values.ndim != 1 or len(values) != count:
            raise UserError(f"column {name!r} has shape {values.shape}, expected ({count},) as the user column")
        if values.dtype.kind not in "iu":
            raise UserError(f"column {name!r} has type {values.dtype}, expected whole numbers")
    if columns["time"].min() < 0 or columns["time"].max() >= 2**32:
        raise UserError(f"time runs {columns['time'].min()} … {columns['time'].max()}, allowed are 0 … {2**32 - 1} s")
