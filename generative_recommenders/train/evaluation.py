"""Scoring the hold-out: every sample exactly once, over all ranks, whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from generative_recommenders.data.batch import Batch
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.modules.dlrm_hstu import DlrmOutput
from generative_recommenders.ops.candidate_attention import TargetSummary
from generative_recommenders.train.config import VALUE_TASKS
from generative_recommenders.train.distributed import World
from generative_recommenders.train.metrics import BinaryMetrics, BinaryResult, RegressionMetrics, RegressionResult

WHILE_TRAINING = "lower the learning rates, or add warm-up"
OF_LOADED_WEIGHTS = "the weights are those of a run that diverged, or damaged; evaluate an earlier checkpoint"


class TrainingDiverged(RuntimeError):
    """Loss, gradients or predictions are no longer finite numbers."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: RankingDataset,
    tasks: tuple[str, ...],
    batch_size: int,
    world: World,
    after_batch: Callable[[int], None] = lambda samples: None,
    advice: str = WHILE_TRAINING,
) -> dict[str, BinaryResult | RegressionResult]:
    """Task → figures over the whole hold-out, equal on every rank. A collective call.

    Args:
        after_batch: called with the number of samples this rank has scored so far; may raise to stop.
        advice: what to do if predictions are not finite numbers.

    Raises:
        TrainingDiverged: a logit or a predicted value is not a finite number (nothing is ranked then).
    """
    was_training = model.training
    model.eval()
    collectors = {task: RegressionMetrics() if task in VALUE_TASKS else BinaryMetrics() for task in tasks}
    not_finite, scored = torch.zeros(len(tasks), dtype=torch.int64), 0
    try:
        for batch in dataset.batches([dataset.holdout], batch_size, world.rank, world.size):
            output, batch = run_model(model, batch, world.device)
            not_finite += (~output.logits.isfinite()).sum(dim=1).cpu()
            assert output.labels is not None  # every data set's candidates carry them
            users = batch.user_ids.repeat_interleave(output.num_targets, output_size=output.logits.shape[1])
            for index, collector in enumerate(collectors.values()):
                collector.update(output.logits[index], output.labels[index], users)
            scored += batch.batch_size
            after_batch(scored)
    finally:
        model.train(was_training)
    for task, count in zip(tasks, world.sum_on_host(*not_finite.tolist()), strict=True):
        if count:
            raise TrainingDiverged(f"{task}: {count:,} predictions on the hold-out are not finite numbers: {advice}")
    return {task: collector.compute(world) for task, collector in collectors.items()}


def run_model(model: nn.Module, batch: Batch, device: torch.device) -> tuple[DlrmOutput, Batch]:
    """A host batch through the model: its output, and the batch on the device.

    Candidate counts are handed over from the host, where they are, so that the targets-only gate waits for no GPU.
    """
    counts = TargetSummary.of(batch.candidates.lengths()[: batch.batch_size])
    batch = to_device(batch, device)
    return model(batch.uih, batch.candidates, target_counts=counts), batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; through page-locked memory on a GPU, so that the copy does not block."""
    if device.type == "cuda":
        return batch.pin_memory().to(device, non_blocking=True)
    return batch
