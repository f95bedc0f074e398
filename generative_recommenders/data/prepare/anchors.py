"""Third stage: the eligible listens of all users, sorted by time."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import numpy as np
import pyarrow

from generative_recommenders.data.anchor_rule import anchor_type, eligible_events, user_chunks
from generative_recommenders.data.prepare.columns import ColumnWriter, read_values
from generative_recommenders.data.prepare.job import Job
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.data.prepare.sort import BATCH_ROWS

CHUNK_EVENTS = 2**20
DAY = 86_400
_SCHEMA = pyarrow.schema([("time", pyarrow.uint32()), ("event", pyarrow.int64())])


def write_anchors(
    job: Job,
    facts: dict,
    min_history: int,
    connection: duckdb.DuckDBPyConnection,
    events_per_pass: int,
    progress: Progress,
) -> None:
    """Write the ``anchors`` column; continues after the last finished pass."""
    state = job.state.get("anchors") or _plan(job, facts, min_history, events_per_pass, progress)
    if state["sealed"]:
        return
    column = ColumnWriter(job.column("anchors"), state["dtype"], state["done"])
    with column as writer, progress.stage("anchors", state["total"], state["done"]):
        while state["passes"]:
            start, stop = state["passes"][0]
            rows = _eligible(job, facts, min_history, start, stop)
            stream = pyarrow.RecordBatchReader.from_batches(_SCHEMA, rows)
            connection.register("eligible", stream)
            ordered = connection.sql("SELECT event FROM eligible ORDER BY time, event")
            for batch in ordered.to_arrow_reader(BATCH_ROWS):
                writer.append(batch["event"].to_numpy().astype(state["dtype"]))
                progress.advance(batch.num_rows)
            connection.unregister("eligible")
            writer.flush()
            state = state | {"done": writer.length, "passes": state["passes"][1:]}
            job.save(anchors=state)
        writer.seal()
    job.save(anchors=state | {"sealed": True})


def _plan(job: Job, facts: dict, min_history: int, events_per_pass: int, progress: Progress) -> dict:
    """Count the anchors of each day and cut the days into passes; a day is never cut."""
    per_day = np.zeros(2**32 // DAY + 1, np.int64)
    with progress.stage("count anchors", facts["events"]):
        for times, _, events in _chunks(job, facts, min_history):
            per_day += np.bincount(times // DAY, minlength=len(per_day))
            progress.advance(events)
    offsets = np.zeros(len(per_day) + 1, np.int64)
    np.cumsum(per_day, out=offsets[1:])
    passes = [[first * DAY, last * DAY] for first, last in user_chunks(offsets, events_per_pass)]
    passes = [bounds for bounds in passes if offsets[bounds[1] // DAY] > offsets[bounds[0] // DAY]]
    dtype = np.dtype(anchor_type(facts["events"])).str
    return {"total": int(offsets[-1]), "done": 0, "passes": passes, "dtype": dtype, "sealed": False}


def _chunks(job: Job, facts: dict, min_history: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(times, event numbers, events looked at) of the anchors, some users at a time."""
    offsets = read_values(job.column("user_offsets"), np.int64, 0, facts["users"] + 1)
    for first, last in user_chunks(offsets, CHUNK_EVENTS):
        start, stop = int(offsets[first]), int(offsets[last])
        times = read_values(job.column("time"), np.uint32, start, stop)
        bits = read_values(job.column("bits"), np.uint8, start, stop)
        events = eligible_events(offsets[first : last + 1] - start, times, bits, min_history)
        yield times[events], events + start, stop - start


def _eligible(job: Job, facts: dict, min_history: int, start: int, stop: int) -> Iterator[pyarrow.RecordBatch]:
    for times, events, _ in _chunks(job, facts, min_history):
        chosen = (times >= start) & (times < stop)
        yield pyarrow.record_batch([times[chosen], events[chosen]], schema=_SCHEMA)
