"""Preparation, stage by stage: scan → sort → anchors → seal.

- **scan**: check every row, count, number users, items and attributes densely (0 stays free for unknown).
- **sort**: the engine's external sort by (user, time, item, type, organic, ratio, context), in passes over ranges of
  users so that the spill space and the work lost to a kill stay bounded; rows stream straight into the columns.
- **anchors**: eligible listens sorted by (time, event), in passes over ranges of days.
- **seal**: checksums, manifest, marker.

Every stage's result depends on the rows alone, so threads, memory, row order, file split and kills leave no trace.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import pathlib
import shutil
import time

from generative_recommenders.data.cache import (
    ATTRIBUTE_PREFIX,
    CONTEXT_PREFIX,
    EXTENDED_VERSION,
    MARKER,
    SCHEMA_VERSION,
    read_manifest,
)
from generative_recommenders.data.prepare.anchors import write_anchors
from generative_recommenders.data.prepare.columns import sha256
from generative_recommenders.data.prepare.engine import Limits, readable_errors
from generative_recommenders.data.prepare.extend import Base, generations
from generative_recommenders.data.prepare.job import Job, fingerprint
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.data.prepare.replace import recover, replacement
from generative_recommenders.data.prepare.scan import scan
from generative_recommenders.data.prepare.sort import event_columns, sort_events
from generative_recommenders.data.prepare.source import Source
from generative_recommenders.data.vocabulary_files import vocabularies_of
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

#: Events (or anchors) of one sorting pass: about 8 GB of spill space at most.
EVENTS_PER_PASS = 2**28
#: Spilled bytes per event of a pass, with room: 16 were measured with 20 M shuffled events in 600 MiB.
SPILL_BYTES_PER_EVENT = 30


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to make: everything that shapes the cache."""

    source: Source
    min_history: int
    base: Base | None
    cross_users: int | None

    def fingerprint(self) -> str:
        base = None if self.base is None else self.base.digest
        return fingerprint(self.source, self.min_history, base, self.cross_users)


def prepare(
    source: Source,
    path: str | pathlib.Path,
    *,
    min_history: int,
    extend: str | pathlib.Path | None = None,
    cross_users: int | None = None,
    limits: Limits | None = None,
    overwrite: bool = False,
    check_space: bool = True,
    events_per_pass: int = EVENTS_PER_PASS,
    progress: Progress | None = None,
) -> dict:
    """Turn event files into an event cache in the folder ``path`` and return its manifest.

    Goes on where an earlier, killed run with the same input and settings stopped; a complete cache of the same input
    and settings is left as it is. ``overwrite`` replaces a complete cache of whatever input when the new one is
    complete; until then it stays (``replace.py``). Raises ``UserError`` for bad input, too little memory or disk, or a
    foreign folder.

    ``extend``: an earlier cache, whose ids keep their numbers and whose sizes of crosses are kept; ids that it does not
    know are appended (``extend.py``). ``cross_users``: users that crosses are sized by, instead of those that there
    are, so that the cache has room to be extended.
    """
    if not 0 <= min_history < 2**32:
        raise UserError(f"min_history is {min_history}: expected 0 or more, and less than 2**32")
    limits, progress = limits or Limits(), progress or Progress(None)
    folder = user_path(path)
    recover(folder)
    for file in source.all_files:
        if file.resolve().parent == folder.resolve():
            raise UserError(f"{file} lies in the cache folder, where it would be overwritten: name another --cache")
    if cross_users is not None and not 1 <= cross_users < 2**32:
        raise UserError(f"cross_users is {cross_users}: expected 1 or more, and less than 2**32")
    if cross_users is not None and extend is not None:
        raise UserError(
            f"--cross-users {cross_users} and --extend {extend}: an extension keeps the sizes of crosses, leave one out"
        )
    began = time.time()
    with readable_errors(f"preparing {folder}", folder):
        base = None if extend is None else Base.open(extend, folder)
        plan = _Plan(source, min_history, base, cross_users)
        job_for = lambda place: Job(place, plan.fingerprint())
        arguments = (plan, limits, check_space, events_per_pass, progress)
        if overwrite and (folder / MARKER).exists():
            with replacement(folder) as new:
                manifest = _work(job_for(new), *arguments)
        else:
            manifest = _work(job_for(folder), *arguments)
    if manifest is None:
        progress.say(f"{folder} is already prepared")
        return read_manifest(folder)
    progress.say(f"{folder}: {manifest['events']:,} events in {time.time() - began:.0f} s")
    return manifest


def _work(
    job: Job,
    plan: _Plan,
    limits: Limits,
    check_space: bool,
    events_per_pass: int,
    progress: Progress,
) -> dict | None:
    """All stages; the manifest, or ``None`` where the cache is there already."""
    began = time.time()
    with job.opened() as done:
        if done:
            return None
        connection = limits.connect(job.temp)
        try:
            facts = scan(job, plan.source, connection, progress, plan.base)
            if check_space:
                require_space(job, facts, events_per_pass)
            sort_events(job, plan.source, facts, connection, events_per_pass, progress)
            write_anchors(job, facts, plan.min_history, connection, events_per_pass, progress)
        finally:
            connection.close()
        _unchanged(plan, job)
        manifest = _seal(job, plan, facts, progress)
        job.complete(manifest, _preparation(plan.source, limits, began))
    return manifest


def require_space(job: Job, facts: dict, events_per_pass: int) -> None:
    """``UserError`` unless the cache to be and one pass's spill fit on the disk (counting what is already there)."""
    events = facts["events"]
    columns = sum(dtype.itemsize for dtype in event_columns(facts).values()) * events
    anchors = facts["counters"]["listens"] * (4 if events <= 2**32 else 8)
    need = columns + anchors + SPILL_BYTES_PER_EVENT * min(events, events_per_pass) + 2**20
    have = shutil.disk_usage(job.folder).free + sum(file.stat().st_size for file in job.folder.glob("*.npy"))
    if have < need:
        raise UserError(
            f"preparing {job.folder} needs up to {need / 1e9:.3f} GB of disk for {events:,} events, "
            f"{have / 1e9:.3f} GB are free: free some space or name another path"
        )


def _unchanged(plan: _Plan, job: Job) -> None:
    if plan.fingerprint() != job.state["fingerprint"]:
        raise UserError(f"the event files changed while {job.folder} was being prepared: run it again")


def _seal(job: Job, plan: _Plan, facts: dict, progress: Progress) -> dict:
    types = {name: dtype.str for name, dtype in event_columns(facts).items()}
    types |= {"user_offsets": "<i8", "user_ids": "<i8", "item_count": "<i8", "anchors": job.state["anchors"]["dtype"]}
    types |= {ATTRIBUTE_PREFIX + name: "<u4" for name in plan.source.attributes}
    lengths = {name: facts["events"] for name in types}
    lengths |= {"user_offsets": facts["users"] + 1, "user_ids": facts["users"], "anchors": job.state["anchors"]["done"]}
    lengths |= {name: facts["vocab"]["item_id"] for name in types if name.startswith(ATTRIBUTE_PREFIX)}
    lengths["item_count"] = facts["vocab"]["item_id"]
    columns, vocabularies = {}, {}
    with progress.stage("checksums", facts["events"]):
        for name in sorted(types):
            file = job.column(name)
            columns[name] = {
                "bytes": file.stat().st_size,
                "dtype": types[name],
                "length": lengths[name],
                "sha256": sha256(file),
            }
        for file in sorted(job.folder.glob("vocabulary_*.parquet")):
            vocabularies[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "source": plan.source.title,
        "min_history": plan.min_history,
        "events": facts["events"],
        "users": facts["users"],
        "anchors": job.state["anchors"]["done"],
        "event_time": facts["time"],
        "vocab": facts["vocab"],
        "counters": facts["counters"],
        "context": [name.removeprefix(CONTEXT_PREFIX) for name in sorted(types) if name.startswith(CONTEXT_PREFIX)],
        "attributes": list(plan.source.attributes),
        "columns": columns,
        "vocabularies": vocabularies,
    }
    spaces = vocabularies_of(job.folder, manifest)
    manifest["fingerprints"] = {space: ids.fingerprint for space, ids in spaces.items()}
    return manifest | _numbering(plan, facts)


def _numbering(plan: _Plan, facts: dict) -> dict:
    """What the manifest says of ids and sizes that the events alone do not give."""
    if plan.base is not None:
        return {
            "schema_version": EXTENDED_VERSION,
            "extends": plan.base.digest,
            "generations": generations(plan.base, facts["vocab"]),
            "cross_users": plan.base.cross_users,
        }
    if plan.cross_users is not None:
        return {"schema_version": EXTENDED_VERSION, "cross_users": plan.cross_users}
    return {}


def _preparation(source: Source, limits: Limits, began: float) -> dict:
    return {
        "files": [str(file) for file in source.all_files],
        "memory": limits.memory,
        "threads": limits.threads,
        "seconds": math.ceil(time.time() - began),
        "versions": {name: importlib.metadata.version(name) for name in ("duckdb", "numpy", "pyarrow")},
    }
