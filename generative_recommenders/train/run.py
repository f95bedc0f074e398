"""One run from the command line to its result: sets the components up, lets the loop go, judges and writes the end.

Read ``run`` and ``_go``. What is written of a run is ``record.py``, how it may end ``outcome.py``, where ``place.py``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings

import torch
from torch.distributed.checkpoint.api import CheckpointException

from generative_recommenders import disk
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.errors import UserError
from generative_recommenders.train import agreement, build, checkpoint, gin_files
from generative_recommenders.train.arguments import Arguments
from generative_recommenders.train.checkpoint import Checkpointer
from generative_recommenders.train.checkpoint_meta import newest, resolve
from generative_recommenders.train.console import Terminal
from generative_recommenders.train.distributed import World, choose_device, join, leave
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.introduction import Start, introduction
from generative_recommenders.train.loop import Trainer, evaluation_schedule
from generative_recommenders.train.meeting import meet
from generative_recommenders.train.mlperf import MlperfLog
from generative_recommenders.train.mlperf_figures import mlperf_figures
from generative_recommenders.train.outcome import Broken, Finished, NothingToDo, Outcome
from generative_recommenders.train.place import Place, open_folder
from generative_recommenders.train.plan_report import PlanReport
from generative_recommenders.train.record import RunRecord
from generative_recommenders.train.reporting import Reporter
from generative_recommenders.train.signals import Stopped, StopSignals
from generative_recommenders.train.verdict import shortfall


def run(arguments: Arguments) -> int:
    """Do a run on this rank and return the exit status: 0 done as asked, 1 not, 2 wrong input.

    ``result.json`` is written whatever happens. A failure is one line on stderr; the traceback of an unforeseen one is
    kept in the run folder (and shown with ``HSTU_TRACEBACK=1``).
    """
    hush_libraries()
    record = RunRecord(arguments)
    with StopSignals(record.last_words) as signals:
        outcome: Outcome
        outcome = ended = _attempt(arguments, record, signals)
        signals.ignore()  # a second signal, often a launcher's echo of the first, must not cut the ending short
        try:
            record.close(ended)
        except OSError as exc:  # the disk is full, or the terminal is gone
            outcome = record.could_not_close(ended, exc)
        with signals.deadly():  # all is written; another rank may not come to the end
            _leave(record.world, outcome)
    return outcome.exit_status


def _attempt(arguments: Arguments, record: RunRecord, signals: StopSignals) -> Finished | NothingToDo | Broken:
    try:
        return _go(arguments, record, signals)
    except (Exception, KeyboardInterrupt, CheckpointException) as exc:
        signals.ignore()
        return record.fail(exc)


def _go(arguments: Arguments, record: RunRecord, signals: StopSignals) -> Finished | NothingToDo:
    """Everything up to the verdict. What holds a communicator lives and dies in here."""
    config, world = _meet(arguments, record, signals)
    place = open_folder(arguments, config, world)
    record.take(place)
    if place.finished is not None:
        return NothingToDo(place.finished)
    dataset = build.open_dataset(config, world)
    record.open(dataset)
    trainer = _set_up(arguments, config, dataset, world, place, record, signals)
    try:
        _train_and_evaluate(trainer, signals)
    finally:
        record.take_figures(trainer)
    reason = shortfall(config, dataset, trainer)
    trainer.mlperf.end(trainer.progress.samples, success=reason is None)
    return Finished(reason)


def _meet(arguments: Arguments, record: RunRecord, signals: StopSignals) -> tuple[RunConfig, World]:
    """Read the options and find the other processes, which must have been started with the same."""
    config, said, problem, device = None, {}, None, None
    try:
        config = gin_files.load(arguments.config, arguments.bind)
        record.result.config = config.values()
        device = _device(arguments, config)
        own = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in ("resume", "run_name")}
        said = agreement.statement(config, own, device.type)
    except UserError as exc:
        problem = str(exc)
    with signals.deadly():  # waits for the other processes, who may never come
        store = meet(said, problem)
        assert config is not None and device is not None  # else there was a problem, and that has been raised
        record.world = join(device, store)
    return config, record.world


def _device(arguments: Arguments, config: RunConfig) -> torch.device:
    if config.train.mode == "eval" and not config.checkpoint.load and arguments.resume == "no":
        raise UserError("train.mode = 'eval': needs weights; give --bind 'checkpoint.load=\"...\"' or --resume")
    return choose_device(arguments.device)


def _set_up(
    arguments: Arguments,
    config: RunConfig,
    dataset: RankingDataset,
    world: World,
    place: Place,
    record: RunRecord,
    signals: StopSignals,
) -> Trainer:
    """A trainer whose first step can be taken."""
    folder = place.folder
    model, optimizers, plan = build.build_model(config, dataset, world)
    terminal = Terminal() if record.is_main else None
    reporter = Reporter(world, folder if record.is_main else None, terminal, record.started)
    checkpointer = Checkpointer(folder.checkpoints, config.checkpoint.keep, config, world, dataset)
    writes_mlperf = config.mlperf.enabled and record.is_main
    mlperf = MlperfLog(folder.path / "mlperf.log" if writes_mlperf else None, evaluation_schedule(config, world))
    trainer = Trainer(config, dataset, model, optimizers, checkpointer, reporter, signals, mlperf, world)
    record.set_up(trainer)
    start = _read_weights(trainer, place)
    trainer.rehearse()
    reporter.total_samples = trainer.samples_at_end()
    record.begin(config, terminal)
    if terminal is not None:
        _open_files(trainer, place, plan, start, arguments, terminal)
    return trainer


def _read_weights(trainer: Trainer, place: Place) -> Start:
    """Go on from the newest checkpoint, or begin from what another run learnt, or from nothing."""
    config = trainer.config
    found = newest(place.folder.checkpoints) if place.resuming else None
    if found is not None:
        restored = trainer.checkpointer.restore(found, trainer.model, trainer.optimizers)
        trainer.resume(restored)
        return Start(found, warnings=tuple(restored.warnings))
    if config.train.mode == "eval" and not config.checkpoint.load:
        raise UserError(f"--resume: {place.folder.path} has no checkpoint, so there are no weights to evaluate")
    if config.checkpoint.load:
        path = resolve(config.checkpoint.load)
        loaded = checkpoint.load(path, trainer.model, trainer.optimizers, config, trainer.dataset, trainer.world)
        return Start(None, (f"weights from {path}", *loaded.notes), loaded.warnings)
    return Start()


def _open_files(
    trainer: Trainer, place: Place, plan: PlanReport, start: Start, arguments: Arguments, terminal: Terminal
) -> None:
    """Introduce the run, and begin what it writes, or go on with it."""
    config = trainer.config
    terminal.start(trainer.reporter.total_samples)
    scored_again = place.resuming and config.train.mode == "eval"  # the folder goes on telling how it was trained
    place.folder.start(None if scored_again else config.to_gin(), trainer.progress if place.resuming else None)
    terminal.configuration(config.values(), config.sources)
    for line in introduction(trainer, plan, place, start, arguments.resume):
        terminal.print(line)
    figures = mlperf_figures(trainer, arguments.config[-1])
    trainer.mlperf.begin(config, figures, trainer.progress if start.checkpoint else None)


def _train_and_evaluate(trainer: Trainer, signals: StopSignals) -> None:
    """What ``train.mode`` asks for; a run that is stopped between two steps saves where it stands."""
    config = trainer.config
    try:
        with signals.deferred():
            if config.train.mode != "eval":
                with trainer.reporter.watch.running():
                    trainer.fit()
            if config.train.mode != "train":
                trainer.evaluate()
            if config.checkpoint.at_end and config.train.mode != "eval":
                trainer.save()
    except Stopped as stopped:
        if config.checkpoint.enabled and stopped.together:
            trainer.save()
        raise


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


def _leave(world: World | None, outcome: Outcome) -> None:
    """Leave the process group; after a failure, not by way of the others, who may be waiting in an exchange."""
    if world is None:
        return
    if isinstance(outcome, (Finished, NothingToDo)) or world.size == 1:
        leave(world)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome.exit_status)
