"""What stopped a run, in words, and whose it is to mend."""

from __future__ import annotations

import pathlib

from generative_recommenders import disk
from generative_recommenders.errors import UserError
from generative_recommenders.ops.dispatch import BackendUnavailable
from generative_recommenders.train.checkpoint import WAY_ON
from generative_recommenders.train.checkpoint_fit import first_cause
from generative_recommenders.train.evaluation import TrainingDiverged
from generative_recommenders.train.signals import Stopped

#: Raised by all ranks at the same place: one of them says it.
ON_ALL_RANKS = (UserError, BackendUnavailable, Stopped, TrainingDiverged)


def one_line(exc: BaseException, folder: pathlib.Path | None = None) -> str:
    """The message of an exception in one line; its type where it is not one of ours. ``folder``: the run's."""
    exc = first_cause(exc)
    text = " ".join(str(exc).split()) or type(exc).__name__
    if isinstance(exc, (*ON_ALL_RANKS, disk.DiskFull)):
        return text
    if disk.is_full(exc):
        return f"no space left on the disk{disk.where(folder)}; {WAY_ON}"
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}; check the path, its permissions and the space on its disk"
    return shorten(f"{type(exc).__name__}: {text}")


def shorten(text: str, longest: int = 400) -> str:
    """The beginning of a text that some libraries make very long."""
    return text if len(text) <= longest else f"{text[:longest]} …"


def is_input_error(exc: BaseException, begun: bool) -> bool:
    """Whether the person who started the run can mend it: wrong input, or before training a file that fails."""
    about_a_file = isinstance(exc, OSError) and exc.filename is not None
    return isinstance(exc, (UserError, BackendUnavailable)) or (about_a_file and not begun)
