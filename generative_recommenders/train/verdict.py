"""The end of a run: whether it did what it was asked, and the figures that say how far it came."""

from __future__ import annotations

from typing import cast

import torch

from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.loop import Trainer
from generative_recommenders.train.metrics import BinaryResult, RegressionResult
from generative_recommenders.train.run_folder import Result


def shortfall(config: RunConfig, dataset: RankingDataset, trainer: Trainer) -> str | None:
    """Why the run did not do what it was asked, or ``None``."""
    train = config.train
    if train.mode == "train":
        return None
    task = config.model.tasks[0]
    result = cast(BinaryResult, trainer.evaluation[task])  # a task of values cannot be the first
    if result.one_class and (config.target_auc or train.beat_baseline or train.max_gap_to_best):
        return f"the hold-out has one class of {task} only: no AUC to compare"
    reached = trainer.target_reached if config.stops_at_target else result.reaches(config.target_auc)
    if config.target_auc and not reached:
        return f"AUC {result.auc:.4f} is below the target of {config.target_auc}"
    if train.beat_baseline:
        if dataset.baseline_auc is None:
            return f"train.beat_baseline is set, but data set {dataset.name} has no baseline"
        if result.auc <= dataset.baseline_auc:
            return f"AUC {result.auc:.4f} does not beat the baseline's {dataset.baseline_auc:.4f}"
    if train.max_gap_to_best:
        if dataset.best_auc is None:
            return f"train.max_gap_to_best is set, but data set {dataset.name} does not know the best reachable AUC"
        if result.auc < dataset.best_auc - train.max_gap_to_best:
            return (
                f"AUC {result.auc:.4f} is more than {train.max_gap_to_best} below the best reachable "
                f"{dataset.best_auc:.4f}"
            )
    return None


def closing_figures(result: Result, trainer: Trainer) -> list[tuple[str, str]]:
    """Name and value of every figure of the closing table and the report."""
    show = lambda value, otherwise="": otherwise if value is None else f"{value:.4f}"
    rows = []
    for task, figures in trainer.evaluation.items():
        if isinstance(figures, RegressionResult):
            rows += [(f"hold-out RMSE, {task}", show(figures.rmse)), (f"hold-out MAE, {task}", show(figures.mae))]
            continue
        rows += [
            (f"hold-out AUC, {task}", show(figures.auc)),
            (f"hold-out GAUC, {task}", show(figures.gauc)),
            (f"hold-out NE, {task}", show(figures.ne)),
            (f"hold-out accuracy, {task}", show(figures.accuracy)),
            (f"hold-out calibration, {task}", show(figures.calibration)),
            (f"hold-out samples, {task}", f"{figures.samples:,}"),
        ]
    none_seen = "no evaluation with both classes" if result.auc else "no evaluation"
    rows += [
        ("baseline AUC", show(result.baseline_auc, "this data set has no baseline")),
        ("best reachable AUC", show(result.best_auc, "only generated data tells it")),
        ("best AUC seen in this run", show(result.auc_best_seen, none_seen)),
        ("samples trained", f"{result.samples:,}"),
        ("steps", f"{trainer.progress.step:,}"),
        ("rows the last layer computed", trainer.meter.decision),
        *_peak_memory(trainer),
        *_peak_speed(trainer),
    ]
    if trainer.progress.step:
        rows.append(("seconds, training alone", f"{trainer.reporter.watch.seconds:,.1f}"))
    return [*rows, ("seconds, everything", f"{result.seconds:,.1f}")]


def _peak_memory(trainer: Trainer) -> list[tuple[str, str]]:
    """The most that PyTorch's allocator held at once on rank 0's GPU."""
    if trainer.world.device.type != "cuda":
        return []
    return [("peak memory of a GPU", f"{torch.cuda.max_memory_allocated(trainer.world.device) / 1e9:.2f} GB")]


def _peak_speed(trainer: Trainer) -> list[tuple[str, str]]:
    """What MFU and HFU of the metrics divide by."""
    peak = trainer.meter.peak
    return [] if peak is None else [("peak that MFU and HFU divide by", peak.in_words)]
