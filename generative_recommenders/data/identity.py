"""What data is, by its raw ids and its contents: fingerprints that a checkpoint keeps and compares.

A row of an embedding table stands for a raw id (a table of a plain id space) or for whatever its hash brings together
(a crossed one). Paths, file formats and library versions say nothing about that, raw ids do: two caches whose columns
look alike may number other items, and the same items may have other numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from generative_recommenders.data.crosses import HASH_RULE
from generative_recommenders.errors import UserError

if TYPE_CHECKING:
    import pyarrow

#: Parts of a cross that have no id space: their values mean the same in every data set.
SELF_EVIDENT = ("hour", "is_organic")
#: Values hashed in one go.
PIECE = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The raw ids behind the rows of a plain id space: row 0 is reserved, row r stands for the r-th raw id.

    ``rows``: raw ids and the reserved row. ``pieces`` reads the raw ids in the order of their rows, some at a time.
    ``recorded``: the fingerprint where it is known without reading them. Equal to another one of the same raw ids in
    the same order.
    """

    rows: int
    pieces: Callable[[], Iterable[pyarrow.Array]] = dataclasses.field(repr=False)
    recorded: str | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def of(cls, ids: Sequence[int] | Sequence[str] | np.ndarray) -> Vocabulary:
        """Raw ids in memory, all whole numbers or all text."""
        return cls(len(ids) + 1, lambda: [_plain(ids)])

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of kind (whole numbers, text) and raw ids in the order of their rows; hexadecimal."""
        return self.recorded or fingerprint_of(self.read(), self.rows - 1)

    @functools.cached_property
    def kind(self) -> str | None:
        """``int`` or ``text``; None where there is no raw id."""
        return _kind(next(self.read())) if self.rows > 1 else None

    def originals(self) -> pyarrow.Array:
        """The raw ids, int64 or large_string [rows - 1]; row r stands for element r - 1. Read anew at each call."""
        import pyarrow

        return pyarrow.concat_arrays(self.read())

    def prefix(self, rows: int) -> str | None:
        """The fingerprint of the first ``rows`` rows alone (the reserved one counts); None if there are fewer."""
        return fingerprint_of(self.read(), rows - 1) if rows <= self.rows else None

    def begins_with(self, rows: int, fingerprint: str) -> bool:
        """Whether a vocabulary of so many rows with this fingerprint has the same raw ids in its rows as this one."""
        return fingerprint == (self.fingerprint if rows == self.rows else self.prefix(rows))

    def read(self) -> Iterator[pyarrow.Array]:
        """``originals`` some at a time; ``UserError`` if they are fewer or more than the rows."""
        count, empty = 0, True
        for piece in self.pieces():
            piece, empty = _plain(piece), False
            count += len(piece)
            yield piece
        if empty:
            yield _plain(np.empty(0, np.int64))
        if count != self.rows - 1:
            raise UserError(f"a vocabulary of {self.rows - 1:,} ids has {count:,}: prepare the cache again")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return (self.rows, self.fingerprint) == (other.rows, other.fingerprint)

    def __hash__(self) -> int:
        return hash((self.rows, self.fingerprint))


@dataclasses.dataclass(frozen=True)
class UnknownIds:
    """A space of which a cache has dense ids alone. ``fingerprint`` is that of the whole cache's content: the same
    cache is the same, and nothing more can be said."""

    rows: int
    fingerprint: str
    why: str

    def originals(self) -> pyarrow.Array:
        """Raises ``UserError``: there are none."""
        raise UserError(self.why)


@dataclasses.dataclass(frozen=True)
class CrossedIds:
    """The rows of a crossed table: hashes of ``parts`` modulo ``rows``.

    ``vocabularies``: id space → ids behind a part, where it has a space (hour and is_organic stand for themselves).
    ``fingerprint``: of rows, hash rule, parts and vocabularies. Where it is another one, ``same_rows`` says whether
    the raw ids of an earlier cache still have the rows that they had.
    """

    rows: int
    parts: tuple[str, ...]
    vocabularies: Mapping[str, Vocabulary | UnknownIds] = dataclasses.field(hash=False)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal exactly if the same raw ids, all of them known, give the same rows; hexadecimal."""
        spaces = [(space, ids.rows, ids.fingerprint) for space, ids in self.vocabularies.items()]
        return digest_of("cross", HASH_RULE, self.rows, self.parts, spaces)

    def describe(self) -> dict:
        """What ``same_rows`` needs to know, for JSON: rows, parts, fingerprint, rows and fingerprint of each space."""
        spaces = {space: {"rows": i.rows, "fingerprint": i.fingerprint} for space, i in self.vocabularies.items()}
        return {"rows": self.rows, "parts": list(self.parts), "fingerprint": self.fingerprint, "vocabularies": spaces}

    def same_rows(self, earlier: Mapping) -> bool:
        """Whether every raw id that an earlier cross knew (its ``describe()``) gives the same row here.

        So it is where every vocabulary behind it begins with the earlier one and the table has the earlier size:
        after ``--extend``, and where new ids happen to come after all others and the size was given.
        """
        if earlier["fingerprint"] == self.fingerprint:
            return True
        spaces = earlier.get("vocabularies", {})
        if (earlier["rows"], list(earlier["parts"])) != (self.rows, list(self.parts)) or set(spaces) != set(
            self.vocabularies
        ):
            return False
        return all(_begins_with(ids, spaces[space]) for space, ids in self.vocabularies.items())


@dataclasses.dataclass(frozen=True)
class DataIdentity:
    """What a run trains on. ``content``: fingerprint of the events, windows, history options, features and sizes of
    tables; paths and numbers of workers are not in it. ``tables``: what the rows of each table stand for.
    """

    content: str
    tables: Mapping[str, Vocabulary | UnknownIds | CrossedIds]


def fingerprint_of(pieces: Iterable[pyarrow.Array], count: int) -> str:
    """Fingerprint of the first ``count`` raw ids, however they are cut into pieces."""
    kind, left, lengths, values = None, count, hashlib.sha256(), hashlib.sha256()
    for piece in pieces:
        piece = _plain(piece)[:left]
        kind, left = _kind(piece), left - len(piece)
        for start in range(0, len(piece), PIECE):
            if kind == "int":
                values.update(piece[start : start + PIECE].to_numpy().astype("<i8"))
            else:
                _update_text(lengths, values, piece[start : start + PIECE])
    if left:
        raise ValueError(f"{count} ids were to be fingerprinted, {count - left} are there")
    # Without any id there is no kind: an empty column of a file may have been given any type.
    return digest_of("vocabulary", kind if count else "", count, lengths.hexdigest(), values.hexdigest())


def content_of_columns(columns: Mapping[str, np.ndarray], other: object) -> str:
    """Fingerprint of arrays in memory and of ``other``, which goes through JSON."""
    entries = []
    for name, column in sorted(columns.items()):
        data = np.ascontiguousarray(column)
        entries.append((name, data.dtype.str, len(data), hashlib.sha256(data.data.cast("B")).hexdigest()))
    return digest_of("columns", entries, other)


def content_of_manifest(manifest: Mapping, vocabularies: Mapping[str, Vocabulary]) -> str:
    """Fingerprint of a prepared cache: what its manifest says of the columns, and the raw ids behind them."""
    columns = sorted((name, entry["dtype"], entry["sha256"]) for name, entry in manifest["columns"].items())
    spaces = sorted((space, ids.rows, ids.fingerprint) for space, ids in vocabularies.items())
    return digest_of("cache", manifest["min_history"], columns, spaces)


def _begins_with(ids: Vocabulary | UnknownIds, earlier: Mapping) -> bool:
    if isinstance(ids, Vocabulary):
        return ids.begins_with(earlier["rows"], earlier["fingerprint"])
    return ids.fingerprint == earlier["fingerprint"]


def _plain(ids: object) -> pyarrow.Array:
    """Whole numbers as int64, text as large_string: files of two days may have stored them in other types."""
    import pyarrow

    array = ids if isinstance(ids, pyarrow.Array) else pyarrow.array(ids)
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.combine_chunks()
    whole = pyarrow.types.is_integer(array.type) or pyarrow.types.is_null(array.type)
    return array.cast(pyarrow.int64() if whole else pyarrow.large_string())


def _kind(array: pyarrow.Array) -> str:
    import pyarrow

    return "int" if pyarrow.types.is_integer(array.type) else "text"


def _update_text(lengths: hashlib._Hash, values: hashlib._Hash, piece: pyarrow.Array) -> None:
    """Hash the lengths and the bytes of texts apart, so that no two lists of texts look alike."""
    _, offsets, text = piece.buffers()
    ends = np.frombuffer(offsets, np.int64)[piece.offset : piece.offset + len(piece) + 1]
    lengths.update(np.diff(ends).astype("<i8").data)
    if text is not None:
        values.update(memoryview(text)[ends[0] : ends[-1]])


def digest_of(*parts: object) -> str:
    """sha256 of anything that JSON can hold; hexadecimal."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=int).encode()).hexdigest()
