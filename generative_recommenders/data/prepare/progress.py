"""One line of progress: stage, share done, rate, time left."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO


class Progress:
    """Prints while a stage runs: every half second on a terminal, every 15 s elsewhere; ``stream=None`` is silent.

    Engine calls block, so a thread of its own prints; while a query sorts and no row has come out, the engine's own
    estimate of its progress stands for rows done.
    """

    def __init__(self, stream: TextIO | None = sys.stderr) -> None:
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        self._done = self._total = self._start_done = 0
        self._title = ""
        self._began = self._last_line = 0.0
        self._query: tuple[Callable[[], float], int, int] | None = None

    @contextlib.contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Progress]:
        """Report ``title`` from ``done`` to ``total`` events until the block ends; then one closing line."""
        self._title, self._total, self._done, self._start_done = title, total, done, done
        self._query = None
        self._began = self._last_line = time.monotonic()
        stop = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(stop,), daemon=True)
        if self._stream is not None:
            ticker.start()
        try:
            yield self
        except BaseException:
            self._stop(ticker, stop)
            if self._terminal:
                self._print("", end="\n")
            raise
        self._stop(ticker, stop)
        self._done = self._total
        self._print(self.line(), end="\n")

    def advance(self, events: int) -> None:
        """Another ``events`` events are done."""
        self._done += events

    def follow(self, percent: Callable[[], float], events: int) -> None:
        """A query over the next ``events`` events begins; ``percent`` is the engine's estimate, negative if unknown."""
        self._query = (percent, self._done, events)

    def say(self, text: str) -> None:
        """A line of its own."""
        self._print(text, end="\n")

    def line(self) -> str:
        """The current line."""
        spent = time.monotonic() - self._began
        reached = self._reached()
        done = reached - self._start_done
        share = reached / self._total if self._total else 1.0
        text = f"{self._title}: {100 * share:3.0f} % of {self._total:,} events · {_clock(spent)} spent"
        if not done:
            return text
        text += f" · {done / max(spent, 1e-9) / 1e6:.2f} M events/s"
        left = self._total - reached
        return text + (f" · {_clock(spent * left / done)} left" if left else "")

    def _reached(self) -> int:
        if self._query is None or self._done >= self._total:
            return self._done
        percent, start, events = self._query
        return max(self._done, start + int(max(percent(), 0.0) / 100 * events))

    def _tick(self, stop: threading.Event) -> None:
        while not stop.wait(0.5):
            if self._terminal or time.monotonic() - self._last_line >= 15:
                self._last_line = time.monotonic()
                self._print(self.line(), end="" if self._terminal else "\n")

    def _stop(self, ticker: threading.Thread, stop: threading.Event) -> None:
        stop.set()
        if ticker.is_alive():
            ticker.join()

    def _print(self, text: str, end: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(f"\r\x1b[K{text}{end}" if self._terminal else text + end)
            self._stream.flush()
        except (OSError, ValueError):  # whoever read it is gone: the work goes on in silence
            self._stream = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
