"""Dates written as text: one reading for all files of a table.

``1/4/2025`` is the first of April or the fourth of January, and nothing in one value says which. So the values of all
files decide together: an order of day, month and year is a reading if every value is a date under it. Readings that
differ in some value are not chosen between; a time format settles it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import duckdb

from generative_recommenders.data.prepare.engine import name, quoted, readable_errors, seconds
from generative_recommenders.data.prepare.tables import Table
from generative_recommenders.errors import UserError

#: Order of a date's parts → how messages call it. A year of four digits in front is read as year, month, day.
ORDERS = {"ymd": "year first", "dmy": "day first", "mdy": "month first"}
OPTION = "--time-format (time_format in Python)"
#: More shapes than dates of one kind can have: fractions, offsets and numbers without leading zeros.
_MOST_SHAPES = 500
_DATE = re.compile(r" *(9{1,4})([-/.])(9{1,2})\2(9{1,4})(?:[T ](.*))?")
_PLAIN = "[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}([T ][0-9:.]*)?"
_CLOCK = re.compile(r"9{1,2}:99(:99(\.9{1,9})?)?( ?[AaPp][Mm])?( ?(?:[Zz]|[+-]99(?::?99)?))?")
_ISO_ZONE = re.compile(r":.*[-+A-Za-z]")


@dataclasses.dataclass(frozen=True)
class Reading:
    """``expression``: SQL of a text's whole seconds, null where it is no date; ``title``: for messages."""

    title: str
    expression: str


def given_reading(column: str, time_format: str) -> Reading:
    """The reading of a time format in the notation of Python's ``strptime``; ``UserError`` for one that is none."""
    try:
        with duckdb.connect() as connection:
            connection.execute(f"SELECT try_strptime('', {quoted(time_format)})")
    except duckdb.Error as error:
        raise UserError(f"--time-format {time_format!r} is no time format ({str(error).splitlines()[0]})") from None
    return Reading(f"the time format {time_format!r}", _seconds(f"{name(column)}::VARCHAR", [time_format]))


def find_reading(connection: duckdb.DuckDBPyConnection, table: Table, column: str) -> Reading:
    """The one reading of a text column; ``UserError`` if there is none, or several that differ."""
    if _all_plain(connection, table, column):
        return Reading("an ISO date", seconds(f"TRY_CAST({name(column)} AS TIMESTAMP)"))
    shapes = _shapes(connection, table, column)
    iso = [shape for shape in shapes if _is_iso(shape)]
    if len(iso) == len(shapes):
        zone = "TIMESTAMPTZ" if any(map(_ISO_ZONE.search, shapes)) else "TIMESTAMP"
        return Reading("an ISO date", seconds(f"TRY_CAST({name(column)} AS {zone})"))
    readings = {order: _reading(column, shapes, order) for order in ORDERS}
    possible = {order: reading for order, reading in readings.items() if reading is not None}
    if not possible:
        raise _no_reading(table, column, shapes, iso)
    bad = [f"{name(column)} IS NOT NULL AND ({each.expression}) IS NULL" for each in possible.values()]
    with readable_errors(f"{table.what} {table.files[0]} cannot be read"):
        counts = ", ".join(f"count_if({condition})" for condition in bad)
        found = connection.execute(f"SELECT {counts} FROM {table.relation}").fetchall()[0]
    fitting = [reading for reading, count in zip(possible.values(), found, strict=True) if not count]
    if not fitting:
        raise _contradiction(table, column, list(possible.values()), bad)
    pairs = [f"({one.expression}) <> ({other.expression})" for one, other in itertools.combinations(fitting, 2)]
    if pairs and (place := table.locate(" OR ".join(pairs), name(column))):
        raise _ambiguous(connection, table, column, place, fitting)
    return fitting[0]


def _all_plain(connection: duckdb.DuckDBPyConnection, table: Table, column: str) -> bool:
    """Whether all values are ISO dates without a zone: by far the most, and cheaper to tell than shapes."""
    other = f"NOT regexp_full_match({name(column)}, {quoted(_PLAIN)})"
    with readable_errors(f"{table.what} {table.files[0]} cannot be read"):
        return connection.execute(f"SELECT 1 FROM {table.relation} WHERE {other} LIMIT 1").fetchone() is None


def _shapes(connection: duckdb.DuckDBPyConnection, table: Table, column: str) -> dict[str, str]:
    """Shape (every digit a 9) → a value that has it."""
    shape = f"translate({name(column)}, '0123456789', '9999999999')"
    with readable_errors(f"{table.what} {table.files[0]} cannot be read"):
        rows = connection.execute(
            f"SELECT {shape} AS _shape, min({name(column)}) FROM {table.relation} WHERE {name(column)} IS NOT NULL "
            f"GROUP BY _shape ORDER BY _shape LIMIT {_MOST_SHAPES}"
        ).fetchall()
    return dict(rows)


def _is_iso(shape: str) -> bool:
    found = _DATE.match(shape)
    return found is not None and len(found[1]) == 4 and len(found[4]) <= 2 and found[2] != "."


def _reading(column: str, shapes: dict[str, str], order: str) -> Reading | None:
    """The reading of all shapes with that order of the date's parts, if each can have it."""
    found = [_format(shape, order) for shape in shapes]
    formats = [each for each in found if each is not None]
    if len(formats) < len(found):
        return None
    return Reading(ORDERS[order], _seconds(name(column), list(dict.fromkeys(formats))))


def _format(shape: str, order: str) -> str | None:
    """``99/99/9999 99:99`` and ``dmy`` → ``%d/%m/%Y %H:%M``; ``None`` where the shape cannot have that order."""
    found = _DATE.fullmatch(shape)
    if found is None:
        return None
    first, separator, last = len(found[1]), found[2], len(found[4])
    year = first if order == "ymd" else last
    if year not in (2, 4) or (last if order == "ymd" else first) > 2:
        return None
    codes = {"d": "%d", "m": "%m", "y": "%Y" if year == 4 else "%y"}
    date = separator.join(codes[part] for part in order)
    if found[5] is None:
        return date
    clock = _CLOCK.fullmatch(found[5])
    if clock is None:
        return None
    between, half, zone = shape[found.start(5) - 1], clock[3] or "", clock[4] or ""
    text = ("%I" if half else "%H") + ":%M" + (":%S" if clock[1] else "")
    text += "" if not clock[2] else ".%f" if len(clock[2]) <= 7 else ".%n"
    text += " " * half.startswith(" ") + "%p" * bool(half) + " " * zone.startswith(" ")
    text += zone.strip() if zone.strip() in ("Z", "z") else "%z" * bool(zone)
    return date + between + text


def _seconds(text: str, formats: list[str]) -> str:
    # A call per format: in one call with several, the offset of an earlier row stays for one without.
    tried = [f"epoch(try_strptime({text}, {quoted(each)}))" for each in formats]
    return f"floor(coalesce({', '.join(tried)}, NULL))::BIGINT"


def _no_reading(table: Table, column: str, shapes: dict[str, str], iso: list[str]) -> UserError:
    unknown = [shape for shape in shapes if all(_format(shape, order) is None for order in ORDERS)]
    if unknown:
        file, row, value = _first(table, column, shapes[unknown[0]])
        return UserError(
            f"{table.what} {file}, row {row}: column {column!r} holds {value!r}, which is no time in whole seconds and "
            f"no date such as 2026-01-31 23:59:00: name its format with {OPTION}"
        )
    other = next(shape for shape in shapes if _format(shape, "ymd" if iso else "dmy") is None)
    one = next(shape for shape in shapes if _format(shape, "ymd" if iso else "dmy") is not None)
    (file, row, value), (file2, row2, value2) = (_first(table, column, shapes[shape]) for shape in (one, other))
    return UserError(
        f"{table.what}: column {column!r} holds {value!r} in {file}, row {row}, and {value2!r} in {file2}, row {row2}: "
        "no one order of year, month and day reads both; write all dates alike"
    )


def _first(table: Table, column: str, value: str) -> tuple:
    place = table.locate(f"{name(column)} = {quoted(value)}", name(column))
    return place or (table.files[0], "?", value)


def _contradiction(table: Table, column: str, readings: list[Reading], bad: list[str]) -> UserError:
    said = []
    for reading, condition in zip(readings, bad, strict=True):
        file, row, value = table.locate(condition, name(column)) or (table.files[0], "?", "?")
        said.append(f"not {reading.title} ({value!r} in {file}, row {row})")
    return UserError(
        f"{table.what}: column {column!r} has no one reading: {', '.join(said)}: write all dates alike, or name "
        f"their format with {OPTION}"
    )


def _ambiguous(
    connection: duckdb.DuckDBPyConnection, table: Table, column: str, place: tuple, readings: list[Reading]
) -> UserError:
    file, row, value = place
    shown: dict[str, list[str]] = {}
    for reading in readings:
        query = f"SELECT strftime(make_timestamp(1000000 * ({reading.expression})), '%Y-%m-%d %H:%M:%S')"
        text = connection.execute(f"{query} FROM (SELECT {quoted(value)} AS {name(column)})").fetchall()[0][0]
        shown.setdefault(text, []).append(reading.title)
    possible = " or ".join(f"{text} ({' or '.join(titles)})" for text, titles in shown.items())
    return UserError(
        f"{table.what} {file}, row {row}: column {column!r} holds {value!r}, which is {possible}, and no "
        f"value of any file says which: name the format with {OPTION}, such as %d/%m/%Y or %m/%d/%Y"
    )
