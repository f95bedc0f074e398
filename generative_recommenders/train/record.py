"""The record of a run: what it has come to so far, and what is written of it whenever and however it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
import traceback
import weakref

from generative_recommenders import disk, settings
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.disk import write_atomically
from generative_recommenders.errors import UserError
from generative_recommenders.terminal import complain
from generative_recommenders.train import report
from generative_recommenders.train.arguments import Arguments
from generative_recommenders.train.checkpoint_meta import newest
from generative_recommenders.train.console import Terminal
from generative_recommenders.train.distributed import World, launched_rank
from generative_recommenders.train.failures import ON_ALL_RANKS, is_input_error, one_line
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.loop import Trainer
from generative_recommenders.train.meeting import NotMet
from generative_recommenders.train.metrics import RegressionResult
from generative_recommenders.train.mlperf import MlperfLog
from generative_recommenders.train.outcome import (
    FAILED,
    USER_ERROR,
    Broken,
    Finished,
    Leaving,
    NothingToDo,
    NotWritten,
    what_stays,
)
from generative_recommenders.train.place import Place, claim
from generative_recommenders.train.reporting import Reporter
from generative_recommenders.train.run_folder import Result, RunFolder
from generative_recommenders.train.verdict import closing_figures


@dataclasses.dataclass(frozen=True)
class SetUp:
    """What the record reads of a trainer, which it must not keep alive: a communicator hangs on it."""

    trainer: weakref.ref[Trainer]
    reporter: Reporter
    mlperf: MlperfLog


@dataclasses.dataclass(frozen=True)
class Begun:
    """Everything was set up; only the main rank has a terminal."""

    terminal: Terminal | None
    config_text: str


class RunRecord:
    """``take`` → ``open`` → ``set_up`` → ``begin`` → ``take_figures`` → ``close``; a run may ``fail`` between any two.

    Attributes:
        result: the content of ``result.json``.
        world: the ranks of the run, once they have met.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.result = Result(config={"files": list(arguments.config), "bind": list(arguments.bind)})
        self.world: World | None = None
        self._arguments = arguments
        self._started = time.monotonic()
        self._place: Place | None = None
        self._set_up: SetUp | None = None
        self._begun: Begun | None = None
        self._figures: list[tuple[str, str]] = []
        self._closed = False  # whether the result is written

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes."""
        rank = launched_rank()
        return rank == 0 or rank >= (settings.get("WORLD_SIZE") or rank + 1)  # the latter is no rank: let it speak

    @property
    def started(self) -> float:
        """When the process began, by the monotonic clock."""
        return self._started

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, with what a resumed one took before."""
        in_all = time.monotonic() - self._started if self._set_up is None else self._set_up.reporter.seconds_in_all
        return round(in_all, 3)

    def take(self, place: Place) -> None:
        """The run has a folder, where it is failed until it says otherwise."""
        self._place = place
        if self.is_main and not place.resuming and place.finished is None:
            place.folder.write_result(self.result)

    def open(self, dataset: RankingDataset) -> None:
        """The data is known."""
        self.result.best_auc, self.result.baseline_auc = dataset.best_auc, dataset.baseline_auc

    def set_up(self, trainer: Trainer) -> None:
        """There is a trainer."""
        self._set_up = SetUp(weakref.ref(trainer), trainer.reporter, trainer.mlperf)
        self.result.peak = trainer.meter.peak

    def begin(self, config: RunConfig, terminal: Terminal | None) -> None:
        """Nothing stands between the run and its first step."""
        self._begun = Begun(terminal, config.to_gin())
        if terminal is not None and self._place is not None:
            self._place.folder.write_result(self.result)  # only now in place of what a resumed run had reached

    def take_figures(self, trainer: Trainer) -> None:
        """Copy what was reached out of the trainer, which is gone by the time it is written."""
        self._take_values(trainer)
        self._figures = closing_figures(self.result, trainer)

    def _take_values(self, trainer: Trainer) -> None:
        result = self.result
        result.samples = trainer.progress.samples
        values = {task: f for task, f in trainer.evaluation.items() if isinstance(f, RegressionResult)}
        result.auc = {task: f.auc for task, f in trainer.evaluation.items() if not isinstance(f, RegressionResult)}
        if values:
            result.rmse = {task: figures.rmse for task, figures in values.items()}
            result.mae = {task: figures.mae for task, figures in values.items()}
        result.auc_best_seen = trainer.progress.best_auc
        result.seconds = self.seconds

    def fail(self, exc: BaseException) -> Broken:
        """Say why the run broke off, and keep the traceback of what nobody foresaw."""
        reason = one_line(exc, None if self._place is None else self._place.folder.path)
        by_input, full = is_input_error(exc, self._begun is not None), disk.is_full(exc)
        broken = Broken(reason, USER_ERROR if by_input else FAILED, disk_is_full=full)
        on_all_ranks = isinstance(exc, ON_ALL_RANKS)
        if not self.is_main and on_all_ranks and not isinstance(exc, NotMet):
            return broken
        if settings.get("HSTU_TRACEBACK"):
            traceback.print_exc()
        elif not (on_all_ranks or by_input or full):
            kept = self._keep_traceback(exc)
            if kept is not None:
                reason, broken = f"{reason} (traceback in {kept})", dataclasses.replace(broken, kept_traceback=True)
        if self._terminal is not None:
            self._terminal.close()
        complain(f"error: {reason}")
        return broken

    def _keep_traceback(self, exc: BaseException) -> pathlib.Path | None:
        """Where the traceback lies, if it could be written."""
        if self._place is None or not self._place.folder.path.is_dir():
            return None
        kept = self._place.folder.path / f"traceback_rank{launched_rank()}.txt"
        try:
            kept.write_text("".join(traceback.format_exception(exc)), encoding="utf-8")
        except OSError:
            return None
        return kept

    @property
    def _terminal(self) -> Terminal | None:
        return None if self._begun is None else self._begun.terminal

    def last_words(self, reason: str) -> None:
        """Say and write why the process is about to end while its main thread hangs: what does not need that thread."""
        complain(f"error: rank {launched_rank()}: {reason}")
        place = self._place
        if self._closed or not self.is_main or place is None or (place.resuming and self._begun is None):
            return
        trainer = None if self._set_up is None else self._set_up.trainer()
        if trainer is not None:
            self._take_values(trainer)
        self.result.status, self.result.reason, self.result.seconds = "failed", reason, self.seconds
        place.folder.write_result(self.result)
        self._end_mlperf()

    def _end_mlperf(self) -> None:
        """MLPerf's log, unless it has ended: the run was stopped, or broke."""
        if self._set_up is not None:
            self._set_up.mlperf.end(self.result.samples, success=False)

    def close(self, outcome: Finished | NothingToDo | Broken) -> None:
        """Write what stays of the run: ``result.json`` and, once training has begun, the table and the report."""
        if not self.is_main:
            return
        self.result.status = "ok" if outcome.reason is None else "failed"
        self.result.reason, self.result.seconds = outcome.reason, self.seconds
        leaving = what_stays(
            outcome,
            placed=self._place is not None,
            resuming=self._place is not None and self._place.resuming,
            begun=self._terminal is not None,
            named=self._arguments.run_name is not None,
        )
        if leaving is Leaving.NOTE or self._place is None:
            self._leave_a_note()
            return
        folder = self._place.folder
        if leaving is Leaving.UNTOUCHED:
            folder.release()
        elif leaving is Leaving.NOTHING:
            folder.discard()
        else:
            self._write(folder, whole=leaving is Leaving.WHOLE)
        if isinstance(outcome, NothingToDo):
            print(outcome.line, flush=True)

    def _write(self, folder: RunFolder, whole: bool) -> None:
        folder.write_result(self.result)
        if whole and self._begun is not None and self._begun.terminal is not None:
            self._show(folder, self._begun.terminal, self._begun.config_text)
        self._end_mlperf()
        folder.finish(self.result)
        self._closed = True

    def _show(self, folder: RunFolder, terminal: Terminal, config_text: str) -> None:
        """The table on the terminal, and the report."""
        name = folder.path.name
        terminal.close()
        terminal.table(f"{name}: {self.result.status}", self._figures)
        page = report.page(name, self.result, self._figures, folder.metrics(), config_text)
        write_atomically(folder.path / "report.html", page)
        terminal.print(f"report: {folder.path / 'report.html'}")
        if self.result.reason is not None:
            terminal.print(f"failed: {self.result.reason}")
        if (self.result.reason or "").startswith("stopped by"):
            kept = newest(folder.checkpoints)
            where = f"from {kept.name}" if kept else "from the beginning, as no checkpoint was written (checkpoint.…)"
            terminal.print(f"the same command with --run-name {name} --resume goes on {where}")

    def could_not_close(self, outcome: Finished | NothingToDo | Broken, exc: OSError) -> NotWritten:
        """The disk is full, or the terminal is gone: say it, unless it was said, and let go of what is open."""
        folder = None if self._place is None else self._place.folder
        said = isinstance(outcome, Broken) and outcome.disk_is_full
        if not (disk.is_full(exc) and said):
            complain(
                f"error: {one_line(exc, None if folder is None else folder.path)}: the run's files are not complete"
            )
        for held in (None if self._set_up is None else self._set_up.mlperf, folder):
            with contextlib.suppress(OSError):
                if held is not None:
                    held.close()
        return NotWritten(outcome)

    def _leave_a_note(self) -> None:
        """A run that was named but failed before it had a folder still leaves its result, unless one is there."""
        if self._arguments.run_name is None:
            return
        with contextlib.suppress(UserError, OSError):
            folder = claim(self._arguments.runs_dir, self._arguments.run_name, resume=False)
            folder.hold()
            folder.write_result(self.result)
            folder.release()
