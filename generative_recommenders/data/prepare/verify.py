"""Whether a prepared cache is what its manifest says, and a summary of it."""

from __future__ import annotations

import pathlib

from generative_recommenders.data.cache import EventCache, column_file, read_manifest
from generative_recommenders.data.prepare.columns import sha256
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path


def verify(path: str | pathlib.Path, progress: Progress | None = None) -> dict:
    """Check the checksum of every file and the consistency of the columns; returns the manifest.

    Raises ``UserError`` that names the first file or column at fault.
    """
    folder, progress = user_path(path), progress or Progress(None)
    manifest = read_manifest(folder)
    files = {column_file(name): entry for name, entry in manifest["columns"].items()} | manifest["vocabularies"]
    with progress.stage("checksums", manifest["events"]):
        for name, entry in files.items():
            if not (folder / name).is_file():
                raise UserError(f"{folder / name} is missing: prepare the cache again")
            if sha256(folder / name) != entry["sha256"]:
                raise UserError(f"{folder / name} does not match its checksum: prepare the cache again")
    with progress.stage("consistency", manifest["events"]):
        cache = EventCache.open(folder).validate()
        for space, ids in cache.ids.items():
            if ids.prefix(ids.rows) != ids.fingerprint:
                raise UserError(
                    f"{folder}: the raw ids of {space} do not fit their fingerprint: prepare the cache again"
                )
    return manifest


def describe(path: str | pathlib.Path) -> str:
    """A few lines about a prepared cache: counts, vocabularies, counters, bytes."""
    folder = user_path(path)
    manifest = read_manifest(folder)
    size = sum(entry["bytes"] for entry in manifest["columns"].values())
    first, last = manifest["event_time"]
    lines = [
        f"{folder}: {manifest['source']}, cache version {manifest['schema_version']}",
        f"  {manifest['events']:,} events of {manifest['users']:,} users over {(last - first) / 86_400:.1f} days "
        f"(times {first} … {last})",
        f"  {manifest['anchors']:,} samples with at least {manifest['min_history']} earlier events",
        f"  {size / 1e9:.3f} GB on disk, {size / manifest['events']:.1f} bytes per event",
        "  ids: " + ", ".join(f"{name} {rows:,}" for name, rows in sorted(manifest["vocab"].items())),
        *_numbering_lines(manifest),
        "  counted: " + ", ".join(f"{name} {count:,}" for name, count in sorted(manifest["counters"].items())),
    ]
    return "\n".join(lines)


def _numbering_lines(manifest: dict) -> list[str]:
    """What an extension added, and what crosses are sized by."""
    lines = []
    if "generations" in manifest:
        first = {"uid": 0, "item_id": 1}
        counts = sorted(manifest["generations"].items(), key=lambda entry: (first.get(entry[0], 2), entry[0]))
        found = ", ".join(f"{each[-2]:,} {space} and {each[-1] - each[-2]:,} new" for space, each in counts)
        lines.append(f"  extends an earlier cache: {found}")
    if "cross_users" in manifest:
        lines.append(f"  crosses are sized for {manifest['cross_users']:,} users")
    return lines
