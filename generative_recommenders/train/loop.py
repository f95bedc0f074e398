"""The training loop: windows in, steps, evaluations and checkpoints out.

Read ``Trainer.fit`` first; everything below it is one line of it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from generative_recommenders.data.batch import Batch
from generative_recommenders.data.dataset import RankingDataset, Window
from generative_recommenders.train import randomness
from generative_recommenders.train.checkpoint import Checkpointer, Restored
from generative_recommenders.train.distributed import World
from generative_recommenders.train.evaluation import (
    OF_LOADED_WEIGHTS,
    WHILE_TRAINING,
    TrainingDiverged,
    evaluate,
    run_model,
)
from generative_recommenders.train.evaluation_schedule import EvalSchedule
from generative_recommenders.train.flop_meter import FlopMeter
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.metrics import BinaryResult, RegressionResult
from generative_recommenders.train.mlperf import MlperfLog, benchmark_schedule
from generative_recommenders.train.optimizers import Optimizers
from generative_recommenders.train.progress import Progress
from generative_recommenders.train.reporting import Reporter
from generative_recommenders.train.signals import StopSignals


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training between two natural stops: a pass over the windows, or one window when streaming."""

    windows: tuple[Window, ...]
    shuffle_seed: int | None
    evaluate_after: bool

    @property
    def num_samples(self) -> int:
        """Samples of all its windows."""
        return sum(window.num_samples for window in self.windows)


def plan_phases(config: RunConfig, windows: list[Window]) -> list[Phase]:
    """The run as phases: one per epoch, or one per epoch and window when streaming."""
    train = config.train
    # MLPerf counts whole steps, so there a batch runs on across the end of a window; the order of samples is the same.
    streaming = train.mode == "streaming-train-eval" and not config.mlperf.enabled
    every = train.eval_every_windows if streaming else train.eval_every_epochs
    if config.mlperf.enabled:
        every = 0  # its own schedule alone
    phases: list[Phase] = []
    for epoch in range(train.epochs):
        seed = randomness.stream_seed(train.seed, "shuffle", epoch) if train.shuffle else None
        for part in [(window,) for window in windows] if streaming else [tuple(windows)]:
            phases.append(Phase(part, seed, evaluate_after=bool(every) and (len(phases) + 1) % every == 0))
    return phases


def evaluation_schedule(config: RunConfig, world: World) -> EvalSchedule:
    """Evaluations by samples trained: MLPerf's where that is on."""
    if config.mlperf.enabled:
        return benchmark_schedule(config.train.batch_size * world.size, config.mlperf)
    return EvalSchedule(config.train.eval_every_samples, config.train.eval_every_samples)


class RunningLoss:
    """Sums since the last line of metrics: loss over samples, tokens, and the first step that was not finite.

    What the host knows is counted on the host; the loss is summed on the device, without waiting for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # loss · samples
        self.samples = self.tokens = 0
        self.first_bad_step = torch.full((), -1, dtype=torch.int64, device=device)

    def add(self, step: int, loss: torch.Tensor, norm: torch.Tensor, samples: int, tokens: int) -> None:
        """Count one step of this rank."""
        self.loss += loss.detach().double() * samples
        self.samples += samples
        self.tokens += tokens
        bad = ~(loss.detach().isfinite() & norm.isfinite()) & (self.first_bad_step < 0)
        self.first_bad_step = torch.where(bad, step, self.first_bad_step)

    def state(self) -> torch.Tensor:
        """The sums, for a checkpoint."""
        return torch.tensor([self.loss.item(), self.samples, self.tokens], dtype=torch.float64)

    def load_state(self, state: torch.Tensor) -> None:
        """The inverse of ``state``."""
        self.loss.fill_(state[0].item())
        self.samples, self.tokens = int(state[1]), int(state[2])

    def check(self, world: World) -> None:
        """Raise ``TrainingDiverged`` on every rank if any rank saw a loss or gradient that is not finite."""
        bad = [step for step in world.gather(int(self.first_bad_step)) if step >= 0]
        if bad:
            raise TrainingDiverged(
                f"loss or gradient is not finite since step {min(bad)}: lower optimizer.dense_lr or "
                "optimizer.sparse_lr, add optimizer.warmup_steps, or set optimizer.clip_norm"
            )

    def drain(self, world: World) -> tuple[float, float]:
        """Mean loss over the samples of all ranks and tokens of all ranks; starts anew."""
        loss, samples, tokens = (sum(column) for column in zip(*world.gather(self.state().tolist()), strict=True))
        self.load_state(torch.zeros(3))
        return loss / max(samples, 1), tokens


class Trainer:
    """One run on one rank: owns the loop's state and calls the components in order."""

    def __init__(
        self,
        config: RunConfig,
        dataset: RankingDataset,
        model: nn.Module,
        optimizers: Optimizers,
        checkpointer: Checkpointer,
        reporter: Reporter,
        signals: StopSignals,
        mlperf: MlperfLog,
        world: World,
    ) -> None:
        self.config, self.dataset, self.model, self.optimizers = config, dataset, model, optimizers
        self.checkpointer, self.reporter, self.signals, self.world = checkpointer, reporter, signals, world
        self.mlperf, self.schedule = mlperf, evaluation_schedule(config, world)
        self.phases = plan_phases(config, dataset.windows)
        self.progress = Progress()
        self.running = RunningLoss(world.device)
        self.meter = FlopMeter(model, world)
        self.evaluation: dict[str, BinaryResult | RegressionResult] = {}
        self.learning_rate = 0.0
        self._last_checkpoint = time.monotonic()
        randomness.seed_dropout(config.train.seed, world.rank)

    def resume(self, restored: Restored) -> None:
        """Go on where a checkpoint left off."""
        self.progress = restored.progress
        self.reporter.start(self.progress)
        if restored.ranks_before != self.world.size:
            self.reporter.say(
                f"warning: saved by {restored.ranks_before} ranks, resumed on {self.world.size}: "
                "dropout draws from new streams"
            )
        if restored.local:
            self.running.load_state(restored.local["running"])
            self.meter.load_state(restored.local["meter"])

    def samples_at_end(self) -> int:
        """Samples trained when the run ends by itself; those before a resume were in batches of any size."""
        train = self.config.train
        batch = train.batch_size * self.world.size
        steps = train.max_steps - self.progress.step if train.max_steps else sys.maxsize
        total, done = self.progress.samples, self.progress.samples_in_phase
        for phase in self.phases[self.progress.phase :]:
            left = phase.num_samples - done
            needed = -(-left // batch)
            total += left if needed <= steps else max(steps, 0) * batch
            steps, done = steps - needed, 0
        return 0 if train.mode == "eval" else total

    def evaluations_left(self) -> int:
        """Evaluations still to come when the run ends by itself."""
        if self.config.train.mode == "train":
            return 0
        samples, end, schedule = self.progress.samples, self.samples_at_end(), self.schedule
        places, at = {end}, samples - self.progress.samples_in_phase
        for phase in self.phases[self.progress.phase :]:
            at += phase.num_samples
            if phase.evaluate_after and at < end:
                places.add(at)
        if schedule.every:
            point = schedule.first if samples < schedule.first else (samples // schedule.every + 1) * schedule.every
            places.update(range(point, end, schedule.every))
        return sum(place > samples for place in places)

    @torch.no_grad()
    def rehearse(self) -> None:
        """One batch through the model, so that what cannot work is said before the run begins; draws no numbers."""
        windows = [self.dataset.holdout] if self.config.train.mode == "eval" else self.dataset.windows
        batches = self.dataset.batches(windows, 1, self.world.rank, self.world.size)
        self.model.eval()
        run_model(self.model, next(iter(batches)), self.world.device)
        self.model.train()

    def fit(self) -> None:
        """Train through all phases, evaluating and saving on the way; ends early at the step limit or the target."""
        self.model.train()
        if self.done():
            return  # a run resumed where it had ended
        self.evaluate_if_due()  # one that a signal cut short
        for phase in self.phases[self.progress.phase :]:
            for batch in self.batches(phase):
                self.step(batch)
                self.log_if_due()
                self.evaluate_if_due()
                self.save_if_due()
                if self.done():
                    return self.log_rest()
            self.end_phase(phase)
            if self.done():
                return

    def batches(self, phase: Phase) -> Iterator[Batch]:
        """This rank's batches of what is left of the phase."""
        return self.dataset.batches(
            phase.windows,
            self.config.train.batch_size,
            self.world.rank,
            self.world.size,
            shuffle_seed=phase.shuffle_seed,
            start_sample=self.progress.samples_in_phase,
        )

    def step(self, batch: Batch) -> None:
        """One optimizer step over the global batch: every sample weighs the same, on whichever rank it is."""
        (samples,) = self.signals.check(self.world, batch.batch_size)
        self.learning_rate = self.optimizers.start_step(self.progress.step)
        output, batch = run_model(self.model, batch, self.world.device)
        # Ranks' gradients are averaged, so a rank's mean loss counts by its share of the global batch.
        (output.loss * (batch.batch_size * self.world.size / samples)).backward()
        norm = self.optimizers.finish_step()
        self.running.add(self.progress.step, output.loss, norm, batch.batch_size, output.num_tokens)
        self.meter.add(output)
        self.progress.step += 1
        self.progress.samples += samples
        self.progress.samples_in_phase += samples

    def log_if_due(self) -> None:
        """Every ``log_every`` steps, a line of metrics; the moment at which a loss gone bad is noticed."""
        if self.progress.step % self.config.train.log_every == 0:
            self.log()

    def log(self) -> None:
        """A line of metrics over the steps since the last one."""
        self.running.check(self.world)
        loss, tokens = self.running.drain(self.world)
        seconds = self.reporter.lap()
        figures = {"loss": loss, "learning_rate": self.learning_rate, **self.meter.drain(seconds)}
        self.reporter.training(self.progress, figures, tokens, seconds, self.evaluations_left())
        self.progress.logged_step = self.progress.step

    def log_rest(self) -> None:
        """The steps that no line of metrics has yet."""
        if self.progress.step > self.progress.logged_step:
            self.log()

    def evaluate_if_due(self) -> None:
        """By samples trained."""
        due = self.schedule.due(self.progress.samples, self.progress.samples_at_last_eval)
        if due and self.config.train.mode != "train":
            self.evaluate()

    def evaluate(self) -> None:
        """Score the hold-out, once per place in the training (again, for its result, in a run resumed right there)."""
        again = self.progress.samples_at_last_eval == self.progress.samples
        if again and self.evaluation:
            return
        self.running.check(self.world)
        train = self.config.train
        batch_size = train.eval_batch_size or train.batch_size
        advice = OF_LOADED_WEIGHTS if train.mode == "eval" else WHILE_TRAINING

        def after_batch(scored: int) -> None:
            self.signals.check(self.world)
            self.reporter.scored(scored, self.dataset.holdout.num_samples)

        if not again:
            self.mlperf.eval_start(self.progress.samples)
        began = time.monotonic()
        with self.reporter.watch.paused():
            results = evaluate(
                self.model, self.dataset, self.config.model.tasks, batch_size, self.world, after_batch, advice
            )
        self.reporter.evaluation_seconds = time.monotonic() - began
        main = cast(BinaryResult, results[self.config.model.tasks[0]])  # a task of values cannot be the first
        if not main.one_class:
            self.progress.best_auc = max(main.auc, self.progress.best_auc or 0.0)
        self.evaluation = results
        self.progress.samples_at_last_eval = self.progress.samples
        self.reporter.evaluation(self.progress, results, logged=again)
        if not again:
            self.mlperf.eval_stop(self.progress.samples, main.auc)

    def end_phase(self, phase: Phase) -> None:
        """Evaluate and save where a window or a pass ends, and move on."""
        self.log_rest()
        if phase.evaluate_after and self.config.train.mode != "train":
            self.evaluate()
        self.progress.phase += 1
        self.progress.samples_in_phase = 0
        every = self.config.checkpoint.every_windows
        if every and self.progress.phase % every == 0:
            self.save()

    def save_if_due(self) -> None:
        """By steps or by time; rank 0's clock decides for all."""
        options = self.config.checkpoint
        due = bool(options.every_steps) and self.progress.step % options.every_steps == 0
        if options.every_seconds and not due:
            late = self.world.is_main and time.monotonic() - self._last_checkpoint >= options.every_seconds
            due = bool(self.world.sum_on_host(int(late))[0])
        if due:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, unless the state is already bad."""
        self.running.check(self.world)
        self.progress.seconds, self.progress.seconds_in_all = self.reporter.watch.seconds, self.reporter.seconds_in_all
        with self.reporter.watch.paused(), self.signals.patient():
            path = self.checkpointer.save(
                self.model,
                self.optimizers,
                self.progress,
                {"running": self.running.state(), "meter": self.meter.state()},
            )
        self._last_checkpoint = time.monotonic()
        self.reporter.saved(path)

    @property
    def target_reached(self) -> bool:
        """Whether any evaluation of this run, also before it was resumed, reached the target AUC."""
        return bool(self.config.target_auc) and (self.progress.best_auc or 0.0) >= self.config.target_auc

    def done(self) -> bool:
        """Whether the step limit or, if that ends the run, the target is reached."""
        limit = self.config.train.max_steps
        at_limit = bool(limit) and self.progress.step >= limit
        return at_limit or (self.config.stops_at_target and self.target_reached)
