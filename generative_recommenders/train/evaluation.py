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
) -> dict[str, BinaryResult | RegressionResult]:
    """Task → figures over the whole hold-out, equal on every rank. A collective call.

    Args:
        after_batch: called with the number of samples this rank has scored so far; may raise to stop.

    Raises:
        TrainingDiverged: a prediction is not a finite number.
    """
    was_training = model.training
    model.eval()
    collectors = {task: RegressionMetrics() if task in VALUE_TASKS else BinaryMetrics() for task in tasks}
    finite, scored = True, 0
    try:
        for batch in dataset.batches([dataset.holdout], batch_size, world.rank, world.size):
            output, batch = run_model(model, batch, world.device)
            finite = finite and bool(output.predictions.isfinite().all())
            users = batch.user_ids.repeat_interleave(output.num_targets, output_size=output.predictions.shape[1])
            for index, collector in enumerate(collectors.values()):
                collector.update(output.predictions[index], output.labels[index], users)
            scored += batch.batch_size
            after_batch(scored)
    finally:
        model.train(was_training)
    if world.sum_on_host(int(not finite))[0]:
        raise TrainingDiverged("predictions on the hold-out are not finite: lower the learning rates, or add warm-up")
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
