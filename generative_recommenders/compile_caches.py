"""Where compilers keep what they compiled, and what happens where they may write nothing: once slower, and one line.

A package that another user owns, a user without a home, a full quota: none of them is a reason not to work.
"""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import shutil
import tempfile

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.terminal import complain


@functools.cache
def say_compiled_anew(what: str, variable: str, reason: str) -> None:
    """One line, once per process and on rank 0 alone, that ``what`` is compiled in every process."""
    try:
        rank = settings.get("RANK") or 0
    except UserError:  # said elsewhere
        rank = 0
    if rank == 0:
        complain(
            f"warning: {what} cannot be kept for the next process ({reason}): name a writable folder in {variable}"
        )


def give_triton_a_cache() -> None:
    """Before Triton compiles: where it could keep nothing, point it to a folder that lives as long as this process."""
    if any(settings.outside(name) for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")):
        return
    folder = pathlib.Path(os.path.expanduser("~"), ".triton", "cache")
    reason = why_not_writable(folder)
    if reason is None:
        return
    own = tempfile.mkdtemp(prefix="triton-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    settings.set_outside("TRITON_CACHE_DIR", own)
    say_compiled_anew("compiled Triton kernels", "TRITON_CACHE_DIR", reason)


def why_not_writable(folder: pathlib.Path) -> str | None:
    """Why no file can be made in ``folder``, which is made if it is missing; ``None``: one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None
