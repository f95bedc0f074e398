"""How a run ended, as a small object that is made once: exit status, result and what is left behind follow from it."""

from __future__ import annotations

import dataclasses
import enum

OK, FAILED, USER_ERROR = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Finished:
    """The run came to its own end. ``reason``: in what it falls short of what was asked, ``None`` if in nothing."""

    reason: str | None

    @property
    def exit_status(self) -> int:
        """Of the process."""
        return OK if self.reason is None else FAILED


@dataclasses.dataclass(frozen=True)
class NothingToDo:
    """An earlier process has done all that is asked; ``line`` says so."""

    line: str
    exit_status: int = OK
    reason: None = None


@dataclasses.dataclass(frozen=True)
class Broken:
    """Something stopped the run: wrong input, a signal, a failure. The other ranks may be waiting for this one.

    Attributes:
        kept_traceback: whether the run folder has the traceback, and so must stay.
        disk_is_full: whether that is what has been said already.
    """

    reason: str
    exit_status: int
    kept_traceback: bool = False
    disk_is_full: bool = False


@dataclasses.dataclass(frozen=True)
class NotWritten:
    """The run ended as ``outcome`` says, but its files could not be written."""

    outcome: Finished | NothingToDo | Broken

    @property
    def exit_status(self) -> int:
        """Of the process."""
        return self.outcome.exit_status or FAILED


Outcome = Finished | NothingToDo | Broken | NotWritten


class Leaving(enum.Enum):
    """What stays of a run on the disk."""

    NOTE = "it has no folder: a result under its name, if it was given one and nothing is there"
    UNTOUCHED = "it did nothing: what an earlier process left"
    NOTHING = "it never began and nobody asked for its name: the folder goes"
    RESULT = "it never began: why not"
    WHOLE = "result, table and report"


def what_stays(outcome: Outcome, *, placed: bool, resuming: bool, begun: bool, named: bool) -> Leaving:
    """Decide it.

    Args:
        placed: whether the run has a folder. resuming: whether an earlier process worked in it.
        begun: whether everything was set up. named: whether somebody gave the run its name.
    """
    if not placed:
        return Leaving.NOTE
    if isinstance(outcome, NothingToDo) or (resuming and not begun):
        return Leaving.UNTOUCHED
    if begun:
        return Leaving.WHOLE
    kept_traceback = isinstance(outcome, Broken) and outcome.kept_traceback
    return Leaving.RESULT if named or kept_traceback else Leaving.NOTHING
