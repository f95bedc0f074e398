"""Files read as one table: the columns that are used, under one type each, whatever else the files hold.

Daily files drift: a column comes or goes, a day without values loses its type, a narrower number type follows a wider
one. Columns that nobody uses are not looked at. A used column must be in every file; its types are joined
(``_joined``), and files in which it holds nothing have no say. Files whose columns have the same types are read by one
call, others by a call each with casts.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import duckdb

from generative_recommenders.data.prepare.engine import name, quoted, readable_errors, seconds, utc_connection
from generative_recommenders.errors import UserError

INTEGER_TYPES = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT")
TEMPORAL_TYPES = ("TIMESTAMP", "DATE")
_BITS = {"TINYINT": 8, "SMALLINT": 16, "INTEGER": 32, "BIGINT": 64}
_NUMBERS = ("DOUBLE", "FLOAT", "DECIMAL")
#: The type of a column that holds nothing but nulls.
NOTHING = "NULL"
_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t,;|"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Files of one layout: all ``columns`` of a CSV file in order (none for parquet), types of the used ones."""

    files: tuple[pathlib.Path, ...]
    found: Mapping[str, str]
    columns: tuple[str, ...] = ()
    delimiter: str = ""

    def read(self, line_by_line: bool = False) -> str:
        """SQL table expression with the types as found; ``line_by_line`` finds a CSV file's faulty lines.

        Paths are taken as they are: neither are ``*`` and ``[`` patterns nor folders named ``column=value`` columns.
        """
        listed = "[" + ", ".join(quoted(glob.escape(str(file))) for file in self.files) + "], hive_partitioning=false"
        if not self.columns:
            return f"read_parquet({listed})"
        given = ", ".join(f"{quoted(column)}: {quoted(self._csv_type(column))}" for column in self.columns)
        # union_by_name: without it the engine expects a handful of rows and joins the wrong way around.
        known = f"auto_detect=false, union_by_name={str(not line_by_line).lower()}, columns={{{given}}}"
        return f"read_csv({listed}, {known}, {_dialect(self.delimiter)})"

    def _csv_type(self, column: str) -> str:
        kind = self.found.get(column, NOTHING)
        return "VARCHAR" if kind == NOTHING else kind


@dataclasses.dataclass(frozen=True)
class Table:
    """Files as one SQL table of the used columns; ``types``: column → SQL type. ``what`` names them in messages."""

    what: str
    parts: tuple[Part, ...]
    types: Mapping[str, str]
    files: tuple[pathlib.Path, ...]

    @property
    def relation(self) -> str:
        """SQL table expression."""
        return self._relation(self.parts)

    def _relation(self, parts: Sequence[Part]) -> str:
        if len(parts) == 1 and dict(parts[0].found) == dict(self.types):
            return parts[0].read()
        selects = []
        for part in parts:
            outputs = [f"{self._cast(part, column)} AS {name(column)}" for column in self.types]
            selects.append(f"SELECT {', '.join(outputs)} FROM {part.read()}")
        return f"({' UNION ALL '.join(selects)})"

    def _cast(self, part: Part, column: str) -> str:
        kind, raw = self.types[column], name(column)
        if part.found[column].startswith(TEMPORAL_TYPES) and kind in INTEGER_TYPES:
            return seconds(raw)
        return f"{raw}::{kind}"

    def locate(self, condition: str, value: str, smallest: bool = False) -> tuple[pathlib.Path, int, object] | None:
        """(file, row, value) of the first row for which the SQL condition holds, or of the first with the smallest
        value; rows count from 1 behind the header. Reads file by file in one thread: for messages."""
        columns, best = ", ".join(map(name, self.types)), None
        order = "ORDER BY _value, _row " if smallest else ""
        with utc_connection(threads=1) as connection:
            for file in self.files:
                part = next(part for part in self.parts if file in part.files)
                rows = self._relation([dataclasses.replace(part, files=(file,))])
                numbered = f"SELECT row_number() OVER () AS _row, {columns} FROM {rows}"
                query = f"SELECT _row, {value} AS _value FROM ({numbered}) WHERE {condition} {order}LIMIT 1"
                found = connection.execute(query).fetchone()
                if found is not None and (best is None or found[1] < best[2]):
                    best = (file, *found)
                    if not smallest:
                        break
        return best


def open_table(
    connection: duckdb.DuckDBPyConnection,
    files: Sequence[pathlib.Path],
    what: str,
    used: Mapping[str, Sequence[str]],
    as_text: Sequence[str] = (),
) -> Table:
    """The files' ``used`` columns (column → allowed types, as prefixes) under one type each.

    ``as_text``: columns of CSV files to leave as they are written. Raises ``UserError`` for a file without one of the
    columns, a type that is not allowed, types that contradict each other, and files that cannot be read.
    """
    parts = []
    for file in files:
        with readable_errors(f"{what} {file} cannot be read"):
            part, names = (
                _parquet(connection, file, used) if file.suffix == ".parquet" else _csv(connection, file, used)
            )
        missing = [column for column in used if column not in part.found]
        if missing:
            # In quotes where they hold spaces, which may be all that is wrong.
            shown = ", ".join(repr(each) if each != "".join(each.split()) else each for each in names)
            raise UserError(f"{what} {file} has no column {missing[0]!r}: its columns are {shown}")
        text = {column: "VARCHAR" for column in as_text if part.columns}
        found = {
            column: _allowed(connection, part, column, kind, used[column], what)
            for column, kind in (dict(part.found) | text).items()
        }
        parts.append(dataclasses.replace(part, found=found))
    types = {column: _common(connection, parts, column, used[column], what) for column in used}
    return Table(what, _grouped(parts), types, tuple(files))


def _parquet(
    connection: duckdb.DuckDBPyConnection, file: pathlib.Path, used: Mapping[str, Sequence[str]]
) -> tuple[Part, list[str]]:
    rows = connection.execute(f"DESCRIBE SELECT * FROM {Part((file,), {}).read()}").fetchall()
    kinds = {row[0]: "VARCHAR" if row[1].startswith("ENUM") else row[1].strip('"') for row in rows}
    return Part((file,), {column: kinds[column] for column in used if column in kinds}), list(kinds)


def _csv(
    connection: duckdb.DuckDBPyConnection, file: pathlib.Path, used: Mapping[str, Sequence[str]]
) -> tuple[Part, list[str]]:
    """Types are found by reading the whole file, not a sample; dates stay text (dates.py reads them)."""
    delimiter, header = _header(file, used)
    twice = [column for column in used if [each.casefold() for each in header].count(column.casefold()) > 1]
    if twice:
        raise UserError(f"{file}: column {twice[0]!r} stands twice in the header: rename one")
    columns = tuple(_different(header))
    plain = Part((file,), {}, columns, delimiter)
    candidates = "sample_size=-1, comment='', auto_type_candidates=['BOOLEAN', 'BIGINT', 'DOUBLE', 'VARCHAR']"
    listed = f"[{quoted(glob.escape(str(file)))}]"
    query = f"DESCRIBE SELECT * FROM read_csv({listed}, {candidates}, {_dialect(delimiter)})"
    try:
        rows = connection.execute(query).fetchall()
    except duckdb.Error:
        rows = []
    if len(rows) != len(columns):
        # Rows of unequal length: reading them says which, looking for types does not.
        values = ", ".join(f"max({name(column)})" for column in columns)
        connection.execute(f"SELECT {values} FROM {plain.read(line_by_line=True)}")
        raise UserError(f"{file} is no CSV file with a header and fields separated by {delimiter!r}")
    kinds = {column: row[1] for column, row in zip(columns, rows, strict=True)}
    for column, allowed in used.items():
        if kinds.get(column) == "BOOLEAN" and "BOOLEAN" not in allowed and "VARCHAR" in allowed:
            kinds[column] = "VARCHAR"  # a day on which a column of texts holds nothing but f, or yes
    return dataclasses.replace(plain, found={c: kinds[c] for c in used if c in kinds}), list(columns)


def _dialect(delimiter: str) -> str:
    """The quote is given too: a sample of rows need not have any."""
    return f"header=true, delim={quoted(delimiter)}, quote='\"', escape='\"'"


def _header(file: pathlib.Path, used: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """The delimiter under which the first line has all used columns (else the most fields), and its fields."""
    found = {}
    for delimiter in _DELIMITERS[file.suffix]:
        try:
            with file.open(encoding="utf-8-sig", newline="") as text:
                found[delimiter] = next((row for row in csv.reader(text, delimiter=delimiter) if row), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{file} is no CSV file in UTF-8 ({error})") from None
        if all(column in found[delimiter] for column in used):
            break
    else:
        delimiter = max(found, key=lambda each: len(found[each]))
    if not found[delimiter]:
        raise UserError(f"{file} has no header: its first line must name the columns")
    return delimiter, found[delimiter]


def _different(header: Sequence[str]) -> list[str]:
    """The header's names, those that are empty or there already (case aside, as the engine sees them) renamed."""
    names: list[str] = []
    for number, column in enumerate(header):
        while not column or column.casefold() in [each.casefold() for each in names]:
            column = f"{column or 'column'}_{number}"
        names.append(column)
    return names


def _allowed(
    connection: duckdb.DuckDBPyConnection, part: Part, column: str, kind: str, allowed: Sequence[str], what: str
) -> str:
    """The file's type of a column, ``NOTHING`` if it holds nothing; ``UserError`` if it is not allowed."""
    if kind == NOTHING or (not kind.endswith("]") and kind.startswith(tuple(allowed))):
        return kind
    if _holds_nothing(connection, part, column):
        return NOTHING
    raise UserError(f"{what} {part.files[0]}: column {column!r} has type {kind}, expected {_spoken(allowed)}")


def _holds_nothing(connection: duckdb.DuckDBPyConnection, part: Part, column: str) -> bool:
    with readable_errors(f"{part.files[0]} cannot be read"):
        rows = f"SELECT 1 FROM {part.read()} WHERE {name(column)} IS NOT NULL LIMIT 1"
        return connection.execute(rows).fetchone() is None


def _common(
    connection: duckdb.DuckDBPyConnection, parts: list[Part], column: str, allowed: Sequence[str], what: str
) -> str:
    """The type that holds the column's values of all files. Where types contradict each other, files in which the
    column holds nothing are marked so, in place."""
    common = _joined(part.found[column] for part in parts)
    if common is None:
        for place, part in enumerate(parts):
            if _holds_nothing(connection, part, column):
                parts[place] = dataclasses.replace(part, found={**part.found, column: NOTHING})
        common = _joined(part.found[column] for part in parts)
    if common is None:
        first = next(part for part in parts if part.found[column] != NOTHING)
        other = next(part for part in parts if _joined([first.found[column], part.found[column]]) is None)
        raise UserError(
            f"{what} {other.files[0]}: column {column!r} has type {other.found[column]}, but {first.found[column]} "
            f"in {first.files[0]}: write all files with the same types"
        )
    if common == NOTHING:
        return "BIGINT" if "BIGINT" in allowed else allowed[0]
    return common


def _joined(kinds: Iterable[str]) -> str | None:
    """The type that holds the values of all, ``None`` if they contradict each other. Dates of several types become
    seconds."""
    different = set(kinds) - {NOTHING}
    if len(different) < 2:
        return next(iter(different), NOTHING)
    if all(kind in INTEGER_TYPES for kind in different):
        return _widest(different)
    if all(kind in INTEGER_TYPES or kind.startswith(_NUMBERS) for kind in different):
        return "DOUBLE"
    return "BIGINT" if all(kind.startswith(TEMPORAL_TYPES) for kind in different) else None


def _widest(kinds: Iterable[str]) -> str:
    bits = {kind: _BITS[kind.removeprefix("U")] for kind in kinds}
    unsigned = max((size for kind, size in bits.items() if kind.startswith("U")), default=0)
    signed = max((size for kind, size in bits.items() if not kind.startswith("U")), default=0)
    need = max(signed, min(2 * unsigned, 64)) if signed else unsigned
    return ("" if signed else "U") + next(kind for kind, size in _BITS.items() if size == need)


def _grouped(parts: Sequence[Part]) -> tuple[Part, ...]:
    """One part per layout, in the order of the first file of each."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(repr((part.found, part.columns, part.delimiter)), []).append(part)
    return tuple(
        dataclasses.replace(group[0], files=tuple(file for part in group for file in part.files))
        for group in groups.values()
    )


def _spoken(allowed: Sequence[str]) -> str:
    names = {"INTEGER": "whole numbers", "VARCHAR": "text", "TIMESTAMP": "a timestamp", "BOOLEAN": "true/false"}
    names["DOUBLE"] = "numbers"
    spoken = [names[kind] for kind in allowed if kind in names]
    return " or ".join(spoken) or ", ".join(allowed)
