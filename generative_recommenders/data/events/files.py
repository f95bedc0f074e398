"""Own events in parquet or CSV files: which columns mean what, and how their rows become events.

docs/bring_your_own_events.md has the schema and a worked example.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import duckdb

from generative_recommenders.data.prepare.engine import name
from generative_recommenders.data.prepare.source import (
    INTEGER_TYPES,
    AttributeFile,
    Check,
    Source,
    column_types,
    find_files,
    id_checks,
    require_column,
    time_checks,
)
from generative_recommenders.data.schema import (
    ACTION_TIMESTAMP,
    ACTION_WEIGHT,
    CANDIDATE_ACTION_WEIGHT,
    CROSS_JOINT,
    LISTEN_PLUS,
    QUERY_TIME,
    SKIP,
)
from generative_recommenders.errors import UserError

ID_TYPES = (*INTEGER_TYPES, "VARCHAR")
NUMBER_TYPES = (*INTEGER_TYPES, "DOUBLE", "FLOAT", "DECIMAL")
#: Names of a batch that no attribute and no context column can have; ``id`` would be the candidate's item_candidate_id.
TAKEN = ("uid", "item_id", "id", ACTION_WEIGHT, ACTION_TIMESTAMP, QUERY_TIME, CANDIDATE_ACTION_WEIGHT)
ROLES = ("user", "item", "time", "action", "label", "organic")


@dataclasses.dataclass(frozen=True)
class EventColumns:
    """Column of each role in the event files; exactly one of ``action`` and ``label`` is used.

    ``action``: 0, 1, 2 or 4 (other, positive, like, negative). ``label``: true/false or 0/1, or any number with
    ``positive_at``: positive from this value on; null means no outcome. ``organic``: 0 or 1, None: all 1.
    """

    user: str = "user"
    item: str = "item"
    time: str = "time"
    action: str | None = None
    label: str | None = None
    organic: str | None = None
    positive_at: float | None = None

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
    files = find_files(pathlib.Path(events), "events")
    what = f"events {files[0]}"
    connection = duckdb.connect()
    try:
        types = column_types(connection, files, "events")
        checks = _id_and_time_checks(types, columns, context, what)
        tables = _attribute_files(connection, items, item_column or columns.item, attributes, types[columns.item])
    finally:
        connection.close()
    bits, bits_checks = _bits(types, columns, what)
    organic, organic_checks = _organic(types, columns, what)
    return Source(
        title="own events",
        files=files,
        types=types,
        user=name(columns.user),
        item=name(columns.item),
        time=_time(types, columns),
        kind=bits,
        organic=organic,
        ratio="0",
        bits=bits,
        user_column=columns.user,
        context={column: name(column) for column in context},
        attributes=tables,
        checks=[*checks, *bits_checks, *organic_checks],
        counters={
            "positive": f"{bits} = {LISTEN_PLUS}",
            "negative": f"{bits} = {SKIP}",
            **{f"null_{column}": f"{name(column)} IS NULL" for column in context},
        },
    )


def _check_names(columns: EventColumns, attributes: Sequence[str], context: Sequence[str]) -> None:
    """Names of features: not taken, different, no cross's name, fit for a file name, and no outcome among them."""
    for column in (*attributes, *context):
        if column in TAKEN or CROSS_JOINT in column or "/" in column or [*attributes, *context].count(column) > 1:
            raise UserError(
                f"feature name {column!r} is not possible: rename the column (names must differ, hold no '/' and no "
                f"'_x_', and not be one of {', '.join(TAKEN)})"
            )
    for column in context:
        if column in (columns.action, columns.label):
            raise UserError(f"context column {column!r} is the outcome itself: leave it out, a sample must not know it")


def _id_and_time_checks(
    types: Mapping[str, str], columns: EventColumns, context: Sequence[str], what: str
) -> list[Check]:
    checks = id_checks(columns.user, require_column(types, columns.user, ID_TYPES, what), what)
    for column in (columns.item, *context):
        checks += id_checks(column, require_column(types, column, ID_TYPES, what), what, null_allowed=True)
    require_column(types, columns.time, (*INTEGER_TYPES, "TIMESTAMP", "DATE"), what)
    return checks + time_checks(columns.time, _time(types, columns), what)


def _time(types: Mapping[str, str], columns: EventColumns) -> str:
    if types[columns.time] in INTEGER_TYPES:
        return name(columns.time)
    return f"floor(epoch({name(columns.time)}))::BIGINT"


def _bits(types: Mapping[str, str], columns: EventColumns, what: str) -> tuple[str, list[Check]]:
    """SQL of the action bits and the checks of the column behind it."""
    if columns.action is not None:
        require_column(types, columns.action, INTEGER_TYPES, what)
        action = name(columns.action)
        message = f"{what}: column {columns.action!r} holds the action {{value}}, expected 0, 1, 2 or 4"
        return action, [Check(f"{action} IS NULL OR {action} NOT IN (0, 1, 2, 4)", action, message)]
    label, checks = name(columns.label), []
    allowed = NUMBER_TYPES if columns.positive_at is not None else (*NUMBER_TYPES, "BOOLEAN")
    if require_column(types, columns.label, allowed, what) in ("DOUBLE", "FLOAT"):
        # As text: parquet's statistics leave nan out, and the engine trusts them when it compares numbers.
        message = f"{what}: column {columns.label!r} holds the label {{value}}: leave it empty where there is none"
        checks.append(Check(f"contains({label}::VARCHAR, 'nan')", label, message))
    if columns.positive_at is not None:
        positive = f"{label} >= {float(columns.positive_at)!r}"
    else:
        positive = f"{label}::DOUBLE = 1"
        message = (
            f"{what}: column {columns.label!r} holds the label {{value}}, expected 0 or 1 (a rating? --positive-at 4)"
        )
        checks.append(Check(f"{label}::DOUBLE NOT IN (0, 1)", f"{label}::DOUBLE", message))
    return f"CASE WHEN {label} IS NULL THEN 0 WHEN {positive} THEN {LISTEN_PLUS} ELSE {SKIP} END", checks


def _organic(types: Mapping[str, str], columns: EventColumns, what: str) -> tuple[str, list[Check]]:
    if columns.organic is None:
        return "1", []
    require_column(types, columns.organic, (*INTEGER_TYPES, "BOOLEAN"), what)
    raw = name(columns.organic)
    message = f"{what}: column {columns.organic!r} holds {{value}}, expected 0 or 1"
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
    files = find_files(pathlib.Path(items), "items")
    what = f"items {files[0]}"
    types = column_types(connection, files, "items")
    kind = require_column(types, item_column, ID_TYPES, what)
    if (kind == "VARCHAR") != (item_type == "VARCHAR"):
        raise UserError(f"{what}: column {item_column!r} has type {kind}, the items of the events have {item_type}")
    tables = {}
    for attribute in attributes:
        checks = id_checks(item_column, kind, what)
        checks += id_checks(attribute, require_column(types, attribute, ID_TYPES, what), what, null_allowed=True)
        tables[attribute] = AttributeFile(files, types, item_column, attribute, checks)
    return tables
