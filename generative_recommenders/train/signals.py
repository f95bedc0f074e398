"""Stopping on SIGTERM and SIGINT.

Outside the loop a signal stops the run where it is. Inside (``deferred``) it is noted and acted upon between two
steps, by all ranks together, so that a checkpoint can still be written.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from generative_recommenders.train.distributed import World

ECHO_SECONDS = 3.0


class Stopped(Exception):
    """The run was asked to stop; the message says by what.

    ``together``: all ranks raised it at the same place, so they can still do something together.
    """

    def __init__(self, reason: str, together: bool) -> None:
        super().__init__(reason)
        self.together = together


class StopSignals:
    """Context manager that takes over the two signals; a second one while the first is pending acts at once.

    Launchers hand a signal on that the terminal or the scheduler has sent to every process already, so one that follows
    within ``ECHO_SECONDS`` counts as the same.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._deferring = self._ignoring = False
        self._first_at = -ECHO_SECONDS
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._ignoring or time.monotonic() - self._first_at < ECHO_SECONDS:
            return
        self._first_at = time.monotonic()
        if not self._deferring or self._pending:
            raise Stopped(f"stopped by {name}", together=False)
        self._pending = name

    def ignore(self) -> None:
        """From here on signals do nothing: the run is ending anyway."""
        self._ignoring = True

    @contextlib.contextmanager
    def deadly(self) -> Iterator[None]:
        """Signals inside end the process: for waits in which Python gets no chance to run a handler."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._note)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals inside wait for the next ``check``."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def check(self, world: World, *values: int) -> list[int]:
        """Sum ``values`` over the ranks; in the same exchange, raise ``Stopped`` on all if any rank was signalled."""
        *sums, stops = world.sum_on_host(*values, int(bool(self._pending)))
        if stops:
            raise Stopped(f"stopped by {self._pending or 'a signal on another rank'}", together=True)
        return sums
