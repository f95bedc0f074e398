"""What preparation reads: event files, how their columns become events, and what must hold for every row."""

from __future__ import annotations

import dataclasses
import glob
import pathlib
from collections.abc import Mapping, Sequence

import duckdb

from generative_recommenders.data.prepare.engine import name, quoted, readable_errors
from generative_recommenders.errors import UserError

INTEGER_TYPES = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT")
LARGEST_ID = 2**32 - 1
SUFFIXES = (".parquet", ".csv", ".tsv")


@dataclasses.dataclass(frozen=True)
class Check:
    """Rows where ``bad`` (a SQL condition) holds stop the preparation; ``value`` is shown in ``message``'s {value}."""

    bad: str
    value: str
    message: str

    def text(self, value: object) -> str:
        """The message about a value. Paths and column names in it may hold braces of their own."""
        return self.message.replace("{value!r}", repr(value)).replace("{value}", str(value))


@dataclasses.dataclass(frozen=True)
class AttributeFile:
    """Item attributes in files: of several attribute ids of an item the smallest counts. ``types`` as in ``Source``."""

    files: Sequence[pathlib.Path]
    types: Mapping[str, str]
    item_column: str
    attribute_column: str
    checks: Sequence[Check] = ()

    @property
    def relation(self) -> str:
        """The files as a SQL table expression."""
        return relation(self.files, self.types)


@dataclasses.dataclass(frozen=True)
class Source:
    """Event files as SQL over their raw columns, whose SQL ``types`` are those that ``column_types`` found.

    ``user``, ``item``, ``context[...]``: ids, integers or text (``item`` and context may be null). ``time``: seconds.
    ``kind``: u8, the event type's place in the content order. ``organic``: 0 or 1. ``ratio``: 0 for null, else the
    played ratio plus 1. ``bits``: 1, 2, 4 or 0. ``user_column`` is the raw column behind ``user``, for skipping parts
    of the files. ``checks`` must hold; ``counters`` count rows that are allowed but worth knowing.
    """

    title: str
    files: Sequence[pathlib.Path]
    types: Mapping[str, str]
    user: str
    item: str
    time: str
    kind: str
    organic: str
    ratio: str
    bits: str
    user_column: str
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attributes: Mapping[str, AttributeFile] = dataclasses.field(default_factory=dict)
    checks: Sequence[Check] = ()
    counters: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def relation(self) -> str:
        """The event files as a SQL table expression."""
        return relation(self.files, self.types)

    @property
    def all_files(self) -> list[pathlib.Path]:
        """Event files, then attribute files."""
        return [*self.files, *(file for attribute in self.attributes.values() for file in attribute.files)]


def relation(files: Sequence[pathlib.Path], types: Mapping[str, str] | None = None) -> str:
    """SQL table expression over parquet or CSV files.

    CSV types are found by reading all of the files, not a sample; once known they are given as ``types``. The quote is
    given too: a sample of rows need not have any. Columns may stand in another order in each file. Paths are taken as
    they are: neither are ``*`` and ``[`` patterns nor folders named ``column=value`` columns.
    """
    listed = "[" + ", ".join(quoted(glob.escape(str(file))) for file in files) + "], hive_partitioning=false"
    if files[0].suffix == ".parquet":
        return f"read_parquet({listed})"
    listed += ", union_by_name=true, quote='\"', escape='\"'"
    if types is None:
        return f"read_csv({listed}, sample_size=-1)"
    given = ", ".join(f"{quoted(column)}: {quoted(kind)}" for column, kind in types.items())
    return f"read_csv({listed}, types={{{given}}})"


def find_files(path: pathlib.Path, what: str) -> list[pathlib.Path]:
    """The file itself, or the parquet files or CSV files of a folder, in name order; absolute paths."""
    path = path.absolute()
    if not path.exists():
        raise UserError(f"{what} {path} does not exist: correct the path")
    files = [path]
    if path.is_dir():
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


def column_types(connection: duckdb.DuckDBPyConnection, files: Sequence[pathlib.Path], what: str) -> dict[str, str]:
    """Column → SQL type of the files, which must agree in both."""
    first: dict[str, str] = {}
    for file in files:
        with readable_errors(f"{what} {file} cannot be read"):
            rows = connection.execute(f"DESCRIBE SELECT * FROM {relation([file])}").fetchall()
        types = {row[0]: "VARCHAR" if row[1].startswith("ENUM") else row[1] for row in rows}
        first = first or types
        for column, kind in first.items():
            if types.get(column) != kind:
                raise UserError(
                    f"{what} {file}: column {column!r} has type {types.get(column, 'none (it is missing)')}, "
                    f"but {kind} in {files[0]}: write all files with the same columns"
                )
    return first


def require_column(types: Mapping[str, str], column: str, allowed: Sequence[str], what: str) -> str:
    """The column's SQL type; ``UserError`` if it is missing or of a type outside ``allowed`` (prefixes, no lists)."""
    if column not in types:
        raise UserError(f"{what} has no column {column!r}: its columns are {', '.join(types)}")
    if types[column].endswith("]") or not any(types[column].startswith(prefix) for prefix in allowed):
        raise UserError(f"{what}: column {column!r} has type {types[column]}, expected {_spoken(allowed)}")
    return types[column]


def id_checks(column: str, type_: str, what: str, null_allowed: bool = False) -> list[Check]:
    """An id must be present (unless null is allowed) and, if it is a number, lie within 0 … 2³²-1."""
    checks = []
    if not null_allowed:
        checks.append(Check(f"{name(column)} IS NULL", "'null'", f"{what}: column {column!r} holds a null"))
    if type_ in INTEGER_TYPES:
        message = f"{what}: column {column!r} holds {{value}}, outside the ids 0 … {LARGEST_ID}"
        checks.append(Check(f"{name(column)} < 0 OR {name(column)} > {LARGEST_ID}", name(column), message))
    return checks


def time_checks(column: str, expression: str, what: str) -> list[Check]:
    """A time must be present and lie within 0 … 2³²-1 seconds."""
    return [
        Check(f"({expression}) IS NULL", "'null'", f"{what}: column {column!r} holds a null or infinite time"),
        Check(
            f"{expression} < 0 OR {expression} > {LARGEST_ID}",
            f"{expression}",
            f"{what}: column {column!r} holds the time {{value}}, allowed are seconds from 0 to {LARGEST_ID} "
            "(milliseconds? divide by 1000)",
        ),
    ]


def _spoken(allowed: Sequence[str]) -> str:
    names = {"INTEGER": "whole numbers", "VARCHAR": "text", "TIMESTAMP": "a timestamp", "BOOLEAN": "true/false"}
    names["DOUBLE"] = "numbers"
    spoken = [names[kind] for kind in allowed if kind in names]
    return " or ".join(spoken) or ", ".join(allowed)
