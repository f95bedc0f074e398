"""One place that every figure of a run goes through: terminal, metrics.jsonl, TensorBoard. Silent but on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator

from generative_recommenders.train.console import Terminal, clock
from generative_recommenders.train.distributed import World
from generative_recommenders.train.metrics import BinaryResult, RegressionResult
from generative_recommenders.train.progress import Progress
from generative_recommenders.train.run_folder import RunFolder

# Shares on the progress line, by their names in the metrics.
SHARES = {"fill": "fill", "exec": "exec", "mfu": "MFU", "hfu": "HFU"}


class Stopwatch:
    """Seconds inside ``running``, less those inside ``paused``; ``seconds`` were counted before."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._since: float | None = None  # when it was set going; None while it stands

    @property
    def seconds(self) -> float:
        """Time counted so far."""
        return self._before if self._since is None else self._before + time.monotonic() - self._since

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Time inside counts."""
        return self._switched(True)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Time inside does not count."""
        return self._switched(False)

    @contextlib.contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        was_on = self._since is not None
        self._set(on)
        try:
            yield
        finally:
            self._set(was_on)

    def _set(self, on: bool) -> None:
        self._before, self._since = self.seconds, time.monotonic() if on else None


class Reporter:
    """Takes the loop's figures; ``terminal`` and ``folder`` are ``None`` on ranks that do not write.

    ``total_samples``: how many will have been trained at the end of the run, for the time left. ``watch`` counts the
    training alone, ``seconds_in_all`` everything; both go on over a resume.
    """

    def __init__(self, world: World, folder: RunFolder | None, terminal: Terminal | None, started: float) -> None:
        self._world, self._folder, self._terminal = world, folder, terminal
        self.total_samples = 0
        self.watch = Stopwatch()
        self._started = started  # of this process, by the monotonic clock
        self._in_all_before = 0.0
        self.evaluation_seconds = 0.0  # of the last evaluation
        self._last = (0.0, 0)  # training seconds and samples at the last line of metrics

    def start(self, progress: Progress) -> None:
        """Training goes on where an earlier process left it."""
        self.watch = Stopwatch(progress.seconds)
        self._in_all_before = progress.seconds_in_all
        self._last = (progress.seconds, progress.samples)

    @property
    def seconds_in_all(self) -> float:
        """Wall time of this process, and of those before it up to the checkpoint that it went on from."""
        return self._in_all_before + time.monotonic() - self._started

    def lap(self) -> float:
        """Training seconds since the last line of metrics."""
        return max(self.watch.seconds - self._last[0], 1e-9)

    def training(
        self, progress: Progress, figures: dict[str, float], tokens: float, seconds: float, evaluations_left: int
    ) -> None:
        """A line of training metrics over the ``seconds`` since the last one, in which ``tokens`` rows passed."""
        rate = (progress.samples - self._last[1]) / seconds
        self._last = (self._last[0] + seconds, progress.samples)
        figures = {
            **figures,
            "samples_per_second": rate,
            "tokens_per_second": tokens / seconds,
            "seconds": self._last[0],
        }
        if self._folder is not None:
            self._folder.add("train", progress.step, progress.samples, figures)
        if self._terminal is not None:
            self._terminal.progress(progress.samples, self._line(progress, figures, evaluations_left))

    def _line(self, progress: Progress, f: dict[str, float], evaluations_left: int) -> str:
        left = (self.total_samples - progress.samples) / max(f["samples_per_second"], 1e-9)
        left += evaluations_left * self.evaluation_seconds
        shares = "  ".join(f"{label} {100 * f[name]:.0f} %" for name, label in SHARES.items() if name in f)
        return (
            f"step {progress.step:,}  loss {f['loss']:.4f}  {f['samples_per_second']:,.0f} samples/s  "
            f"{f['tokens_per_second']:,.0f} tokens/s  {shares}  {clock(left)} left"
        )

    def scored(self, samples: int, total: int) -> None:
        """This rank has scored so many of an evaluation's ``total`` samples."""
        if self._terminal is not None:
            self._terminal.evaluating(min(1.0, samples * self._world.size / max(total, 1)))

    def evaluation(
        self, progress: Progress, results: dict[str, BinaryResult | RegressionResult], logged: bool = False
    ) -> None:
        """Figures of an evaluation (``logged``: the metrics have it already), a warning where it has one class only."""
        if self._terminal is None or self._folder is None:
            return
        figures: dict[str, object] = {}
        for task, result in results.items():
            figures.update({f"{task}/{name}": value for name, value in dataclasses.asdict(result).items()})
            if isinstance(result, RegressionResult):
                self._terminal.print(
                    f"evaluation at {progress.samples:,} samples: {task} RMSE {result.rmse:.4f}  MAE {result.mae:.4f}  "
                    f"(the mean alone: RMSE {result.label_std:.4f}; {result.samples:,} samples)"
                )
                continue
            self._terminal.print(
                f"evaluation at {progress.samples:,} samples: {task} AUC {result.auc:.4f}  GAUC {result.gauc:.4f}  "
                f"NE {result.ne:.4f}  accuracy {result.accuracy:.4f}  calibration {result.calibration:.3f}  "
                f"({result.samples:,} samples)"
            )
            if result.one_class:
                self._terminal.print(
                    f"warning: {task} has one class only among {result.samples:,} hold-out samples: AUC is "
                    f"{result.auc} by definition and reaches no target"
                )
        if not logged:
            self._folder.add("eval", progress.step, progress.samples, figures)

    def saved(self, path: pathlib.Path) -> None:
        """A checkpoint was written."""
        self.say(f"checkpoint {path}")

    def say(self, text: str) -> None:
        """A line on the terminal."""
        if self._terminal is not None:
            self._terminal.print(text)
