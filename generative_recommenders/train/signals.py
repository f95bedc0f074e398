"""Stopping on SIGTERM and SIGINT.

Outside the loop a signal stops the run where it is. Inside (``deferred``) it is noted and acted upon between two
steps, by all ranks together, so that a checkpoint can still be written.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from generative_recommenders.train.distributed import World


class Stopped(Exception):
    """The run was asked to stop; the message says by what.

    ``together``: all ranks raised it at the same place, so they can still do something together.
    """

    def __init__(self, reason: str, together: bool) -> None:
        super().__init__(reason)
        self.together = together


class StopSignals:
    """Context manager that takes over the two signals; a second one while the first is pending acts at once."""

    def __init__(self) -> None:
        self._pending = ""
        self._deferring = False
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
        if not self._deferring or self._pending:
            raise Stopped(f"stopped by {name}", together=False)
        self._pending = name

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
