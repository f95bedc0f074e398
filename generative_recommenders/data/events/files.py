"""Own events in parquet or CSV files: which columns mean what, and how their rows become events.

docs/bring_your_own_events.md has the schema and a worked example.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import duckdb

from generative_recommenders.data.prepare.dates import find_reading, given_reading
from generative_recommenders.data.prepare.engine import name, seconds, utc_connection
from generative_recommenders.data.prepare.source import (
    AttributeFile,
    Check,
    Source,
    find_files,
    id_checks,
    time_checks,
)
from generative_recommenders.data.prepare.tables import INTEGER_TYPES, Table, open_table
from generative_recommenders.data.schema import LISTEN_PLUS, NAME_RULE, SKIP, impossible_name
from generative_recommenders.errors import UserError

ID_TYPES = (*INTEGER_TYPES, "VARCHAR")
NUMBER_TYPES = (*INTEGER_TYPES, "DOUBLE", "FLOAT", "DECIMAL")
TIME_TYPES = (*INTEGER_TYPES, "VARCHAR", "TIMESTAMP", "DATE")
ROLES = ("user", "item", "time", "action", "label", "organic")


@dataclasses.dataclass(frozen=True)
class EventColumns:
    """Column of each role in the event files; exactly one of ``action`` and ``label`` is used.

    ``action``: 0, 1, 2 or 4 (other, positive, like, negative). ``label``: true/false or 0/1, or any number with
    ``positive_at``: positive from this value on; null means no outcome. ``organic``: 0 or 1, None: all 1.
    ``time_format``: how times that are text are written, as for Python's ``strptime`` (``%d/%m/%Y %H:%M``); None: ISO
    dates, or the one order of day and month that reads all of them.
    """

    user: str = "user"
    item: str = "item"
    time: str = "time"
    action: str | None = None
    label: str | None = None
    organic: str | None = None
    positive_at: float | None = None
    time_format: str | None = None

    def __post_init__(self) -> None:
        if self.action is None and self.label is None:
            raise UserError("no column of the outcome is named: add action=COLUMN or label=COLUMN to --columns")
        if self.action is not None and self.label is not None:
            raise UserError(
                f"--columns names action={self.action} and label={self.label}: the outcome is one column, name one"
            )
        if self.positive_at is not None and self.label is None:
            raise UserError(f"--positive-at {self.positive_at:g} needs label=COLUMN in --columns to compare with")
        if self.positive_at is not None and not math.isfinite(self.positive_at):
            raise UserError(f"--positive-at {self.positive_at}: expected a finite number")


def events_source(
    events: str | pathlib.Path,
    columns: EventColumns,
    *,
    items: str | pathlib.Path | None = None,
    item_column: str | None = None,
    attributes: Sequence[str] = (),
    context: Sequence[str] = (),
) -> Source:
    """Describe event files (and an item file with ``attributes`` columns) for ``prepare``.

    ``item_column``: the item's id in the item file, by default as in the events. Raises ``UserError`` for missing
    files, missing columns and wrong types.
    """
    _check_names(columns, attributes, context)
    files = find_files(events, "events")
    connection = utc_connection()
    try:
        as_text = [columns.time] if columns.time_format is not None else []
        table = open_table(connection, files, "events", _used(columns, context), as_text)
        time, checks = _time(connection, table, columns)
        checks = [*_id_checks(table.types, columns, context), *checks]
        tables = _attribute_files(connection, items, item_column or columns.item, attributes, table.types[columns.item])
    finally:
        connection.close()
    bits, bits_checks = _bits(table.types, columns)
    organic, organic_checks = _organic(table.types, columns)
    return Source(
        title="own events",
        table=table,
        user=name(columns.user),
        item=name(columns.item),
        time=time,
        kind=bits,
        organic=organic,
        ratio="0",
        bits=bits,
        user_column=columns.user,
        time_column=columns.time,
        outcome=repr(columns.action if columns.label is None else columns.label),
        context={column: name(column) for column in context},
        attributes=tables,
        checks=[*checks, *bits_checks, *organic_checks],
        counters={
            "positive": f"{bits} = {LISTEN_PLUS}",
            "negative": f"{bits} = {SKIP}",
            **{f"null_{column}": f"{name(column)} IS NULL" for column in context},
        },
    )


def _used(columns: EventColumns, context: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Column of the event files → the types that all of its roles allow."""
    label = NUMBER_TYPES if columns.positive_at is not None else (*NUMBER_TYPES, "BOOLEAN")
    roles: list[tuple[str | None, tuple[str, ...]]]
    roles = [(columns.user, ID_TYPES), (columns.item, ID_TYPES), *((column, ID_TYPES) for column in context)]
    roles += [(columns.time, TIME_TYPES), (columns.action, INTEGER_TYPES), (columns.label, label)]
    roles += [(columns.organic, (*INTEGER_TYPES, "BOOLEAN"))]
    used: dict[str, tuple[str, ...]] = {}
    for column, allowed in roles:
        if column is not None:
            used[column] = tuple(kind for kind in used.get(column, allowed) if kind in allowed)
    return used


def _check_names(columns: EventColumns, attributes: Sequence[str], context: Sequence[str]) -> None:
    """Names of features must be possible, and no outcome among them."""
    if (column := impossible_name([*attributes, *context])) is not None:
        raise UserError(f"feature name {column!r} is not possible: rename the column ({NAME_RULE})")
    for column in context:
        if column in (columns.action, columns.label):
            raise UserError(f"context column {column!r} is the outcome itself: leave it out, a sample must not know it")


def _id_checks(types: Mapping[str, str], columns: EventColumns, context: Sequence[str]) -> list[Check]:
    checks = id_checks(columns.user, types[columns.user])
    for column in (columns.item, *context):
        checks += id_checks(column, types[column], null_allowed=True)
    return checks


def _time(connection: duckdb.DuckDBPyConnection, table: Table, columns: EventColumns) -> tuple[str, list[Check]]:
    """SQL of an event's second, and what must hold for its column."""
    column, kind = columns.time, table.types[columns.time]
    if columns.time_format is None and kind != "VARCHAR":
        time = name(column) if kind in INTEGER_TYPES else seconds(name(column))
        return time, time_checks(column, time)
    if kind not in ("VARCHAR", *INTEGER_TYPES):
        raise UserError(
            f"--time-format {columns.time_format!r}: column {column!r} has type {kind} in {table.files[0]} already, a "
            "format is for text: leave it out"
        )
    reading = (
        find_reading(connection, table, column)
        if columns.time_format is None
        else given_reading(column, columns.time_format)
    )
    message = f"column {column!r} holds {{value!r}}, which {reading.title} does not fit"
    unread = Check(f"{name(column)} IS NOT NULL AND ({reading.expression}) IS NULL", name(column), message)
    return reading.expression, [unread, *time_checks(column, reading.expression)]


def _bits(types: Mapping[str, str], columns: EventColumns) -> tuple[str, list[Check]]:
    """SQL of the action bits and the checks of the column behind it."""
    if columns.action is not None:
        action = name(columns.action)
        message = f"column {columns.action!r} holds the action {{value}}, expected 0, 1, 2 or 4"
        return action, [Check(f"{action} IS NULL OR {action} NOT IN (0, 1, 2, 4)", action, message)]
    assert columns.label is not None  # one of the two is given
    label, checks = name(columns.label), []
    if types[columns.label] in ("DOUBLE", "FLOAT"):
        # As text: parquet's statistics leave nan out, and the engine trusts them when it compares numbers.
        message = f"column {columns.label!r} holds the label {{value}}: leave it empty where there is none"
        checks.append(Check(f"contains({label}::VARCHAR, 'nan')", label, message))
    if columns.positive_at is not None:
        positive = f"{label} >= {float(columns.positive_at)!r}"
    else:
        positive = f"{label}::DOUBLE = 1"
        message = f"column {columns.label!r} holds the label {{value}}, expected 0 or 1 (a rating? --positive-at 4)"
        checks.append(Check(f"{label}::DOUBLE NOT IN (0, 1)", f"{label}::DOUBLE", message))
    return f"CASE WHEN {label} IS NULL THEN 0 WHEN {positive} THEN {LISTEN_PLUS} ELSE {SKIP} END", checks


def _organic(types: Mapping[str, str], columns: EventColumns) -> tuple[str, list[Check]]:
    if columns.organic is None:
        return "1", []
    raw = name(columns.organic)
    message = f"column {columns.organic!r} holds {{value}}, expected 0 or 1"
    checks = [Check(f"{raw} NOT IN (0, 1)", raw, message)] if types[columns.organic] != "BOOLEAN" else []
    return f"coalesce({raw}::INTEGER, 0)", checks


def _attribute_files(
    connection: duckdb.DuckDBPyConnection,
    items: str | pathlib.Path | None,
    item_column: str,
    attributes: Sequence[str],
    item_type: str,
) -> dict[str, AttributeFile]:
    if items is None:
        if attributes:
            raise UserError(f"--attributes {attributes[0]}: needs --items, the file to read it from")
        return {}
    files = find_files(items, "items")
    table = open_table(connection, files, "items", dict.fromkeys((item_column, *attributes), ID_TYPES))
    kind = table.types[item_column]
    if (
        connection.execute(f"SELECT 1 FROM {table.relation} WHERE {name(item_column)} IS NOT NULL LIMIT 1").fetchone()
        is None
    ):
        raise UserError(f"items {files[0]}: column {item_column!r} holds no item: fetch or write the file again")
    if (kind == "VARCHAR") != (item_type == "VARCHAR"):
        raise UserError(
            f"items {files[0]}: column {item_column!r} has type {kind}, the items of the events have {item_type}"
        )
    tables = {}
    for attribute in attributes:
        checks = id_checks(item_column, kind) + id_checks(attribute, table.types[attribute], null_allowed=True)
        tables[attribute] = AttributeFile(table, item_column, attribute, checks)
    return tables
