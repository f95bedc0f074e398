"""What every command shares: output that any terminal can show, errors in one line, exit codes.

A leaf (standard library only), so that a command that prints its help need not load anything else.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Callable

from generative_recommenders import disk
from generative_recommenders.errors import UserError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# What stands for a character that the terminal's encoding does not have; others are shown as \xNN or \uNNNN.
_PLAIN = str.maketrans(
    {"·": "-", "…": "...", "→": "->", "×": "x", "–": "-", "—": "-", "−": "-", "⊙": "*", "≤": "<=", "≥": ">=", "µ": "u"}
)


def _plain_text(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("plain_text", _plain_text)


def speak_any_encoding() -> None:
    """Let stdout and stderr write what their encoding lacks in plain characters, instead of raising.

    That is any character beyond ASCII where the terminal is not UTF-8 (``PYTHONIOENCODING=ascii``), and in every
    encoding the bytes of a file name that are no text.
    """
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue  # something that takes text and is no file, as a test's
        if stream.errors in ("strict", "backslashreplace") or (
            stream.errors == "surrogateescape" and not _is_unicode(stream.encoding)
        ):
            stream.reconfigure(errors="plain_text")


def _is_unicode(encoding: str) -> bool:
    return codecs.lookup(encoding).name.startswith("utf")


def show(text: str) -> int:
    """Print ``text`` and return status 0; a reader that has seen enough (``| head``) or is gone is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
    return DONE


def complain(text: str) -> None:
    """A line on stderr, if there still is one."""
    if sys.stderr is None:  # closed; print would take stdout in its place
        return
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def guarded(main: Callable[[], int | None]) -> int:
    """Run a command and return its exit status: bad input is one line on stderr and 2, an interruption 130."""
    speak_any_encoding()
    try:
        return main() or DONE
    except (UserError, OSError) as error:
        text = " ".join(str(error).split())
        full = disk.is_full(error) and not isinstance(error, (UserError, disk.DiskFull))
        complain(f"error: no space left on the disk ({text}); free some and run again" if full else f"error: {text}")
        return BAD_INPUT
    except KeyboardInterrupt:
        complain("stopped: run the same command again to go on")
        return INTERRUPTED
