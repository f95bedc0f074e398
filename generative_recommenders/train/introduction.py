"""What a run says before it begins: its configuration, its data and model, what it goes on from, what may surprise."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.train.flops import MFU_NOTE
from generative_recommenders.train.loop import Trainer
from generative_recommenders.train.mlperf import departures
from generative_recommenders.train.place import Place
from generative_recommenders.train.plan_report import PlanReport, compact_lines

SHARES_NOTE = "fill: FLOPs of the real lengths over those of a padded batch; exec: FLOPs executed over the same"


@dataclasses.dataclass(frozen=True)
class Start:
    """What the weights are at the beginning.

    Attributes:
        checkpoint: the one that the run goes on from, or ``None``.
        notes, warnings: what reading weights has to say.
    """

    checkpoint: pathlib.Path | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def introduction(trainer: Trainer, plan: PlanReport, place: Place, start: Start, resume: str) -> Iterator[str]:
    """The lines below the configuration. ``resume``: as the command line says it."""
    config, world, meter = trainer.config, trainer.world, trainer.meter
    yield from _data_and_model(trainer)
    yield f"{world.size} x {world.device.type}, run folder {place.folder.path}"
    yield from compact_lines(plan)
    yield f"{SHARES_NOTE}; {MFU_NOTE if meter.peak is not None else meter.why_no_peak}"
    if meter.peak is not None:
        yield f"peak that MFU and HFU divide by: {meter.peak.in_words}"
    yield from start.notes
    for warning in start.warnings:
        yield f"warning: {warning}"
    if config.mlperf.enabled:
        for departure in departures(config, config.train.batch_size * world.size):
            yield f"warning: outside MLPerf's closed division: {departure}"
    if resume == "auto" and not config.checkpoint.enabled:
        yield "warning: --resume=auto can only begin again without checkpoints: see checkpoint.every_steps"
    if place.resuming:
        nothing = "from the beginning: the run has no complete checkpoint"
        where = nothing if start.checkpoint is None else f"from {start.checkpoint}"
        yield f"resuming {where} (step {trainer.progress.step:,})"


def _data_and_model(trainer: Trainer) -> Iterator[str]:
    dataset: RankingDataset = trainer.dataset
    yield from dataset.notes
    train = sum(window.num_samples for window in dataset.windows)
    unused = dataset.cache.num_anchors - train - dataset.holdout.num_samples
    yield (
        f"{dataset.name}: {train:,} training samples in {len(dataset.windows)} windows, "
        f"{dataset.holdout.num_samples:,} in the hold-out" + (f", {unused:,} in neither" if unused else "")
    )
    parameters = sum(p.numel() for p in trainer.optimizers.dense_parameters.values())
    rows = sum(dataset.schema.table_rows.values())
    yield f"model: {parameters:,} dense parameters, {rows:,} rows of embedding tables"
