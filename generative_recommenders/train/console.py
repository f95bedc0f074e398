"""What the person at the terminal sees: the configuration, a progress line, evaluations, the final table."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

PLAIN_SECONDS = 10.0  # without a terminal, one progress line in so many seconds


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(max(seconds, 0))))


class _Console(Console):
    """Goes on in silence when whoever read the output is gone; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer has to go somewhere


class Terminal:
    """A progress bar on a terminal; plain lines, not too many, anywhere else."""

    def __init__(self) -> None:
        self.console = _Console(highlight=False, soft_wrap=True)
        self._total = 0
        self._next_plain = 0.0
        self._bar: Progress | None = None

    def start(self, total_samples: int) -> None:
        """Show the progress bar; ``total_samples`` are the whole of it, 0 for no training."""
        self._total = total_samples
        if self.console.is_terminal and self._total:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"), console=self.console
            )
            self._task = self._bar.add_task("training", total=self._total, line="")
            self._bar.start()

    def print(self, text: str) -> None:
        """A line above the progress bar."""
        self.console.print(text, markup=False)

    def progress(self, samples: int, line: str) -> None:
        """Show where training stands."""
        if self._bar is not None:
            self._bar.update(self._task, completed=samples, description="training", line=line)
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_SECONDS
            share = f"{100 * samples / self._total:3.0f} %  " if self._total else ""
            self.print(share + line)

    def evaluating(self, share: float) -> None:
        """Show how far an evaluation is."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"evaluating {100 * share:.0f} %")

    def close(self) -> None:
        """Leave the progress bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def configuration(self, values: Mapping[str, object], sources: Mapping[str, str]) -> None:
        """Every option, a paragraph a section; a star marks values that are not the code's defaults."""
        grouped: dict[str, list[str]] = {}
        for name, value in values.items():
            section, option = name.split(".", 1)
            star = "*" if name in sources else ""
            shown = value if isinstance(value, str) and value else repr(value)
            grouped.setdefault(section, []).append(f"{option}{star}={shown}")
        self.print("Configuration (* set by file, environment or --bind):")
        for section, options in grouped.items():
            self._wrapped(f"  {section}: ", options)

    def _wrapped(self, head: str, words: list[str], width: int = 110) -> None:
        line = head
        for word in words:
            if len(line) + len(word) > width:
                self.print(line.rstrip())
                line = "    "
            line += word + "  "
        self.print(line.rstrip())

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The closing table: a name and a figure a row."""
        table = Table(title=title, show_header=False, title_justify="left", min_width=48)
        table.add_column()
        table.add_column(justify="right")
        for name, figure in rows:
            table.add_row(name, figure)
        self.console.print(table)
