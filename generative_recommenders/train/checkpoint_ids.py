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

from generative_recommenders.data.identity import CrossedIds, DataIdentity, UnknownIds, Vocabulary, fingerprint_of
from generative_recommenders.errors import UserError
from generative_recommenders.modules.table_names import table_name

FOLDER = "vocabularies"
COLUMN = "id"
KINDS = {Vocabulary: "ids", CrossedIds: "crossed", UnknownIds: "unknown"}
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
        more = ids.describe() if isinstance(ids, CrossedIds) else {"rows": ids.rows, "fingerprint": ids.fingerprint}
        tables[name] = {"kind": KINDS[type(ids)], **more}
    return {"content": identity.content, "tables": tables}


def file_of(folder: pathlib.Path, table: str) -> pathlib.Path:
    """The file of a table's raw ids in a checkpoint."""
    return folder / FOLDER / f"{table_name(table)}.parquet"


def save(folder: pathlib.Path, identity: DataIdentity, previous: pathlib.Path | None, data: Mapping | None) -> None:
    """Write the raw ids of every table under ``folder``, or link to those of the checkpoint ``previous``.

    ``data`` is ``describe`` of the previous one; its files are taken where the vocabulary is the same.
    """
    (folder / FOLDER).mkdir(parents=True)
    before = data["tables"] if data else {}
    for name, ids in identity.tables.items():
        if not isinstance(ids, Vocabulary):
            continue
        target, known = file_of(folder, name), before.get(name, {}).get("fingerprint")
        source = file_of(previous, name) if previous is not None else None
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


def _same_reason(one: str, other: str) -> bool:
    """Whether two tables were refused for the same thing: their first three words are alike but for numbers."""
    first, second = ([word for word in why.split()[:3] if not word[0].isdigit()] for why in (one, other))
    return first == second


def _more_tables(names: list[str]) -> str:
    return f"{len(names)} more table{'s' * (len(names) > 1)}: {', '.join(names[:SHOWN])}"


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
            alike = [name for name, other in refused[1:] if _same_reason(why, other)]
            unlike = [name for name, other in refused[1:] if not _same_reason(why, other)]
            also = f" (and {_more_tables(alike)})" if alike else ""
            too = f"; {_more_tables(unlike)} do not fit for other reasons" if unlike else ""
            raise UserError(f"{self._path}: table {table}{also} {why}{too}")
        return Carry(self._old_rows, tuple(self._notes), tuple(self._warnings))

    def table(self, table: str, there: int, here: int) -> None:
        """Decide for one table of ``there`` rows in the checkpoint and ``here`` rows in this run."""
        then, now = self._stored.get(table), self._identity.tables.get(table)
        if then is None or now is None:
            self._warnings.append(f"{self._path}: does not say what the rows of table {table} stand for")
        elif then["kind"] != KINDS[type(now)]:
            self._refused_anyhow[table] = (
                f"stood for {_KIND_NAMES[then['kind']]} and stands for {_KIND_NAMES[KINDS[type(now)]]}"
            )
        elif isinstance(now, CrossedIds):
            self._crossed(table, then, now)
        elif then["fingerprint"] != now.fingerprint:
            self._other_ids(table, then, now, there, here)
        elif there != here and self._match_ids:
            self._old_rows[table] = np.arange(now.rows)
            self._notes.append(f"table {table}: {now.rows - 1:,} ids carried over, from {there:,} rows into {here:,}")
        elif there != here:
            self._refused[table] = f"has {there:,} rows there and {here:,} here, for the same ids; {_MATCH}"

    def _crossed(self, table: str, then: Mapping, now: CrossedIds) -> None:
        """Rows of a cross are hashes of its parts' numbers: they are the same rows or nothing is known of them."""
        if then["fingerprint"] == now.fingerprint:
            return
        if now.same_rows(then):
            self._notes.append(f"table {table}: its parts have new ids, every known one has the number that it had")
            return
        if then["rows"] != now.rows:
            why = f"has {then['rows']:,} rows there and {now.rows:,} here"
        else:
            spaces = then["vocabularies"]
            other = [
                s for s, ids in now.vocabularies.items() if spaces.get(s, {}).get("fingerprint") != ids.fingerprint
            ]
            why = f"is hashed from numbers that stand for other ids than there ({', '.join(other)})"
        self._refused_anyhow[table] = (
            f"is a cross and {why}, so its rows cannot be matched by id; prepare the data with --extend OLD_CACHE, "
            "which keeps the numbers of known ids and the sizes of crosses, or train anew "
            "without the cross in contextual_features (another number of them has other weights)"
        )

    def _other_ids(self, table: str, then: Mapping, now: Vocabulary | UnknownIds, there: int, here: int) -> None:
        if isinstance(now, UnknownIds):
            self._refused_anyhow[table] = f"stands for other ids, or for the same in another cache: {now.why}"
            return
        old, new = _of_one_type(self._stored_ids(table, then), now.originals())
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
        file = file_of(self._path, table)
        try:
            ids = pq.read_table(file)[COLUMN].combine_chunks()
            sound = len(ids) == then["rows"] - 1 and fingerprint_of([ids], len(ids)) == then["fingerprint"]
        except (OSError, ValueError, KeyError, pa.ArrowException):
            sound = False
        if not sound:
            raise UserError(
                f"{file}: the ids of the table's rows are missing or damaged, and this run's data has others; restore "
                "the file, or use another checkpoint"
            )
        return ids


_MATCH = "carry rows over by id with checkpoint.match_ids=True, or use the data that the checkpoint was trained on"


_KIND_NAMES = {"ids": "raw ids", "crossed": "a cross", "unknown": "ids that the cache does not know"}


def _of_one_type(old: pa.Array, new: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Both lists of ids; an empty one has no type of its own."""
    return (old if len(old) else old.cast(new.type)), (new if len(new) else new.cast(old.type))


def _short(fingerprint: str, rows: int) -> str:
    return f"{fingerprint[:SHORT]} of {rows:,} rows"


def _differences(old: pa.Array, new: pa.Array) -> str:
    """The first rows that stand for other ids, as far as both vocabularies reach."""
    shared = min(len(old), len(new))
    other = np.flatnonzero(pc.not_equal(old[:shared], new[:shared]).to_numpy(zero_copy_only=False))[:SHOWN].tolist()
    rows = [f"row {i + 1} is {old[i].as_py()!r} there and {new[i].as_py()!r} here" for i in other]
    return "".join(f"{text}, " for text in rows)
