"""The trainer's step on a GPU: what the host waits for."""

import types

import pytest
import torch

from generative_recommenders.train import build, datasets, distributed, gin_files
from generative_recommenders.train.loop import Trainer
from generative_recommenders.train.mlperf import EvalSchedule, MlperfLog
from generative_recommenders.train.signals import StopSignals

OPTIONS = {"model.backend": "None", "model.autocast": "'auto'", "train.batch_size": "8"}


@pytest.fixture
def gpu_world():
    joined = distributed.join(torch.device("cuda", 0))
    yield joined
    torch.distributed.destroy_process_group()


@pytest.fixture
def sync_debug_mode():
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("targets_only", [False, True])
def test_a_step_waits_for_nothing(small_config, gpu_world, sync_debug_mode, targets_only):
    config = gin_files.load([small_config({**OPTIONS, "model.last_layer_targets_only": str(targets_only)})])
    dataset = datasets.FACTORIES["tiny"]()
    model, optimizers, *_ = build.build_model(config, dataset, gpu_world)
    reporter = types.SimpleNamespace(start=lambda progress: None)
    mlperf = MlperfLog(None, EvalSchedule(0, 0))
    trainer = Trainer(config, dataset, model, optimizers, None, reporter, StopSignals(), mlperf, gpu_world)
    model.train()
    batches = trainer.batches(trainer.phases[0])
    for _ in range(2):  # kernels are compiled and handles made
        trainer.step(next(batches))
    torch.cuda.synchronize()
    sync_debug_mode("error")
    for _ in range(5):
        trainer.step(next(batches))
    sync_debug_mode("default")
    assert trainer.progress.step == 7 and trainer.running.loss.isfinite()
