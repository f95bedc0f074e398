"""One run from the command line to its result: sets the components up, lets the loop go, judges and writes the end."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import logging
import os
import pathlib
import sys
import time
import traceback
import warnings

from torch.distributed.checkpoint.api import CheckpointException

from generative_recommenders import settings
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.errors import UserError
from generative_recommenders.ops.dispatch import BackendUnavailable
from generative_recommenders.train import build, checkpoint, gin_files, report
from generative_recommenders.train.checkpoint import Checkpointer
from generative_recommenders.train.console import Terminal
from generative_recommenders.train.distributed import World, choose_device, join, launched_rank, leave
from generative_recommenders.train.evaluation import TrainingDiverged
from generative_recommenders.train.flops import MFU_NOTE
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.loop import Trainer, evaluation_schedule
from generative_recommenders.train.metrics import RegressionResult
from generative_recommenders.train.mlperf import EvalSchedule, MlperfLog, departures
from generative_recommenders.train.plan_report import PlanReport, compact_lines
from generative_recommenders.train.reporting import Reporter
from generative_recommenders.train.run_folder import Result, RunFolder, claim, write_atomically
from generative_recommenders.train.signals import Stopped, StopSignals
from generative_recommenders.train.verdict import closing_figures, shortfall

OK, FAILED, USER_ERROR = 0, 1, 2
SHARES_NOTE = "fill: FLOPs of the real lengths over those of a padded batch; exec: FLOPs executed over the same"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line."""

    config: tuple[str, ...]
    bind: tuple[str, ...] = ()
    run_name: str | None = None
    runs_dir: str = "runs"
    device: str = "auto"
    resume: bool = False


def run(arguments: Arguments) -> int:
    """Do a run on this rank and return the exit status: 0 done as asked, 1 not, 2 wrong input.

    ``result.json`` is written whatever happens. A failure is one line on stderr; the traceback of an unforeseen one is
    kept in the run folder (and shown with ``HSTU_TRACEBACK=1``).
    """
    hush_libraries()
    attempt = _Attempt(arguments)
    with StopSignals() as signals:
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
            complain(f"error: {one_line(exc)}: the run's files are not complete")
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
        self.warnings: list[str] = []
        self.figures: list[tuple[str, str]] = []
        self.kept_traceback = False
        self.began = False  # whether the set-up is done

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
        self.config = gin_files.load(self.arguments.config, self.arguments.bind)
        self.result.config = self.config.values()
        if self.config.train.mode == "eval" and not (self.config.checkpoint.load or self.arguments.resume):
            raise UserError("train.mode = 'eval': needs weights; give --bind 'checkpoint.load=\"...\"' or --resume")
        device = choose_device(self.arguments.device)
        with signals.deadly():  # waits for the other processes, who may never come
            self.world = join(device)
        self.folder = open_folder(self.arguments, self.world)
        if self.is_main and not self.arguments.resume:
            self.folder.write_result(self.result)
        with build.backend_fallback(self.config):
            self._work(signals)

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
        checkpointer = Checkpointer(folder.checkpoints, config.checkpoint.keep, config, world)
        writes_mlperf = config.mlperf.enabled and self.is_main
        self.mlperf = MlperfLog(
            folder.path / "mlperf.log" if writes_mlperf else None, evaluation_schedule(config, world)
        )
        trainer = Trainer(config, dataset, model, optimizers, checkpointer, reporter, signals, self.mlperf, world)
        found = checkpoint.newest(folder.checkpoints) if self.arguments.resume else None
        if found is not None:
            trainer.resume(checkpointer.restore(found, model, optimizers))
        elif config.train.mode == "eval" and not config.checkpoint.load:
            raise UserError(f"--resume: {folder.path} has no checkpoint, so there are no weights to evaluate")
        elif config.checkpoint.load:
            self.warnings = checkpoint.load_weights(checkpoint.resolve(config.checkpoint.load), model, world)
        trainer.rehearse()
        reporter.total_samples = trainer.samples_at_end()
        self.began = True
        if self.is_main:
            self.terminal = terminal
            self.folder.write_result(self.result)  # only now in place of what a resumed run had reached
            terminal.start(reporter.total_samples)
            folder.start(config.to_gin(), trainer.progress if self.arguments.resume else None)
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
        why_no_peak = trainer.meter.why_no_peak
        terminal.print(f"{SHARES_NOTE}; {MFU_NOTE if why_no_peak is None else why_no_peak}")
        for warning in self.warnings:
            terminal.print(f"warning: {warning}")
        if self.config.mlperf.enabled:
            for departure in departures(self.config, self.config.train.batch_size * world.size):
                terminal.print(f"warning: outside MLPerf's closed division: {departure}")
        if self.arguments.resume:
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
        result = self.result
        result.samples = trainer.progress.samples
        values = {task: f for task, f in trainer.evaluation.items() if isinstance(f, RegressionResult)}
        result.auc = {task: figures.auc for task, figures in trainer.evaluation.items() if task not in values}
        if values:
            result.rmse = {task: figures.rmse for task, figures in values.items()}
            result.mae = {task: figures.mae for task, figures in values.items()}
        result.auc_best_seen = trainer.progress.best_auc
        result.seconds = self.seconds
        self.figures = closing_figures(result, trainer)

    def is_input_error(self, exc: BaseException) -> bool:
        """Whether the person who started the run can mend it: wrong input, or before training a file that fails."""
        about_a_file = isinstance(exc, OSError) and exc.filename is not None
        return isinstance(exc, (UserError, BackendUnavailable)) or (about_a_file and not self.began)

    def fail(self, exc: BaseException) -> None:
        """Note and print why the run ended."""
        reason = one_line(exc)
        self.result.status, self.result.reason = "failed", reason
        on_all_ranks = isinstance(exc, (UserError, BackendUnavailable, Stopped, TrainingDiverged))
        if not self.is_main and on_all_ranks:
            return
        expected = on_all_ranks or self.is_input_error(exc)
        if settings.get("HSTU_TRACEBACK"):
            traceback.print_exc()
        elif not expected and self.folder is not None and self.folder.path.is_dir():
            kept = self.folder.path / f"traceback_rank{launched_rank()}.txt"
            with contextlib.suppress(OSError):
                kept.write_text("".join(traceback.format_exception(exc)))
                self.kept_traceback = True
                reason += f" (traceback in {kept})"
        if self.terminal is not None:
            self.terminal.close()
        complain(f"error: {reason}")

    def close(self) -> None:
        """Write ``result.json`` and, once training has begun, the table and the report."""
        if not self.is_main:
            return
        self.result.seconds = self.seconds
        if self.folder is None:
            self._leave_a_note()
            return
        if self.arguments.resume and not self.began:
            self.folder.release()  # nothing was done: what the run had reached stays
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
        self.mlperf.close()
        self.folder.finish(self.result)

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


def open_folder(arguments: Arguments, world: World) -> RunFolder:
    """The run's folder on every rank; rank 0 picks the name and checks that it is free."""
    folder, problem = None, None
    if world.is_main:
        try:
            folder = _take_folder(arguments)
        except UserError as exc:
            problem = str(exc)
        except OSError as exc:
            problem = f"--runs-dir {arguments.runs_dir}: {one_line(exc)}"
    path, problem = world.gather((folder and folder.path, problem))[0]
    if problem is not None:
        raise UserError(problem)
    return folder or RunFolder(path)


def _take_folder(arguments: Arguments) -> RunFolder:
    """A folder that this run alone works in."""
    name = arguments.run_name
    if name is not None:
        folder = claim(arguments.runs_dir, name, arguments.resume)
        folder.hold()
        claim(arguments.runs_dir, name, arguments.resume)  # again: whoever held it until now may have run in it
        return folder
    if arguments.resume:
        raise UserError("--resume: needs --run-name, the name of the run to go on with")
    name = f"{pathlib.Path(arguments.config[-1]).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    while (pathlib.Path(arguments.runs_dir) / name).exists():  # another run began in the same second
        name += "x"
    folder = claim(arguments.runs_dir, name, resume=False)
    folder.hold()
    return folder


def one_line(exc: BaseException) -> str:
    """The message of an exception in one line; its type where it is not one of ours."""
    exc = checkpoint.first_cause(exc)
    text = " ".join(str(exc).split()) or type(exc).__name__
    if isinstance(exc, (UserError, BackendUnavailable, Stopped, TrainingDiverged)):
        return text
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}; check the path, its permissions and the space on its disk"
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        return "no space left on the disk of the run folder; free some, then go on with --resume or begin again"
    return shorten(f"{type(exc).__name__}: {text}")


def shorten(text: str, longest: int = 400) -> str:
    """The beginning of a text that some libraries make very long."""
    return text if len(text) <= longest else f"{text[:longest]} …"


def complain(text: str) -> None:
    """A line on stderr, if there still is one."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


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
