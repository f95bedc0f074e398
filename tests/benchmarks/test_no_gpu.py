"""What measures a GPU says in one line that there is none."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEED_NO_GPU = {"common", "data", "data_read", "default_job", "movielens", "scaling", "summary", "targets_only_demo"}
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in NEED_NO_GPU)
COMMANDS = [[f"benchmarks/{name}.py"] for name in SCRIPTS] + [["-m", "generative_recommenders.ops.attention.tune"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: pathlib.Path(command[-1]).name)
def test_without_a_gpu_a_measurement_is_refused_in_one_line(command):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "NVIDIA GPU" in done.stderr
