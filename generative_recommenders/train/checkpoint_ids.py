"""Which ids the rows of a checkpoint's tables stand for, and where those ids are in the data of this run.

A checkpoint names for each table the vocabulary that its rows follow (``data`` in ``meta.json``) and keeps the raw ids
themselves in ``vocabularies/<table>.parquet``: row r of the file's column ``id`` is table row r + 1, row 0 of a table
is the unknown id. The data that it was trained on may be gone when it is loaded.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from generative_recommenders.data.identity import CrossedIds, DataIdentity, Vocabulary
from generative_recommenders.errors import UserError

FOLDER = "vocabularies"
COLUMN = "id"
SHORT = 12  # characters of a fingerprint in messages
SHOWN = 3  # ids in a message


@dataclasses.dataclass(frozen=True)
class Carry:
    """How the rows of a checkpoint's tables come into this run's.

    ``old_rows``: table → int64 ``[rows of its vocabulary]``, the stored row of each row or -1 where the checkpoint does
    not know the id; tables that are not in it load as they are stored. ``notes`` and ``warnings`` are for the log.
    """

    old_rows: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def describe(identity: DataIdentity) -> dict:
    """What ``meta.json`` says of the data: its content, and what each table's rows stand for."""
    tables = {}
    for name, ids in identity.tables.items():
        tables[name] = {"rows": ids.rows, "fingerprint": ids.fingerprint}
        if isinstance(ids, CrossedIds):
            tables[name]["parts"] = list(ids.parts)
    return {"content": identity.content, "tables": tables}


def save(folder: pathlib.Path, identity: DataIdentity, previous: pathlib.Path | None, data: Mapping | None) -> None:
    """Write the raw ids of every table under ``folder``, or link to those of the checkpoint ``previous``.

    ``data`` is ``describe`` of the previous one; its files are taken where the vocabulary is the same.
    """
    (folder / FOLDER).mkdir()
    before = data["tables"] if data else {}
    for name, ids in identity.tables.items():
        if not isinstance(ids, Vocabulary):
            continue
        target, known = folder / FOLDER / f"{name}.parquet", before.get(name, {}).get("fingerprint")
        source = previous / FOLDER / target.name if previous is not None else None
        if source is not None and known == ids.fingerprint and source.is_file():
            try:
                os.link(source, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(source, target)
        else:
            pq.write_table(pa.table({COLUMN: ids.originals()}), target, compression="zstd")


def match(
    path: pathlib.Path,
    data: Mapping | None,
    identity: DataIdentity,
    sizes: Mapping[str, tuple[int, int]],
    match_ids: bool,
) -> Carry:
    """Decide for every table whether its rows stand for the same ids, and, with ``match_ids``, where each row goes.

    Args:
        path: the checkpoint.
        data: what it says of its data (``describe``), ``None`` if it is from before checkpoints did.
        sizes: table → rows in the checkpoint and rows in this run, of the tables that both have.

    Raises:
        UserError: a table stands for other ids; names the first one, both vocabularies, and the way out.
    """
    if data is None:
        if match_ids:
            raise UserError(
                f"{path}: was written before checkpoints kept the ids of their rows, so checkpoint.match_ids cannot "
                "match them; save it again on the data that it was trained on (--resume), then load that"
            )
        warning = "was written before checkpoints kept the ids of their rows: whether they are this run's is not known"
        return Carry(warnings=(f"{path}: {warning}",))
    matcher = _Matcher(path, data["tables"], identity, match_ids)
    for table, (there, here) in sizes.items():
        matcher.table(table, there, here)
    return matcher.result()


class _Matcher:
    """Goes through the tables of one checkpoint and collects what is to be said and done."""

    def __init__(self, path: pathlib.Path, stored: Mapping, identity: DataIdentity, match_ids: bool) -> None:
        self._path, self._stored, self._identity, self._match_ids = path, stored, identity, match_ids
        self._old_rows: dict[str, np.ndarray] = {}
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self._refused: dict[str, str] = {}  # table → why, where checkpoint.match_ids would help
        self._refused_anyhow: dict[str, str] = {}

    def result(self) -> Carry:
        """What was decided; ``UserError`` if any table was refused."""
        refused = [*self._refused_anyhow.items(), *self._refused.items()]
        if refused:
            table, why = refused[0]
            others = [name for name, _ in refused[1:]]
            also = f" (and {len(others)} more tables: {', '.join(others[:SHOWN])})" if others else ""
            raise UserError(f"{self._path}: table {table}{also} {why}")
        return Carry(self._old_rows, tuple(self._notes), tuple(self._warnings))

    def table(self, table: str, there: int, here: int) -> None:
        """Decide for one table of ``there`` rows in the checkpoint and ``here`` rows in this run."""
        then, now = self._stored.get(table), self._identity.tables.get(table)
        if then is None or now is None:
            self._warnings.append(f"{self._path}: does not say what the rows of table {table} stand for")
        elif isinstance(now, CrossedIds) or "parts" in then:
            self._crossed(table, then, now)
        elif then["fingerprint"] != now.fingerprint:
            self._other_ids(table, then, now, there, here)
        elif there != here and self._match_ids:
            self._old_rows[table] = np.arange(now.rows)
            self._notes.append(f"table {table}: {now.rows - 1:,} ids carried over, from {there:,} rows into {here:,}")
        elif there != here:
            self._refused[table] = f"has {there:,} rows there and {here:,} here, for the same ids; {_MATCH}"

    def _crossed(self, table, then, now):
        pass

    def _other_ids(self, table: str, then: Mapping, now: Vocabulary, there: int, here: int) -> None:
        old, new = self._stored_ids(table, then), _comparable(now.originals())
        two = f"vocabulary {_short(then['fingerprint'], then['rows'])} there, {_short(now.fingerprint, now.rows)} here"
        if old.type != new.type:
            self._refused_anyhow[table] = (
                f"stands for ids of another type, {old.type} there and {new.type} here ({two}); prepare the data with "
                "ids of one type"
            )
            return
        rows = np.full(now.rows, -1, np.int64)
        rows[0] = 0
        places = pc.index_in(new, value_set=old)
        known = places.is_valid().to_numpy(zero_copy_only=False)
        rows[1:][known] = places.drop_null().to_numpy().astype(np.int64) + 1
        kept = int(known.sum())
        counts = f"{kept:,} ids known, {len(new) - kept:,} new, {len(old) - kept:,} gone"
        if self._match_ids:
            self._old_rows[table] = rows
            self._notes.append(f"table {table}: rows carried over by id: {counts}")
            if not kept:
                self._warnings.append(f"{self._path}: table {table}: no id is known, so all its rows begin anew")
        elif there == here and kept == len(old) and bool((rows[1 : len(old) + 1] == np.arange(1, len(old) + 1)).all()):
            self._notes.append(f"table {table}: {counts}; every known id has the row that it had")
        else:
            self._refused[table] = f"stands for other ids: {two}; {_differences(old, new)}{counts}; {_MATCH}"

    def _stored_ids(self, table: str, then: Mapping) -> pa.Array:
        file = self._path / FOLDER / f"{table}.parquet"
        try:
            ids = _comparable(pq.read_table(file)[COLUMN])
            if len(ids) != then["rows"] - 1:
                raise ValueError(f"{len(ids):,} ids of {then['rows'] - 1:,}")
        except (OSError, ValueError, KeyError, pa.ArrowException) as exc:
            reason = next(iter(str(exc).splitlines()), "")
            raise UserError(
                f"{file}: the ids of the table's rows are missing or damaged ({reason}), and this run's data has "
                "others; restore the file, or use another checkpoint"
            ) from None
        return ids


_MATCH = "carry rows over by id with checkpoint.match_ids=True, or use the data that the checkpoint was trained on"


def _comparable(ids: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    """Ids in one type for whole numbers and one for text: files of two days may have stored them in others."""
    kind = pa.large_string() if not pa.types.is_integer(ids.type) else pa.int64()
    ids = ids if isinstance(ids, pa.ChunkedArray) else pa.chunked_array([ids])
    return ids.cast(kind).combine_chunks()


def _short(fingerprint: str, rows: int) -> str:
    return f"{fingerprint[:SHORT]} of {rows:,} rows"


def _differences(old: pa.Array, new: pa.Array) -> str:
    """The first rows that stand for other ids, as far as both vocabularies reach."""
    shared = min(len(old), len(new))
    other = np.flatnonzero(pc.not_equal(old[:shared], new[:shared]).to_numpy(zero_copy_only=False))[:SHOWN].tolist()
    rows = [f"row {i + 1} is {old[i].as_py()!r} there and {new[i].as_py()!r} here" for i in other]
    return "".join(f"{text}, " for text in rows)
