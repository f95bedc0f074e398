"""MLPerf Training for the dlrmv4 benchmark: its evaluation schedule, and its event log through ``mlperf-logging``.

The schedule follows the global batch size (rules of the 6.1 round, restated from its compliance checker): the grid is
a thousandth of an epoch, rounded up to whole steps; the first evaluation is the first point of the grid at or after
(4480 · GBS + 135,331,840) / 3 samples.
"""

from __future__ import annotations

import json
import logging
import math
import pathlib
import time
from typing import Any

from generative_recommenders.errors import UserError
from generative_recommenders.train.config import MlperfConfig
from generative_recommenders.train.evaluation_schedule import EvalSchedule
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.progress import Progress

BENCHMARK = "dlrmv4"
TRAIN_SAMPLES = 2_290_835_423
EVAL_EVERY_SHARE = 0.001
WARMUP_STEPS = 24_000
OF_AN_EVALUATION = ("block_stop", "eval_start", "eval_accuracy", "eval_stop")


def benchmark_schedule(global_batch_size: int, config: MlperfConfig | None = None) -> EvalSchedule:
    """The benchmark's schedule for a batch size; values that ``config`` sets replace the computed ones."""
    every = math.ceil(EVAL_EVERY_SHARE * TRAIN_SAMPLES / global_batch_size) * global_batch_size
    if config is not None and config.eval_interval_samples:
        every = config.eval_interval_samples
    first = math.ceil((4480 * global_batch_size + 135_331_840) // 3 / every) * every
    if config is not None and config.first_eval_samples:
        first = config.first_eval_samples
    return EvalSchedule(first, every)


def learning_rate_range(global_batch_size: int) -> tuple[float, float]:
    """Lowest and highest learning rate that the closed division admits."""
    reference = 1e-6 * global_batch_size / 8192
    return 0.5 * reference, 1.5 * reference


def departures(config: RunConfig, global_batch_size: int) -> list[str]:
    """What of a configuration the closed division would not accept, in words."""
    o, found = config.optimizer, []
    low, high = learning_rate_range(global_batch_size)
    if not low * (1 - 1e-9) <= o.dense_lr <= high * (1 + 1e-9):
        found.append(f"optimizer.dense_lr = {o.dense_lr} is outside {low:.3g} to {high:.3g}")
    wanted = {
        "sparse_lr": o.dense_lr,
        "beta1": 0.95,
        "beta2": 0.999,
        "eps": 1e-8,
        "clip_norm": 1.0,
        "weight_decay": 0.0,
        "warmup_steps": WARMUP_STEPS,
        "warmup_start": 0.0,
        "decay_until_step": 0,
    }
    found += [
        f"optimizer.{name} = {getattr(o, name)} is not {value}"
        for name, value in wanted.items()
        if getattr(o, name) != value
    ]
    computed, used = benchmark_schedule(global_batch_size), benchmark_schedule(global_batch_size, config.mlperf)
    if computed != used:
        found.append(
            f"evaluations at {used.first:,} and every {used.every:,} samples, not at {computed.first:,} and every "
            f"{computed.every:,}"
        )
    return found


class MlperfLog:
    """The event log of one run. Disabled or on ranks other than 0 it does nothing.

    A fresh run starts the file anew and a resumed one goes on in it, so that every once-only event stands there once.
    """

    def __init__(self, path: pathlib.Path | None, schedule: EvalSchedule) -> None:
        self._path, self._schedule = path, schedule
        self._log: Any = None
        self._init_ms = int(time.time() * 1e3)
        self._in_block = False

    def begin(self, config: RunConfig, figures: dict[str, object], resumed_at: Progress | None) -> None:
        """Everything up to the start of the clock.

        Args:
            figures: ``global_batch_size``, ``eval_samples``, ``max_sequence_length``, ``precision``.
            resumed_at: where a resumed run goes on; ``None`` for a fresh one.
        """
        if self._path is None:
            return
        fresh = resumed_at is None or not self._path.exists()
        if resumed_at is not None and not fresh:
            _forget_after(self._path, resumed_at)
        self._log = _open(self._path, fresh)
        if fresh:
            self._announce(config, figures)
        self._start_block(resumed_at.samples if resumed_at else 0)

    def _announce(self, config: RunConfig, figures: dict[str, object]) -> None:
        o, log = config.optimizer, self._log
        log.event("cache_clear", True, time_ms=self._init_ms)
        log.start("init_start", time_ms=self._init_ms)
        facts = {
            "submission_benchmark": BENCHMARK,
            "submission_org": "generative-recommenders",
            "submission_platform": figures["platform"],
            "submission_division": "closed",
            "submission_status": "research",
            "seed": config.train.seed,
            "global_batch_size": figures["global_batch_size"],
            "micro_batch_size": config.train.batch_size,
            "gradient_accumulation_steps": 1,
            "train_samples": figures["train_samples"],
            "eval_samples": figures["eval_samples"],
            "max_sequence_length": figures["max_sequence_length"],
            "opt_name": "Adam" if not o.weight_decay else "AdamW",
            "opt_base_learning_rate": o.dense_lr,
            "opt_adam_beta_1": o.beta1,
            "opt_adam_beta_2": o.beta2,
            "opt_adam_epsilon": o.eps,
            "opt_weight_decay": o.weight_decay,
            "opt_gradient_clip_norm": o.clip_norm,
            "opt_sparse_name": "RowWiseAdagrad",
            "opt_sparse_base_learning_rate": o.sparse_lr,
            "opt_learning_rate_warmup_steps": o.warmup_steps,
            "opt_learning_rate_warmup_start_lr": o.warmup_start * o.dense_lr,
            "eval_every_data_pct": EVAL_EVERY_SHARE,
            "lowest_numerical_precision_in_linear": figures["precision"],
            "lowest_numerical_precision_in_attn": figures["precision"],
            "lowest_numerical_precision_in_comm": figures["wire_precision"],
            "tensor_parallelism": 1,
            "pipeline_parallelism": 1,
            "context_parallelism": 1,
            "expert_parallelism": 1,
            "config_filename": figures["config_filename"],
        }
        for key, value in facts.items():
            log.event(key, value)
        log.end("init_stop")
        log.start("run_start")

    def _start_block(self, samples: int) -> None:
        self._in_block = True
        self._log.start("block_start", metadata={"samples_count": samples})

    def _stop_block(self, samples: int) -> None:
        if self._in_block:
            self._log.end("block_stop", metadata={"samples_count": samples})
        self._in_block = False

    def eval_start(self, samples: int) -> None:
        """An evaluation begins; off the schedule's grid nothing is logged."""
        if self._log is None or not self._schedule.on_grid(samples):
            return
        self._stop_block(samples)
        self._log.start("eval_start", metadata={"samples_count": samples})

    def eval_stop(self, samples: int, auc: float) -> None:
        """An evaluation ended with this AUC."""
        if self._log is None or not self._schedule.on_grid(samples):
            return
        self._log.event("eval_accuracy", auc, metadata={"samples_count": samples})
        self._log.end("eval_stop", metadata={"samples_count": samples})
        self._start_block(samples)

    def end(self, samples: int, success: bool) -> None:
        """The clock stops, once; ``success`` only if the target was met. A resumed run takes an abort back."""
        if self._log is None:
            return
        status = "success" if success else "aborted"
        self._stop_block(samples)
        self._log.end("run_stop", metadata={"status": status, "samples_count": samples})
        self.close()

    def close(self) -> None:
        """Close the file without an event: a resumed run goes on in it."""
        if self._log is None:
            return
        logger, self._log = self._log.logger, None
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()


def _forget_after(path: pathlib.Path, progress: Progress) -> None:
    """Drop what an earlier attempt logged past the checkpoint: later evaluations, one cut short, and its end."""
    samples, evaluated = progress.samples, progress.samples_at_last_eval
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line.split(":::MLLOG ", 1)[1])
        except (IndexError, ValueError):
            continue  # a line cut off by a kill
        count = (event.get("metadata") or {}).get("samples_count", 0)
        unfinished = count > evaluated and event["key"] in OF_AN_EVALUATION
        if event["key"] == "run_stop" and kept and '"block_stop"' in kept[-1]:
            kept.pop()  # it was not an evaluation that ended this block
        if event["key"] == "run_stop" or count > samples or unfinished:
            continue
        kept.append(line)
    while kept and '"block_start"' in kept[-1]:
        kept.pop()  # the resumed run starts this block itself
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


class _Handler(logging.FileHandler):
    """Raises what logging would print and forget: a log with a line missing is no record of a run."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # logging calls this while it handles the exception


def _open(path: pathlib.Path, fresh: bool):
    """An ``MLLogger`` that writes to one file of its own."""
    try:
        from mlperf_logging.mllog.mllog import MLLogger
    except ImportError as exc:
        raise UserError(f"mlperf.enabled = True: {exc}; pip install mlperf-logging") from None
    logger = logging.Logger(f"mlperf.{path}", logging.INFO)
    handler = _Handler(path, mode="w" if fresh else "a", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    return MLLogger(logger, root_dir=str(pathlib.Path(__file__).parents[2]))
