"""Fixtures of the trainer's tests: the tiny data set, small configurations, and the trainer as a subprocess."""

import os
import pathlib
import runpy
import socket
import subprocess
import sys
import types

import pytest
import torch.distributed as dist

from generative_recommenders.train import datasets, distributed

LAUNCHER = pathlib.Path(__file__).with_name("launch_tiny.py")
REPO = LAUNCHER.parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
tiny_module = runpy.run_path(str(LAUNCHER))
datasets.FACTORIES.setdefault("tiny", tiny_module["tiny"])


@pytest.fixture
def small_config(tmp_path):
    """Writes a gin file of a small run; dots in names as they are: ``small_config({"train.seed": "2"})``."""

    def write(more=(), name="small.gin"):
        path = tmp_path / name
        path.write_text(tiny_module["small_gin"](**dict(more)))
        return str(path)

    return write


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

    def run(*arguments, ranks=0, env=None, check=None, script=LAUNCHER, launcher=()):
        command = [sys.executable]
        if ranks:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *launcher]
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
            "PYTHONPATH": PYTHONPATH,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        command += [str(script), *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        if check is not None:
            assert done.returncode == check, done.stdout + done.stderr
        return types.SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture
def ranks_by_hand(tmp_path):
    """Starts ranks without torchrun: ``ranks_by_hand(arguments, [environment of rank 0, …])`` → their processes."""
    started = []

    def start(arguments, environments, script=LAUNCHER):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, more in enumerate(environments):
            launcher = {"RANK": rank, "WORLD_SIZE": len(environments), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = {name: str(value) for name, value in {**launcher, **more}.items()}
            environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **own}
            pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
            command = [sys.executable, str(script), *map(str, arguments)]
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
        return started

    yield start
    for process in started:
        process.kill()  # also one that was stopped
        process.communicate()
