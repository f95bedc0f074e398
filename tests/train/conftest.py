"""Fixtures of the trainer's tests: the tiny data set, small configurations, and the trainer as a subprocess."""

import functools
import os
import pathlib
import runpy
import subprocess
import sys
import types

import pytest
import torch.distributed as dist

from generative_recommenders.train import datasets, distributed

LAUNCHER = pathlib.Path(__file__).with_name("launch_tiny.py")
REPO = LAUNCHER.parents[2]
tiny_module = runpy.run_path(str(LAUNCHER))
datasets.FACTORIES.setdefault("tiny", tiny_module["tiny"])


@pytest.fixture
def small_config(tmp_path):
    """Writes a gin file of a small run; dots in names as they are: ``small_config({"train.seed": "2"})``."""
    return functools.partial(write_config, tmp_path)


@pytest.fixture(scope="session")
def small_config_in():
    """``small_config`` for fixtures that outlive a test: the first argument is the folder."""
    return write_config


def write_config(folder, more=(), name="small.gin"):
    """A gin file of a small run in ``folder``; returns its path."""
    path = folder / name
    path.write_text(tiny_module["small_gin"](**dict(more)))
    return str(path)


@pytest.fixture
def world():
    """A process group of this process alone."""
    import torch

    joined = distributed.join(torch.device("cpu"))
    yield joined
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def trainer_process(tmp_path):
    """Runs the trainer in processes of its own: ``trainer_process("--config", …, ranks=2, env={…})``."""
    return functools.partial(launch, tmp_path)


@pytest.fixture(scope="session")
def launch_in():
    """``trainer_process`` for fixtures that outlive a test: the first argument is the folder to run in."""
    return launch


def launch(folder, *arguments, ranks=0, env=None, check=None, script=LAUNCHER):
    """The trainer as one or, under torchrun, several processes; ``check`` is the exit status it must have."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    command += [str(script), *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return types.SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)
