"""Stopping on SIGTERM and SIGINT.

Outside the loop a signal stops the run where it is. Inside (``deferred``) it is noted and acted upon between two
steps, by all ranks together, so that a checkpoint can still be written. Python runs handlers between two instructions
of the main thread only, and that one may be waiting for a rank that will not answer: a ``Watchdog`` bounds either.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from generative_recommenders import settings
from generative_recommenders.train.distributed import World

ECHO_SECONDS = 3.0
#: From a second signal to the end of the process, whatever it is doing.
LAST_SECONDS = 10.0
#: Of these, what is kept for writing the result.
WORDS_SECONDS = 3.0


class Stopped(Exception):
    """The run was asked to stop; the message says by what.

    ``together``: all ranks raised it at the same place, so they can still do something together.
    """

    def __init__(self, reason: str, together: bool) -> None:
        super().__init__(reason)
        self.together = together


class Watchdog:
    """A thread that sees signals as they arrive and ends the process where the main thread does not in time.

    After a first signal the main thread has ``HSTU_STOP_SECONDS`` (anew after ``relent`` and ``patient``), after a
    second one ``LAST_SECONDS``.

    Args:
        last_words: called with the reason, in a thread of its own that gets ``WORDS_SECONDS``, before the process ends.
    """

    _END, _LOOK = 0, 255  # bytes in the pipe that are no signals

    def __init__(self, last_words: Callable[[str], None]) -> None:
        self._last_words = last_words
        self._patience = float(settings.get("HSTU_STOP_SECONDS"))
        self._first_at: float | None = None
        self._deadline: float | None = None  # of the first signal
        self._final: float | None = None  # of the second
        self._patient = False
        self._reason = ""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def relent(self) -> None:
        """The main thread has taken note of the first signal: its time starts anew, for what is left to do."""
        if self._first_at is not None:
            self._deadline = time.monotonic() + self._patience
            os.write(self._write, bytes([self._LOOK]))

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, a first signal waits for as long as it takes."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
            self.relent()

    def close(self) -> None:
        """Watch no longer."""
        signal.set_wakeup_fd(self._before)
        os.write(self._write, bytes([self._END]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    @property
    def _due(self) -> float | None:
        return self._final or (None if self._patient else self._deadline)

    def _watch(self) -> None:
        while True:
            due, now = self._due, time.monotonic()
            if due is not None and now >= due:
                return self._end()
            if not select.select([self._read], [], [], None if due is None else due - now)[0]:
                continue
            for number in os.read(self._read, 64):
                if number == self._END:
                    return
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._note(signal.Signals(number).name)

    def _note(self, name: str) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at, self._deadline = now, now + self._patience
            self._reason = f"stopped by {name}, and not at an end within {self._patience:g} s (HSTU_STOP_SECONDS)"
        elif now - self._first_at >= ECHO_SECONDS and self._final is None:
            self._final = now + LAST_SECONDS - WORDS_SECONDS
            self._reason = f"stopped by a second signal, {name}, and not at an end within {LAST_SECONDS:g} s"

    def _end(self) -> None:
        reason = f"{self._reason}: a rank may be frozen or gone"
        words = threading.Thread(target=self._last_words, args=(reason,), daemon=True)
        words.start()
        words.join(WORDS_SECONDS)
        os._exit(1)


class StopSignals:
    """Context manager that takes over the two signals; a second one while the first is pending acts at once.

    Launchers hand a signal on that the terminal or the scheduler has sent to every process already, so one that follows
    within ``ECHO_SECONDS`` counts as the same. With ``last_words`` a ``Watchdog`` sees to it that the process ends.
    """

    def __init__(self, last_words: Callable[[str], None] | None = None) -> None:
        self._pending = ""
        self._deferring = self._ignoring = False
        self._first_at = -ECHO_SECONDS
        self._before: dict[int, Any] = {}
        self._last_words = last_words
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        if self._last_words is not None:
            self._watchdog = Watchdog(self._last_words)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._watchdog is not None:
            self._watchdog.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._ignoring or time.monotonic() - self._first_at < ECHO_SECONDS:
            return
        self._first_at = time.monotonic()
        if not self._deferring or self._pending:
            raise Stopped(f"stopped by {name}", together=False)
        self._pending = name

    def ignore(self) -> None:
        """From here on signals raise nothing: the run is ending anyway."""
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

    def patient(self) -> contextlib.AbstractContextManager[None]:
        """A first signal inside does not end the process, however long it takes: a checkpoint is being written."""
        return contextlib.nullcontext() if self._watchdog is None else self._watchdog.patient()

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
            if self._watchdog is not None:
                self._watchdog.relent()
            raise Stopped(f"stopped by {self._pending or 'a signal on another rank'}", together=True)
        return sums
