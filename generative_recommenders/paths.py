"""Paths as people write them, on a command line or in a configuration."""

from __future__ import annotations

import os
import pathlib

from generative_recommenders.errors import UserError


def user_path(text: str | os.PathLike) -> pathlib.Path:
    """The path with ``~`` and ``~name`` in front replaced by a home folder; ``UserError`` if there is none.

    Shells do that for a word of its own, but not behind ``=`` or inside quotes, and configurations have no shell.
    """
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: there is no such home folder; write the path without '~'") from None
