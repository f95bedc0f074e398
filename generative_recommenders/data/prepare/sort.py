"""Second stage: events into content order, straight into the cache's columns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import duckdb
import numpy as np

from generative_recommenders.data.anchor_rule import user_chunks
from generative_recommenders.data.cache import CONTEXT_PREFIX
from generative_recommenders.data.prepare.columns import ColumnWriter, read_values
from generative_recommenders.data.prepare.engine import name
from generative_recommenders.data.prepare.job import Job
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.data.prepare.source import Source
from generative_recommenders.data.prepare.tables import INTEGER_TYPES
from generative_recommenders.errors import UserError

BATCH_ROWS = 2**18


def event_columns(facts: dict) -> dict[str, np.dtype]:
    """Columns with one value per event, and their types."""
    columns = {"item": "<u4", "time": "<u4", "bits": "u1", "organic": "u1"}
    columns |= {name: "<u4" for name in facts["context_columns"]}
    return {name: np.dtype(kind) for name, kind in columns.items()}


def sort_events(
    job: Job,
    source: Source,
    facts: dict,
    connection: duckdb.DuckDBPyConnection,
    events_per_pass: int,
    progress: Progress,
) -> None:
    """Write item, time, bits, organic and context columns; continues after the last finished pass."""
    done = job.state.get("sort", {"users": 0, "events": 0, "sealed": False})
    if done["sealed"]:
        return
    offsets = read_values(job.column("user_offsets"), np.int64, 0, facts["users"] + 1)
    with contextlib.ExitStack() as stack:
        writers = {
            column: stack.enter_context(ColumnWriter(job.column(column), dtype, done["events"]))
            for column, dtype in event_columns(facts).items()
        }
        stack.enter_context(progress.stage("sort", facts["events"], done["events"]))
        for first, last in _passes(offsets, events_per_pass, done["users"]):
            whole = (first, last) == (0, facts["users"])
            query = _query(source, connection, first, last, whole, facts.get("extends", False))
            progress.follow(connection.query_progress, int(offsets[last] - offsets[first]))
            for rows in _batches(connection, query):
                for column, writer in writers.items():
                    writer.append(rows[column])
                progress.advance(len(rows["item"]))
            if writers["item"].length != offsets[last]:
                raise UserError(f"the event files changed while {job.folder} was being prepared: run it again")
            for writer in writers.values():
                writer.flush()
            job.save(sort={"users": last, "events": int(offsets[last]), "sealed": False})
        for writer in writers.values():
            writer.seal()
    job.save(sort={"users": facts["users"], "events": facts["events"], "sealed": True})


def _passes(offsets: np.ndarray, events_per_pass: int, first_user: int) -> Iterator[tuple[int, int]]:
    for first, last in user_chunks(offsets[first_user:], events_per_pass):
        yield first_user + first, first_user + last


def _query(
    source: Source, connection: duckdb.DuckDBPyConnection, first: int, last: int, whole: bool, extends: bool
) -> str:
    """SQL of one pass over users [first, last), in the content order of the cache."""
    contexts = {CONTEXT_PREFIX + column: expression for column, expression in sorted(source.context.items())}
    joins = [f"JOIN users ON {_id(source.user, 'users', connection, extends)} = users._original"]
    for table, expr in {"items": source.item, **contexts}.items():
        joins += [f"LEFT JOIN {name(table)} ON {_id(expr, table, connection, extends)} = {name(table)}._original"]
    outputs = [f"coalesce(items._dense, 0)::UINTEGER AS item, ({source.time})::UINTEGER AS time"]
    outputs += [f"({source.bits})::UTINYINT AS bits, ({source.organic})::UTINYINT AS organic"]
    outputs += [f"coalesce({name(table)}._dense, 0)::UINTEGER AS {name(table)}" for table in contexts]
    keys = [f"users._dense AS user_key, ({source.kind})::UTINYINT AS kind_key, ({source.ratio})::UINTEGER AS ratio_key"]
    ties = {table: "item" if table == "items" else name(table) for table in ("items", *contexts)}
    if extends:  # dense ids do not ascend with the originals, which decide the order
        ties = {table: name(f"{table}_rank") for table in ties}
        keys += [f"coalesce({name(table)}._rank, 0)::UINTEGER AS {key}" for table, key in ties.items()]
    item_key, *context_keys = ties.values()
    order = ["user_key", "time", item_key, "kind_key", "organic", "ratio_key", *context_keys]
    columns = ", ".join(["item", "time", "bits", "organic", *map(name, contexts)])
    where = "" if whole else f"WHERE {_user_range(source, connection, first, last)}"
    rows = f"SELECT {', '.join(outputs + keys)} FROM {source.relation} {' '.join(joins)} {where}"
    return f"SELECT {columns} FROM ({rows}) ORDER BY {', '.join(order)}"


def _id(expression: str, table: str, connection: duckdb.DuckDBPyConnection, extends: bool) -> str:
    """An id as its table has it: a day without any value may give a column another type than the earlier cache had."""
    if not extends:
        return expression
    kind = connection.execute(f"SELECT any_value(typeof(_original)) FROM {name(table)}").fetchall()[0][0]
    return expression if kind is None else f"({expression})::{kind}"


def _user_range(source: Source, connection: duckdb.DuckDBPyConnection, first: int, last: int) -> str:
    """Users [first, last) by dense id; for integer ids also by the raw column, so that whole row groups are skipped."""
    condition = f"users._dense BETWEEN {first + 1} AND {last}"
    rows = connection.execute(
        f"SELECT min(_original), max(_original), any_value(typeof(_original)) FROM users WHERE {condition}"
    ).fetchall()[0]
    if rows[2] in INTEGER_TYPES:
        condition += f" AND {name(source.user_column)} BETWEEN {rows[0]} AND {rows[1]}"
    return condition


def _batches(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[dict[str, np.ndarray]]:
    for batch in connection.sql(query).to_arrow_reader(BATCH_ROWS):
        yield {column: batch[column].to_numpy() for column in batch.schema.names}
