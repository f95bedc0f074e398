"""Replacing a complete cache: the new one is made beside it, and takes its place in one step when it is complete.

Until then the old cache stays as it is, whatever happens: bad input, a full disk, a kill. The new one grows in the
hidden folder ``.<name>.new`` beside the old one, where the same command goes on after a kill.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from generative_recommenders.data.cache import MANIFEST, MARKER
from generative_recommenders.data.prepare.job import PREPARATION, WORK, made_files
from generative_recommenders.errors import UserError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replacement(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder to make the new cache in; it takes the place of ``folder`` where the block ends without an error.

    Files in ``folder`` that preparation does not know stay there. ``UserError`` if another process is at it.
    """
    folder = folder.resolve()
    new, aside = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder} is being prepared by another process: wait for it or stop it") from None
        # What an earlier replacement, killed at its end, did not get rid of.
        if new.exists() and ((new / MARKER).exists() or not (new / WORK).exists()):
            _retire(new, folder)
        if aside.exists():
            _retire(aside, folder)
        yield new
        _swap(new, folder, aside)
        _retire(new, folder)
    finally:
        os.close(handle)


def recover(folder: pathlib.Path) -> None:
    """Put a cache back that a kill between two renames left aside."""
    folder = folder.resolve()
    aside = folder.with_name(f".{folder.name}.old")
    if aside.is_dir() and not folder.exists():
        os.rename(aside, folder)


def _swap(new: pathlib.Path, folder: pathlib.Path, aside: pathlib.Path) -> None:
    if _exchange(new, folder):
        return
    os.rename(folder, aside)
    os.rename(new, folder)
    os.rename(aside, new)


def _exchange(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Exchange two folders in one step; ``False`` where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _retire(old: pathlib.Path, folder: pathlib.Path) -> None:
    """Remove a cache that is in use no more, the marker first; files that are not its own move into ``folder``."""
    for name in (MARKER, MANIFEST, PREPARATION):
        (old / name).unlink(missing_ok=True)
    shutil.rmtree(old / WORK, ignore_errors=True)
    for file in made_files(old):
        file.unlink()
    for stranger in old.iterdir():
        if not (folder / stranger.name).exists():
            os.rename(stranger, folder / stranger.name)
    with suppress(OSError):  # not empty: it holds another version of a stranger
        old.rmdir()
