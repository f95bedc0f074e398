"""First stage: every row checked and counted, every id space numbered densely."""

from __future__ import annotations

import glob
from collections.abc import Sequence

import duckdb
import numpy as np
import pyarrow
import pyarrow.parquet

from generative_recommenders.data.cache import ATTRIBUTE_PREFIX, CONTEXT_PREFIX
from generative_recommenders.data.prepare.columns import write_column
from generative_recommenders.data.prepare.engine import name, quoted
from generative_recommenders.data.prepare.extend import Base, number_ids
from generative_recommenders.data.prepare.job import Job
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.data.prepare.source import AttributeFile, Check, Source, refuse_dates_as_seconds
from generative_recommenders.data.prepare.tables import Table
from generative_recommenders.data.vocabulary_files import vocabulary_file
from generative_recommenders.errors import UserError


def scan(
    job: Job, source: Source, connection: duckdb.DuckDBPyConnection, progress: Progress, base: Base | None = None
) -> dict:
    """Facts about the events: counts, vocabularies, counters. Writes user_*, item_count and attribute columns.

    ``base``: the cache whose numbers known ids keep.

    Leaves temporary tables ``users``, ``items`` and one per context column (``number_ids``) behind in the
    connection, loaded from the work folder if an earlier run made them.
    """
    tables = {"users": source.user, "items": source.item} | {CONTEXT_PREFIX + n: e for n, e in source.context.items()}
    spaces = {"users": "uid", "items": "item_id"} | {CONTEXT_PREFIX + column: column for column in source.context}
    if "scan" not in job.state:
        progress.say(f"reading {len(source.files)} event file(s) of {source.title}")
        if base is not None:
            base.check(source, connection)
        for file in source.attributes.values():
            rows, *found = _count_if(connection, file.relation, [check.bad for check in file.checks])
            _raise_first(file.table, file.checks, found, rows)
        facts = _count(source, connection)
        facts["extends"] = base is not None
        facts["context_columns"] = [CONTEXT_PREFIX + column for column in sorted(source.context)]
        with progress.stage("scan", facts["events"]):
            for table, expression in tables.items():
                number_ids(connection, table, _distinct(source, expression), base, spaces[table])
                connection.execute(f"COPY {name(table)} TO {quoted(job.work / f'{table}.parquet')} (FORMAT parquet)")
            _write_users(job, connection, facts)
            _write_items(job, source, connection, facts, base)
            for column in source.context:
                facts["vocab"][column] = _vocabulary(job, connection, column, CONTEXT_PREFIX + column) + 1
        job.save(scan=facts)
    else:
        for table in tables:
            saved = quoted(glob.escape(str(job.work / f"{table}.parquet")))
            connection.execute(f"CREATE TEMP TABLE {name(table)} AS SELECT * FROM read_parquet({saved})")
    return job.state["scan"]


def _count(source: Source, connection: duckdb.DuckDBPyConnection) -> dict:
    """Check all rows and count them in one pass over the event files."""
    # The source's names come first: a context column named item has a counter that is called null_item too.
    counted = {**source.counters, "listens": f"{source.bits} IN (1, 4)", "null_item": f"{source.item} IS NULL"}
    conditions = [check.bad for check in source.checks] + list(counted.values())
    events, *found = _count_if(connection, source.relation, conditions)
    if not events:
        raise UserError(f"{source.files[0]} holds no events: nothing to prepare")
    _raise_first(source.table, source.checks, found, events)
    counters = {"events": events} | dict(zip(counted, found[len(source.checks) :], strict=True))
    if not counters["listens"]:
        raise UserError(
            f"{source.table.what} {source.files[0]}: column {source.outcome} gives none of the {events:,} events a "
            "positive or negative outcome, so there is nothing to learn from: name the column of the outcome"
        )
    times = connection.execute(f"SELECT min({source.time}), max({source.time}) FROM {source.relation}").fetchall()[0]
    refuse_dates_as_seconds(connection, source, *times)
    return {"events": events, "time": [int(time) for time in times], "counters": counters, "vocab": {}}


def _count_if(connection: duckdb.DuckDBPyConnection, table: str, conditions: Sequence[str]) -> list[int]:
    """Rows of the table, then the rows for which each condition holds."""
    counts = ", ".join(["count(*)", *(f"count_if({condition})::BIGINT" for condition in conditions)])
    return list(connection.execute(f"SELECT {counts} FROM {table}").fetchall()[0])


def _raise_first(table: Table, checks: Sequence[Check], found: Sequence[int], rows: int) -> None:
    """``UserError`` for the first check that some row fails."""
    for check, bad in zip(checks, found, strict=False):
        if bad:
            raise check.fault(table, bad, rows)


def _distinct(source: Source, expression: str) -> str:
    """SQL: the different ids and the events of each."""
    return (
        f"SELECT {expression} AS _original, count(*) AS _events FROM {source.relation} "
        f"WHERE {expression} IS NOT NULL GROUP BY {expression}"
    )


def _write_users(job: Job, connection: duckdb.DuckDBPyConnection, facts: dict) -> None:
    users = connection.execute("SELECT _original, _events FROM users ORDER BY _dense").fetchnumpy()
    originals, events = users["_original"], np.asarray(users["_events"], np.int64)
    if originals.dtype.kind not in "iu":
        # Text ids: the user's number stands for it, the vocabulary file has the text.
        originals = np.arange(len(events))
        _vocabulary(job, connection, "uid", "users")
    offsets = np.zeros(len(events) + 1, np.int64)
    np.cumsum(events, out=offsets[1:])
    write_column(job.column("user_ids"), np.asarray(originals, np.int64))
    write_column(job.column("user_offsets"), offsets)
    facts["users"] = len(events)
    facts["vocab"]["uid"] = len(events) + 1


def _write_items(
    job: Job, source: Source, connection: duckdb.DuckDBPyConnection, facts: dict, base: Base | None
) -> None:
    rows = facts["vocab"]["item_id"] = _vocabulary(job, connection, "item_id", "items") + 1
    found = connection.execute("SELECT _dense, _events FROM items").fetchnumpy()
    count = np.zeros(rows, np.int64)
    count[np.asarray(found["_dense"], np.int64)] = found["_events"]
    count[0] = facts["counters"]["null_item"]
    write_column(job.column("item_count"), count)
    for attribute, file in source.attributes.items():
        table = _attribute_table(job, connection, attribute, file, facts, base)
        write_column(job.column(ATTRIBUTE_PREFIX + attribute), table)
        unknown = table == 0
        facts["counters"][f"items_without_{attribute}"] = int(unknown[1:].sum())
        facts["counters"][f"events_without_{attribute}"] = int(count[unknown].sum())


def _attribute_table(
    job: Job,
    connection: duckdb.DuckDBPyConnection,
    attribute: str,
    file: AttributeFile,
    facts: dict,
    base: Base | None,
) -> np.ndarray:
    """u32 [V]: the dense id of each item's smallest attribute, 0 where it has none."""
    item, value = name(file.item_column), name(file.attribute_column)
    connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE chosen AS
        SELECT items._dense AS _item, min(m.{value}) AS _original
        FROM {file.relation} m JOIN items ON m.{item} = items._original
        WHERE m.{value} IS NOT NULL GROUP BY items._dense"""
    )
    ids = "SELECT _original, count(*) AS _events FROM chosen GROUP BY _original"
    number_ids(connection, "attribute_ids", ids, base, attribute)
    facts["vocab"][attribute] = _vocabulary(job, connection, attribute, "attribute_ids") + 1
    found = connection.execute("SELECT _item, _dense FROM chosen JOIN attribute_ids USING (_original)").fetchnumpy()
    table = np.zeros(facts["vocab"]["item_id"], np.uint32)
    table[np.asarray(found["_item"], np.int64)] = found["_dense"]
    return table


def _vocabulary(job: Job, connection: duckdb.DuckDBPyConnection, space: str, table: str) -> int:
    """Write the original ids in the order of the dense ones (row r is id r + 1); returns how many there are."""
    found = connection.sql(f"SELECT _original FROM {name(table)} ORDER BY _dense").to_arrow_table().combine_chunks()
    file = job.folder / vocabulary_file(space)
    pyarrow.parquet.write_table(pyarrow.table({"original": found["_original"]}), file, row_group_size=2**20)
    return found.num_rows
