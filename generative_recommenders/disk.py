"""Files written whole or not at all, and a disk that is full, or a quota used up, whatever a library calls it."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil

# How libraries say it that do not pass on the system's error number. A checkpoint's writer in C++ knows only that fewer
# bytes arrived than it wrote ("unexpected pos 704 vs 598"): a disk, a quota or a limit on file sizes is behind that.
SIGNS = (
    "No space left",
    "Disk quota",
    "max_temp_directory_size",
    "File too large",
    "unexpected pos ",
    "PytorchStreamWriter failed writing",
)
NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """A file could not be written whole; the message is one line for the person at the terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOSPC

    def __str__(self) -> str:
        return self.args[0]


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Write a text file: whatever happens in between, a kill included, it is the old one or the new one, whole."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a name must not come onto the disk before what it names
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # cut off by a full disk, it is of no use
        raise


def is_full(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, comes from a disk without room."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in NUMBERS or any(sign in str(error) for sign in SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def where(folder: pathlib.Path | None, needed: int | None = None) -> str:
    """`` of FOLDER (0.002 GB left, 0.101 GB needed)``, or nothing for an unknown folder; see ``room``."""
    return "" if folder is None else f" of {folder}{room(folder, needed)}"


def room(folder: pathlib.Path, needed: int | None = None) -> str:
    """`` (0.002 GB left, 0.101 GB needed)``: what is free under ``folder``; ``needed``: bytes of what was written."""
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), None)
    if there is None:
        return ""
    free = shutil.disk_usage(there).free
    figures = f"{free / 1e9:.3f} GB left" + (f", {needed / 1e9:.3f} GB needed" if needed else "")
    if free > (needed or 2**30):
        figures += ": a quota or a limit on file sizes, as of ulimit -f, may be what is reached"
    return f" ({figures})"
