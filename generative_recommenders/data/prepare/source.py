"""What preparation reads: event files, how their columns become events, and what must hold for every row."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import duckdb

from generative_recommenders.data.prepare.engine import name
from generative_recommenders.data.prepare.tables import INTEGER_TYPES, Table
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

LARGEST_ID = 2**32 - 1
SUFFIXES = (".parquet", ".csv", ".tsv")
#: What packed files end in; they are not read.
_PACKED = (".gz", ".zip", ".bz2", ".zst", ".xz", ".lz4", ".snappy")


@dataclasses.dataclass(frozen=True)
class Check:
    """Rows where ``bad`` (a SQL condition) holds stop the preparation; ``value`` is shown in ``message``'s {value}."""

    bad: str
    value: str
    message: str

    def text(self, value: object) -> str:
        """The message about a value. Column names in it may hold braces of their own."""
        return self.message.replace("{value!r}", repr(value)).replace("{value}", str(value))

    def fault(self, table: Table, bad: int, rows: int) -> UserError:
        """The error about a table in which ``bad`` of ``rows`` rows fail, with file and row of the smallest value."""
        place = table.locate(self.bad, self.value, smallest=True)
        if place is None:  # only if the files changed between two looks at them
            return UserError(f"{table.what} {table.files[0]}: {self.text('?')} ({bad:,} of {rows:,} rows)")
        file, row, value = place
        return UserError(f"{table.what} {file}, row {row}: {self.text(value)} ({bad:,} of {rows:,} rows)")


@dataclasses.dataclass(frozen=True)
class AttributeFile:
    """Item attributes in files: of several attribute ids of an item the smallest counts."""

    table: Table
    item_column: str
    attribute_column: str
    checks: Sequence[Check] = ()

    @property
    def files(self) -> list[pathlib.Path]:
        """The files."""
        return list(self.table.files)

    @property
    def relation(self) -> str:
        """The files as a SQL table expression."""
        return self.table.relation


@dataclasses.dataclass(frozen=True)
class Source:
    """Event files as SQL over their raw columns.

    ``user``, ``item``, ``context[...]``: ids, integers or text (``item`` and context may be null). ``time``: seconds.
    ``kind``: u8, the event type's place in the content order. ``organic``: 0 or 1. ``ratio``: 0 for null, else the
    played ratio plus 1. ``bits``: 1, 2, 4 or 0. ``user_column`` is the raw column behind ``user``, for skipping parts
    of the files; ``time_column`` and ``outcome`` name those behind ``time`` and ``bits``, for messages. ``checks`` must
    hold; ``counters`` count rows that are allowed but worth knowing.
    """

    title: str
    table: Table
    user: str
    item: str
    time: str
    kind: str
    organic: str
    ratio: str
    bits: str
    user_column: str
    time_column: str
    outcome: str
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attributes: Mapping[str, AttributeFile] = dataclasses.field(default_factory=dict)
    checks: Sequence[Check] = ()
    counters: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> list[pathlib.Path]:
        """The event files."""
        return list(self.table.files)

    @property
    def relation(self) -> str:
        """The event files as a SQL table expression."""
        return self.table.relation

    @property
    def all_files(self) -> list[pathlib.Path]:
        """Event files, then attribute files."""
        return [*self.files, *(file for attribute in self.attributes.values() for file in attribute.files)]


def find_files(path: str | pathlib.Path, what: str) -> list[pathlib.Path]:
    """The file itself, or the parquet files or CSV files of a folder, in name order; absolute paths."""
    path = user_path(path).absolute()
    if not path.exists():
        raise UserError(f"{what} {path} does not exist: correct the path")
    files = [path]
    if path.is_dir():
        _refuse_unread(path, what)
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise UserError(f"{what} folder {path} holds no .parquet and no .csv file")
        if len({file.suffix == ".parquet" for file in files}) == 2:
            raise UserError(f"{what} folder {path} holds both .parquet and .csv files: leave only one kind in it")
    for file in files:
        if file.suffix not in SUFFIXES or not file.is_file():
            raise UserError(f"{what} {file}: expected a .parquet, .csv or .tsv file")
        if file.stat().st_size == 0:
            raise UserError(f"{what} {file} is empty (0 bytes): fetch or write it again")
    return files


def _refuse_unread(folder: pathlib.Path, what: str) -> None:
    """``UserError`` for a file that its owner may take for read: packed, with another suffix, further down, twice."""
    first: dict[tuple[int, int], pathlib.Path] = {}
    for file in sorted(folder.iterdir()):
        ends = [suffix.lower() for suffix in file.suffixes[-2:]]
        packed = len(ends) == 2 and ends[0] in SUFFIXES and ends[1] in _PACKED
        if packed or (file.suffix not in SUFFIXES and ends[-1:] and ends[-1] in SUFFIXES):
            way = "unpack it" if packed else f"write its suffix {ends[-1]}"
            raise UserError(f"{what} {file} would not be read: {way}, or take it out of the folder")
        if file.is_dir() and file.name[0] not in "._" and any(each.suffix in SUFFIXES for each in file.rglob("*")):
            raise UserError(
                f"{what} folder {folder}: files in its sub-folder {file.name} would not be read: move them up"
            )
        if file.suffix in SUFFIXES and file.exists():
            status = file.stat()
            other = first.setdefault((status.st_dev, status.st_ino), file)
            if other is not file:
                raise UserError(f"{what} {file} is {other.name} under another name: every event would count twice")


def id_checks(column: str, type_: str, null_allowed: bool = False) -> list[Check]:
    """An id must be present (unless null is allowed) and, if it is a number, lie within 0 … 2³²-1."""
    checks = []
    if not null_allowed:
        checks.append(Check(f"{name(column)} IS NULL", "'null'", f"column {column!r} holds a null"))
    if type_ in INTEGER_TYPES:
        message = f"column {column!r} holds {{value}}, outside the ids 0 … {LARGEST_ID}"
        checks.append(Check(f"{name(column)} < 0 OR {name(column)} > {LARGEST_ID}", name(column), message))
    return checks


def time_checks(column: str, expression: str) -> list[Check]:
    """A time must be present and lie within 0 … 2³²-1 seconds."""
    return [
        Check(f"({expression}) IS NULL", "'null'", f"column {column!r} holds a null or infinite time"),
        Check(
            f"{expression} < 0 OR {expression} > {LARGEST_ID}",
            f"{expression}",
            f"column {column!r} holds the time {{value}}, allowed are seconds from 0 to {LARGEST_ID} "
            "(milliseconds? divide by 1000)",
        ),
    ]


def refuse_dates_as_seconds(connection: duckdb.DuckDBPyConnection, source: Source, first: int, last: int) -> None:
    """``UserError`` if every time is a number such as 20250401: days of years 1900 to 2100, not seconds."""
    if not 19000101 <= first <= last <= 21001231:
        return
    other = f"try_strptime(({source.time})::VARCHAR, '%Y%m%d') IS NULL"
    if connection.execute(f"SELECT 1 FROM {source.relation} WHERE {other} LIMIT 1").fetchone() is None:
        raise UserError(
            f"{source.table.what} {source.files[0]}: column {source.time_column!r} runs from {first} to {last}, all of "
            "them dates written as numbers, not seconds: say so with --time-format %Y%m%d"
        )
