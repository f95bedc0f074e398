"""Tables in host memory behind a cache on the GPU: the same numbers as on the device, saved and loaded as such."""

import json

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from generative_recommenders.train.__main__ import main

pytestmark = pytest.mark.gpu

STEPS = {"train.max_steps": "8", "train.log_every": "1", "checkpoint.at_end": "True", "train.epochs": "2"}
HOST = {"sharding.tables": "{'uid': 'host'}", "sharding.host_memory_gb": "40.0"}


@pytest.fixture
def run(small_config, tmp_path, monkeypatch):
    """Trains and returns (losses, tensors of the checkpoint)."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def train(name, more):
        torch.use_deterministic_algorithms(True)
        try:
            config = small_config({**STEPS, **more}, f"{name}.gin")
            arguments = ["--config", config, "--device", "cuda", "--runs-dir", str(tmp_path), "--run-name", name]
            assert main(arguments) == 0
        finally:
            torch.use_deterministic_algorithms(False)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        folder = max((tmp_path / name / "checkpoints").glob("step_*"))
        dcp_to_torch_save(folder, tmp_path / f"{name}.pt")
        flat = {}

        def walk(prefix, value):
            for key, inner in value.items() if isinstance(value, dict) else ():
                walk(f"{prefix}/{key}", inner)
            if isinstance(value, torch.Tensor):
                flat[prefix] = value

        walk("", torch.load(tmp_path / f"{name}.pt", weights_only=False))
        return [row["loss"] for row in rows if row["kind"] == "train"], flat

    return train


def test_host_and_device_train_to_the_same_bits(run):
    device, host = run("device", {}), run("host", HOST)
    assert device[0] == host[0]
    assert device[1].keys() == host[1].keys()
    assert any("uid" in name for name in host[1])
    for name, tensor in device[1].items():
        assert torch.equal(tensor, host[1][name]), name


def test_weights_of_a_table_in_host_memory_load_again(run, tmp_path):
    """The cache must hold nothing older than what was loaded: the same losses as weights loaded on the device."""
    run("host", HOST)
    load = {"checkpoint.load": f"'{tmp_path / 'host'}'", "train.max_steps": "3"}
    assert run("again", {**HOST, **load})[0] == run("device", load)[0]
