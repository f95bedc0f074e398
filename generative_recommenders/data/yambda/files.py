"""Yambda's files: which columns they have, and how their rows become events."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from generative_recommenders.data.prepare.engine import utc_connection
from generative_recommenders.data.prepare.source import (
    AttributeFile,
    Check,
    Source,
    find_files,
    id_checks,
    time_checks,
)
from generative_recommenders.data.prepare.tables import INTEGER_TYPES, open_table
from generative_recommenders.data.yambda.layout import EVENT_TYPES, MAPPINGS, events_path
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

#: The event files' columns that are read, and the types that they may have.
COLUMNS = dict.fromkeys(("uid", "timestamp", "item_id", "played_ratio_pct"), INTEGER_TYPES) | {
    "is_organic": (*INTEGER_TYPES, "BOOLEAN"),
    "event_type": ("VARCHAR",),
}


def yambda_source(path: str | pathlib.Path, size: str) -> Source:
    """Describe the files under ``path`` for ``prepare``; ``UserError`` for missing files, columns or wrong types."""
    fetch = f"python -m generative_recommenders.data.yambda download --size {size} --path {path}"
    mappings = {attribute: user_path(path) / file for attribute, file in MAPPINGS.items()}
    for needed in (user_path(path), events_path(path, size), *mappings.values()):
        if not needed.exists():
            raise UserError(f"Yambda: {needed} does not exist: correct --path, or fetch the files first ({fetch})")
    events = find_files(events_path(path, size), "Yambda events")
    connection = utc_connection()
    try:
        table = open_table(connection, events, "Yambda events", COLUMNS)
        attributes = {}
        for attribute, file in mappings.items():
            files = find_files(file, "Yambda mapping")
            used = dict.fromkeys(("item_id", attribute), INTEGER_TYPES)
            mapping = open_table(connection, files, "Yambda mapping", used)
            checks = [check for column in used for check in id_checks(column, mapping.types[column], null_allowed=True)]
            attributes[attribute] = AttributeFile(mapping, "item_id", attribute, checks)
    finally:
        connection.close()
    return Source(
        title=f"Yambda {size}",
        table=table,
        user="uid",
        item="item_id",
        time="timestamp",
        kind=_kind(),
        organic="coalesce(is_organic::INTEGER, 0)",
        ratio="coalesce(played_ratio_pct::BIGINT + 1, 0)",
        bits="CASE event_type::VARCHAR WHEN 'like' THEN 2 WHEN 'listen' THEN "
        "CASE WHEN played_ratio_pct >= 50 THEN 1 WHEN played_ratio_pct < 50 THEN 4 ELSE 0 END ELSE 0 END",
        user_column="uid",
        time_column="timestamp",
        outcome="event_type and played_ratio_pct",
        attributes=attributes,
        checks=_checks(table.types),
        counters=_counters(),
    )


def _kind() -> str:
    cases = " ".join(f"WHEN '{kind}' THEN {number}" for number, kind in enumerate(EVENT_TYPES))
    return f"CASE event_type::VARCHAR {cases} END"


def _counters() -> dict[str, str]:
    counted = {f"event_{kind}": f"event_type::VARCHAR = '{kind}'" for kind in EVENT_TYPES}
    counted["listen_plus"] = "event_type::VARCHAR = 'listen' AND played_ratio_pct >= 50"
    counted["skip"] = "event_type::VARCHAR = 'listen' AND played_ratio_pct < 50"
    counted["listen_without_ratio"] = "event_type::VARCHAR = 'listen' AND played_ratio_pct IS NULL"
    counted["null_organic"] = "is_organic IS NULL"
    return counted


def _checks(types: Mapping[str, str]) -> list[Check]:
    checks = id_checks("uid", types["uid"])
    checks += id_checks("item_id", types["item_id"], null_allowed=True)
    checks += time_checks("timestamp", "timestamp")
    known = ", ".join(f"'{kind}'" for kind in EVENT_TYPES)
    checks.append(
        Check(
            f"event_type IS NULL OR event_type::VARCHAR NOT IN ({known})",
            "coalesce(event_type::VARCHAR, 'null')",
            f"column 'event_type' holds {{value!r}}, expected one of {', '.join(EVENT_TYPES)}",
        )
    )
    checks.append(
        Check(
            "is_organic NOT IN (0, 1)" if types["is_organic"] in INTEGER_TYPES else "false",
            "is_organic",
            "column 'is_organic' holds {value}, expected 0 or 1",
        )
    )
    checks.append(
        Check(
            "played_ratio_pct < 0 OR played_ratio_pct > 65535",
            "played_ratio_pct",
            "column 'played_ratio_pct' holds {value}, expected 0 … 65535",
        )
    )
    return checks
