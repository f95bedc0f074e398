"""One run from the command line to its result: sets the components up, lets the loop go, judges and writes the end."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import pathlib
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.api import CheckpointException

from generative_recommenders import disk, settings
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.disk import write_atomically
from generative_recommenders.errors import UserError
from generative_recommenders.ops.dispatch import BackendUnavailable
from generative_recommenders.paths import user_path
from generative_recommenders.terminal import complain
from generative_recommenders.train import agreement, build, checkpoint, gin_files, report
from generative_recommenders.train.checkpoint import Checkpointer
from generative_recommenders.train.checkpoint_fit import first_cause
from generative_recommenders.train.checkpoint_meta import newest, resolve
from generative_recommenders.train.console import Terminal
from generative_recommenders.train.distributed import World, choose_device, join, launched_rank, leave
from generative_recommenders.train.evaluation import TrainingDiverged
from generative_recommenders.train.flops import MFU_NOTE
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.loop import Trainer, evaluation_schedule
from generative_recommenders.train.meeting import NotMet, meet
from generative_recommenders.train.metrics import RegressionResult
from generative_recommenders.train.mlperf import EvalSchedule, MlperfLog, departures
from generative_recommenders.train.plan_report import PlanReport, compact_lines
from generative_recommenders.train.reporting import Reporter
from generative_recommenders.train.run_folder import Result, RunFolder, claim, way_on
from generative_recommenders.train.signals import Stopped, StopSignals
from generative_recommenders.train.verdict import closing_figures, shortfall

OK, FAILED, USER_ERROR = 0, 1, 2
SHARES_NOTE = "fill: FLOPs of the real lengths over those of a padded batch; exec: FLOPs executed over the same"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line. ``resume``: ``no``, ``yes``, or ``auto`` (go on, or begin where there is nothing)."""

    config: tuple[str, ...]
    bind: tuple[str, ...] = ()
    run_name: str | None = None
    runs_dir: str = "runs"
    device: str = "auto"
    resume: str = "no"


def run(arguments: Arguments) -> int:
    """Do a run on this rank and return the exit status: 0 done as asked, 1 not, 2 wrong input.

    ``result.json`` is written whatever happens. A failure is one line on stderr; the traceback of an unforeseen one is
    kept in the run folder (and shown with ``HSTU_TRACEBACK=1``).
    """
    hush_libraries()
    attempt = _Attempt(arguments)
    with StopSignals(attempt.last_words) as signals:
        try:
            attempt.go(signals)
            status = OK if attempt.result.status == "ok" else FAILED
            orderly = True
        except (Exception, KeyboardInterrupt, CheckpointException) as exc:
            signals.ignore()
            status = USER_ERROR if attempt.is_input_error(exc) else FAILED
            orderly = False
            attempt.fail(exc)
        signals.ignore()  # a second signal, often a launcher's echo of the first, must not cut the ending short
        try:
            attempt.close()
        except OSError as exc:  # the disk is full, or the terminal is gone
            status, orderly = status or FAILED, False
            path = attempt.folder and attempt.folder.path
            if not (disk.is_full(exc) and attempt.disk_is_full):  # said already
                complain(f"error: {one_line(exc, path)}: the run's files are not complete")
            attempt.let_go()
        with signals.deadly():  # all is written; another rank may not come to the end
            _leave(attempt.world, orderly, status)
    return status


class _Attempt:
    """What a run has got hold of so far, so that whatever stops it can be written down."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.started = time.monotonic()
        self.result = Result(config={"files": list(arguments.config), "bind": list(arguments.bind)})
        self.config: RunConfig | None = None
        self.world: World | None = None
        self.folder: RunFolder | None = None
        self.terminal: Terminal | None = None
        self.reporter: Reporter | None = None
        self.mlperf = MlperfLog(None, EvalSchedule(0, 0))
        self.notes: Sequence[str] = ()
        self.warnings: Sequence[str] = ()
        self.figures: list[tuple[str, str]] = []
        self.kept_traceback = False
        self.disk_is_full = False
        self.began = False  # whether the set-up is done
        self.resuming = arguments.resume == "yes"
        self.finished: str | None = None  # why there is nothing to do
        self.closed = False  # whether the result is written
        self.trainer: weakref.ref[Trainer] | None = None

    @property
    def is_main(self) -> bool:
        rank = launched_rank()
        return rank == 0 or rank >= (settings.get("WORLD_SIZE") or rank + 1)  # the latter is no rank: let it speak

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, with what a resumed one took before."""
        in_all = time.monotonic() - self.started if self.reporter is None else self.reporter.seconds_in_all
        return round(in_all, 3)

    def go(self, signals: StopSignals) -> None:
        """Everything up to the verdict. What holds a communicator lives and dies in here."""
        said, problem, device = {}, None, None
        try:
            device = self._read_options()
            own = {f"--{name.replace('_', '-')}": getattr(self.arguments, name) for name in ("resume", "run_name")}
            said = agreement.statement(self.config, own, device.type)
        except UserError as exc:
            problem = str(exc)
        with signals.deadly():  # waits for the other processes, who may never come
            self.world = join(device, meet(said, problem))
        self.folder, self.resuming, self.finished = open_folder(self.arguments, self.config, self.world)
        if self.finished is not None:
            self.result.status = "ok"
            return
        if self.is_main and not self.resuming:
            self.folder.write_result(self.result)
        with build.backend_fallback(self.config):
            self._work(signals)

    def _read_options(self) -> torch.device:
        """Configuration and device, or ``UserError``."""
        self.config = gin_files.load(self.arguments.config, self.arguments.bind)
        self.result.config = self.config.values()
        if self.config.train.mode == "eval" and not self.config.checkpoint.load and self.arguments.resume == "no":
            raise UserError("train.mode = 'eval': needs weights; give --bind 'checkpoint.load=\"...\"' or --resume")
        return choose_device(self.arguments.device)

    def _work(self, signals: StopSignals) -> None:
        dataset = build.open_dataset(self.config, self.world)
        self.result.best_auc, self.result.baseline_auc = dataset.best_auc, dataset.baseline_auc
        trainer = self._trainer(dataset, signals)
        try:
            with signals.deferred():
                if self.config.train.mode != "eval":
                    with trainer.reporter.watch.running():
                        trainer.fit()
                if self.config.train.mode != "train":
                    trainer.evaluate()
                if self.config.checkpoint.at_end and self.config.train.mode != "eval":
                    trainer.save()
        except Stopped as stopped:
            if self.config.checkpoint.enabled and stopped.together:
                trainer.save()
            raise
        finally:
            self._take_figures(trainer)
        self.result.reason = shortfall(self.config, dataset, trainer)
        self.mlperf.end(trainer.progress.samples, success=self.result.reason is None)
        self.result.status = "ok" if self.result.reason is None else "failed"

    def _trainer(self, dataset: RankingDataset, signals: StopSignals) -> Trainer:
        config, world, folder = self.config, self.world, self.folder
        model, optimizers, plan = build.build_model(config, dataset, world)
        terminal = Terminal() if self.is_main else None
        self.reporter = reporter = Reporter(world, folder if self.is_main else None, terminal, self.started)
        checkpointer = Checkpointer(folder.checkpoints, config.checkpoint.keep, config, world, dataset)
        writes_mlperf = config.mlperf.enabled and self.is_main
        self.mlperf = MlperfLog(
            folder.path / "mlperf.log" if writes_mlperf else None, evaluation_schedule(config, world)
        )
        trainer = Trainer(config, dataset, model, optimizers, checkpointer, reporter, signals, self.mlperf, world)
        self.trainer, self.result.peak = weakref.ref(trainer), trainer.meter.peak
        found = newest(folder.checkpoints) if self.resuming else None
        if found is not None:
            restored = checkpointer.restore(found, model, optimizers)
            self.warnings = restored.warnings
            trainer.resume(restored)
        elif config.train.mode == "eval" and not config.checkpoint.load:
            raise UserError(f"--resume: {folder.path} has no checkpoint, so there are no weights to evaluate")
        elif config.checkpoint.load:
            path = resolve(config.checkpoint.load)
            loaded = checkpoint.load(path, model, optimizers, config, dataset, world)
            self.notes, self.warnings = loaded.notes, loaded.warnings
        trainer.rehearse()
        reporter.total_samples = trainer.samples_at_end()
        self.began = True
        if self.is_main:
            self.terminal = terminal
            self.folder.write_result(self.result)  # only now in place of what a resumed run had reached
            terminal.start(reporter.total_samples)
            folder.start(config.to_gin(), trainer.progress if self.resuming else None)
            self._introduce(dataset, trainer, plan, found)
            self.mlperf.begin(config, self._mlperf_figures(dataset, trainer), trainer.progress if found else None)
        return trainer

    def _introduce(
        self, dataset: RankingDataset, trainer: Trainer, plan: PlanReport, resumed: pathlib.Path | None
    ) -> None:
        world, terminal = self.world, self.terminal
        terminal.configuration(self.config.values(), self.config.sources)
        for note in dataset.notes:
            terminal.print(note)
        train = sum(window.num_samples for window in dataset.windows)
        parameters = sum(p.numel() for p in trainer.optimizers.dense_parameters.values())
        rows = sum(dataset.schema.table_rows.values())
        unused = dataset.cache.num_anchors - train - dataset.holdout.num_samples
        terminal.print(
            f"{dataset.name}: {train:,} training samples in {len(dataset.windows)} windows, "
            f"{dataset.holdout.num_samples:,} in the hold-out" + (f", {unused:,} in neither" if unused else "")
        )
        terminal.print(f"model: {parameters:,} dense parameters, {rows:,} rows of embedding tables")
        terminal.print(f"{world.size} x {world.device.type}, run folder {self.folder.path}")
        for line in compact_lines(plan):
            terminal.print(line)
        meter = trainer.meter
        terminal.print(f"{SHARES_NOTE}; {MFU_NOTE if meter.peak is not None else meter.why_no_peak}")
        if meter.peak is not None:
            terminal.print(f"peak that MFU and HFU divide by: {meter.peak.in_words}")
        for note in self.notes:
            terminal.print(note)
        for warning in self.warnings:
            terminal.print(f"warning: {warning}")
        if self.config.mlperf.enabled:
            for departure in departures(self.config, self.config.train.batch_size * world.size):
                terminal.print(f"warning: outside MLPerf's closed division: {departure}")
        if self.arguments.resume == "auto" and not self.config.checkpoint.enabled:
            terminal.print(
                "warning: --resume=auto can only begin again without checkpoints: see checkpoint.every_steps"
            )
        if self.resuming:
            where = f"from {resumed}" if resumed else "from the beginning: the run has no complete checkpoint"
            terminal.print(f"resuming {where} (step {trainer.progress.step:,})")

    def _mlperf_figures(self, dataset: RankingDataset, trainer: Trainer) -> dict[str, object]:
        config, world = self.config, self.world
        return {
            "platform": f"{world.size}x{trainer.meter.device_name}",
            "global_batch_size": config.train.batch_size * world.size,
            "train_samples": sum(window.num_samples for window in dataset.windows),
            "eval_samples": dataset.holdout.num_samples,
            "max_sequence_length": trainer.meter.max_seq_len,
            "precision": trainer.meter.precision,
            "wire_precision": {"float32": "fp32", "float16": "fp16", "bfloat16": "bfloat16"}[
                config.sharding.wire_precision
            ],
            "config_filename": pathlib.Path(self.arguments.config[-1]).name,
        }

    def _take_figures(self, trainer: Trainer) -> None:
        """Copy the outcome out of the trainer, which is gone by the time it is written."""
        self._take_values(trainer)
        self.figures = closing_figures(self.result, trainer)

    def _take_values(self, trainer: Trainer) -> None:
        result = self.result
        result.samples = trainer.progress.samples
        values = {task: f for task, f in trainer.evaluation.items() if isinstance(f, RegressionResult)}
        result.auc = {task: figures.auc for task, figures in trainer.evaluation.items() if task not in values}
        if values:
            result.rmse = {task: figures.rmse for task, figures in values.items()}
            result.mae = {task: figures.mae for task, figures in values.items()}
        result.auc_best_seen = trainer.progress.best_auc
        result.seconds = self.seconds

    def is_input_error(self, exc: BaseException) -> bool:
        """Whether the person who started the run can mend it: wrong input, or before training a file that fails."""
        about_a_file = isinstance(exc, OSError) and exc.filename is not None
        return isinstance(exc, (UserError, BackendUnavailable)) or (about_a_file and not self.began)

    def fail(self, exc: BaseException) -> None:
        """Note and print why the run ended."""
        reason = one_line(exc, self.folder and self.folder.path)
        self.result.status, self.result.reason = "failed", reason
        self.disk_is_full = disk.is_full(exc)
        on_all_ranks = isinstance(exc, (UserError, BackendUnavailable, Stopped, TrainingDiverged))
        if not self.is_main and on_all_ranks and not isinstance(exc, NotMet):
            return
        expected = on_all_ranks or self.is_input_error(exc) or self.disk_is_full
        if settings.get("HSTU_TRACEBACK"):
            traceback.print_exc()
        elif not expected and self.folder is not None and self.folder.path.is_dir():
            kept = self.folder.path / f"traceback_rank{launched_rank()}.txt"
            with contextlib.suppress(OSError):
                kept.write_text("".join(traceback.format_exception(exc)), encoding="utf-8")
                self.kept_traceback = True
                reason += f" (traceback in {kept})"
        if self.terminal is not None:
            self.terminal.close()
        complain(f"error: {reason}")

    def last_words(self, reason: str) -> None:
        """Say and write why the process is about to end while its main thread hangs: what does not need that thread."""
        complain(f"error: rank {launched_rank()}: {reason}")
        if self.closed or not self.is_main or self.folder is None or (self.resuming and not self.began):
            return
        trainer = self.trainer and self.trainer()
        if trainer is not None:
            self._take_values(trainer)
        self.result.status, self.result.reason, self.result.seconds = "failed", reason, self.seconds
        self.folder.write_result(self.result)
        self.mlperf.end(self.result.samples, success=False)

    def close(self) -> None:
        """Write ``result.json`` and, once training has begun, the table and the report."""
        if not self.is_main:
            return
        self.result.seconds = self.seconds
        if self.folder is None:
            self._leave_a_note()
            return
        if self.finished is not None or (self.resuming and not self.began):
            self.folder.release()  # nothing was done: what the run had reached stays
            if self.finished is not None:
                print(self.finished, flush=True)
            return
        if self.terminal is None and self.arguments.run_name is None and not self.kept_traceback:
            self.folder.discard()  # nobody asked for this name, and the run never began
            return
        self.folder.write_result(self.result)
        if self.terminal is not None:
            self.terminal.close()
            name = self.folder.path.name
            self.terminal.table(f"{name}: {self.result.status}", self.figures)
            text = report.page(name, self.result, self.figures, self.folder.metrics(), self.config.to_gin())
            write_atomically(self.folder.path / "report.html", text)
            self.terminal.print(f"report: {self.folder.path / 'report.html'}")
            if self.result.reason is not None:
                self.terminal.print(f"failed: {self.result.reason}")
        self.mlperf.end(self.result.samples, success=False)  # unless it has ended: stopped, or an error
        self.folder.finish(self.result)
        self.closed = True

    def let_go(self) -> None:
        """Close what an ending that failed has left open; a full disk has been said by then."""
        for close in (self.mlperf.close, *([self.folder.close] if self.folder else [])):
            with contextlib.suppress(OSError):
                close()

    def _leave_a_note(self) -> None:
        """A run that was named but failed before it had a folder still leaves its result, unless one is there."""
        if self.arguments.run_name is None:
            return
        with contextlib.suppress(UserError, OSError):
            folder = claim(self.arguments.runs_dir, self.arguments.run_name, resume=False)
            folder.hold()
            folder.write_result(self.result)
            folder.release()


def hush_libraries() -> None:
    """Keep advice that torch and TorchRec address to their own developers off the terminal."""
    for name in ("torchrec", "torch.fx", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("torch", "torchrec", "fbgemm_gpu"):
        warnings.filterwarnings("ignore", module=rf"{module}\b.*")
    threading.excepthook = _thread_failed


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """A full disk that TensorBoard's writer meets is said by the run, whose next figure raises it."""
    if not disk.is_full(failure.exc_value):
        threading.__excepthook__(failure)


def open_folder(arguments: Arguments, config: RunConfig, world: World) -> tuple[RunFolder | None, bool, str | None]:
    """The run's folder on every rank, whether the run goes on in it, and why there is nothing to do (or ``None``).

    Rank 0 picks the name, checks that it is free and decides for all.
    """
    folder, resuming, finished, problem = None, False, None, None
    if world.is_main:
        try:
            folder, resuming, finished = _take_folder(arguments, config)
        except UserError as exc:
            problem = str(exc)
        except OSError as exc:
            problem = f"--runs-dir {arguments.runs_dir}: {one_line(exc)}"
    path, resuming, finished, problem = world.gather((folder and folder.path, resuming, finished, problem))[0]
    if problem is not None:
        raise UserError(problem)
    return folder or RunFolder(path), resuming, finished


def _take_folder(arguments: Arguments, config: RunConfig) -> tuple[RunFolder, bool, str | None]:
    """A folder that this run alone works in, whether it goes on there, and why there is nothing to do (or ``None``)."""
    name = arguments.run_name
    if name is not None:
        way = lambda: way_on(arguments.runs_dir, name, arguments.resume, config.values())
        folder = claim(arguments.runs_dir, name, way()[0])
        folder.hold()
        resuming, finished = way()  # again: whoever held it until now may have run in it
        if finished is None:
            claim(arguments.runs_dir, name, resuming)
        return folder, resuming, finished
    if arguments.resume != "no":
        raise UserError("--resume: needs --run-name, the name of the run to go on with")
    name = f"{pathlib.Path(arguments.config[-1]).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    while (user_path(arguments.runs_dir) / name).exists():  # another run began in the same second
        name += "x"
    folder = claim(arguments.runs_dir, name, resume=False)
    folder.hold()
    return folder, False, None


def one_line(exc: BaseException, folder: pathlib.Path | None = None) -> str:
    """The message of an exception in one line; its type where it is not one of ours. ``folder``: the run's."""
    exc = first_cause(exc)
    text = " ".join(str(exc).split()) or type(exc).__name__
    if isinstance(exc, (UserError, BackendUnavailable, Stopped, TrainingDiverged, disk.DiskFull)):
        return text
    if disk.is_full(exc):
        return f"no space left on the disk{disk.where(folder)}; {checkpoint.WAY_ON}"
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}; check the path, its permissions and the space on its disk"
    return shorten(f"{type(exc).__name__}: {text}")


def shorten(text: str, longest: int = 400) -> str:
    """The beginning of a text that some libraries make very long."""
    return text if len(text) <= longest else f"{text[:longest]} …"


def _leave(world: World | None, orderly: bool, status: int) -> None:
    """Leave the process group; after a failure, not by way of the others, who may be waiting in an exchange."""
    if world is None:
        return
    if orderly or world.size == 1:
        leave(world)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
