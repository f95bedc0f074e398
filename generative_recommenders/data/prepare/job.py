"""One preparation: its folder, its lock, and the state that lets a later run go on where this one stopped.

The cache's columns lie in the target folder, everything temporary in its folder ``.preparing``, whose ``state.json``
says how far each stage is. It is replaced atomically after the data it speaks of has reached the disk; whatever a
killed run wrote beyond the state is cut off or overwritten. Only the marker makes the folder a cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from generative_recommenders.data.cache import EXTENDED_VERSION, MANIFEST, MARKER, SCHEMA_VERSION
from generative_recommenders.data.prepare.columns import sha256
from generative_recommenders.data.prepare.source import Source
from generative_recommenders.disk import write_atomically
from generative_recommenders.errors import UserError

WORK = ".preparing"
STATE = "state.json"
PREPARATION = "preparation.json"


def fingerprint(source: Source, min_history: int, base: str | None = None, cross_users: int | None = None) -> str:
    """Digest of everything that shapes the cache: files (path, size, time of change), columns and settings.

    ``base``: digest of the numbering that is extended.
    """
    files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in source.all_files]
    more = () if base is None and cross_users is None else (EXTENDED_VERSION, base, cross_users)
    return hashlib.sha256(repr((SCHEMA_VERSION, min_history, files, source, *more)).encode()).hexdigest()


def made_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Columns and vocabularies in a cache's folder, finished or not."""
    return [*folder.glob("*.npy"), *folder.glob("vocabulary_*.parquet")]


class Job:
    """State of one preparation in ``folder``; ``state`` is a dictionary that ``save`` stores."""

    def __init__(self, folder: pathlib.Path, digest: str) -> None:
        self.folder, self.work = folder, folder / WORK
        self._digest = digest
        self.state: dict = {"fingerprint": digest}

    @property
    def temp(self) -> pathlib.Path:
        """Where the engine spills."""
        return self.work / "spill"

    def column(self, name: str) -> pathlib.Path:
        """File of a column of the cache."""
        return self.folder / f"{name}.npy"

    def save(self, **entries: object) -> None:
        """Add entries to the state and store it."""
        self.state.update(entries)
        write_atomically(self.work / STATE, json.dumps(self.state))

    @contextmanager
    def opened(self) -> Iterator[bool]:
        """Lock the folder and load the state of an earlier run; yields whether the cache is already complete."""
        self._refuse_foreign()
        if (self.folder / MARKER).exists():
            self._require_same_cache()
            yield True
            return
        self.work.mkdir(parents=True, exist_ok=True)
        with open(self.work / "lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{self.folder} is being prepared by another process: wait for it or stop it") from None
            if (self.folder / MARKER).exists():  # another process has finished it meanwhile
                self._require_same_cache()
                yield True
                return
            self._load_state()
            shutil.rmtree(self.temp, ignore_errors=True)
            self.temp.mkdir()
            yield False

    def complete(self, manifest: dict, preparation: dict) -> None:
        """Write the manifest, then the marker, then drop the work folder."""
        preparation = preparation | {"fingerprint": self._digest}
        write_atomically(self.folder / PREPARATION, json.dumps(preparation, indent=1) + "\n")
        write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        self._sync_folder()
        write_atomically(self.folder / MARKER, sha256(self.folder / MANIFEST) + "\n")
        self._sync_folder()
        shutil.rmtree(self.work, ignore_errors=True)

    def _refuse_foreign(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"cache path {self.folder} is a file: name a folder")
        # A manifest without its marker: somebody removed the marker to have the cache prepared again.
        known = any((self.folder / name).exists() for name in (WORK, MARKER))
        known = known or all((self.folder / name).exists() for name in (MANIFEST, PREPARATION))
        if self.folder.is_dir() and any(self.folder.iterdir()) and not known:
            raise UserError(f"cache path {self.folder} holds other files: name an empty or a new folder")

    def _require_same_cache(self) -> None:
        if self._earlier_digest() != self._digest:
            raise UserError(
                f"{self.folder} already holds a cache of other input or settings: name another path or pass --overwrite"
            )
        shutil.rmtree(self.work, ignore_errors=True)

    def _earlier_digest(self) -> str | None:
        try:
            return json.loads((self.folder / PREPARATION).read_text(encoding="utf-8"))["fingerprint"]
        except (OSError, ValueError, KeyError):
            return None

    def _load_state(self) -> None:
        try:
            earlier = json.loads((self.work / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            earlier = {}
        if earlier.get("fingerprint") == self._digest:
            self.state = earlier
            return
        for file in [*made_files(self.folder), *self.work.glob("*.parquet")]:
            file.unlink()
        self.save()

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
