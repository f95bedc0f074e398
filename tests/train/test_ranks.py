"""Two processes over gloo: the same numbers as one, the same weights on both, a clean end."""

import json
import pathlib

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from generative_recommenders.train.__main__ import main

NO_DROPOUT = {"model.input_dropout_ratio": "0.0", "model.output_dropout_ratio": "0.0"}


def checkpoint_tensors(run, tmp_path):
    """All tensors of the newest checkpoint of a run, shards put together: name → tensor."""
    folder = max((run / "checkpoints").glob("step_*"))
    whole = tmp_path / f"{run.name}.pt"
    dcp_to_torch_save(folder, whole)
    flat = {}

    def walk(prefix, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}/{key}", inner)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    walk("", torch.load(whole, weights_only=False))
    return flat


def result_of(run):
    return json.loads((run / "result.json").read_text())


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_metrics_and_exchanges_of_two_processes(trainer_process):
    done = trainer_process(ranks=2, script=pathlib.Path(__file__).with_name("two_ranks.py"), check=0)
    found = json.loads(next(line for line in done.out.splitlines() if line.startswith("{")))
    assert found["rank 0 good, rank 1 bad"] == 1.0
    assert found["ties"] == 0.5
    assert found["one class"] is True
    assert found["unequal counts"] == 4
    assert found["one rank empty"] == 1.0
    assert found["sum"] == [3, 10]
    assert found["gather"] == ["rank 0", "rank 1"]


COMMON = {**NO_DROPOUT, "train.epochs": "2", "checkpoint.at_end": "True", "optimizer.warmup_steps": "5"}
NARROW = {**NO_DROPOUT, "model.embedding_dim": "256", "train.max_steps": "4", "train.log_every": "1"}


def sharded(how, *tables):
    return {"sharding.tables": repr(dict.fromkeys(tables, how))}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, small_config_in, launch_in):
    """One launch of two ranks with four runs in it, the last of them wrong; and two runs of this process alone."""
    folder = tmp_path_factory.mktemp("ranks")
    write = lambda name, *more: small_config_in(folder, {k: v for m in more for k, v in m.items()}, f"{name}.gin")
    two = {"train.batch_size": "32"}
    wire = {"train.batch_size": "16", "checkpoint.at_end": "True", "sharding.wire_precision": "'float16'"}
    runs = {
        "row_wise": write("row_wise", COMMON, two, sharded("row_wise", "uid", "item_id", "genre")),
        "table_wise": write("table_wise", COMMON, two, sharded("table_wise", "uid", "item_id", "genre")),
        "narrow": write("narrow", NARROW, wire, sharded("column_wise", "uid", "item_id")),
        "wrong --bind train.sed=1": write("wrong"),
    }
    line = " --and ".join(f"--config {config} --run-name {name}" for name, config in runs.items())
    done = launch_in(folder, *line.split(), ranks=2)
    alone = {
        "one": write("one", COMMON, {"train.batch_size": "64"}),
        "wide": write("wide", NARROW, {"train.batch_size": "32"}),
    }
    for name, config in alone.items():
        assert main(["--config", config, "--runs-dir", str(folder / "runs"), "--run-name", name]) == 0
    return folder / "runs", done


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_two_ranks_train_as_one_does(two_ranks, tmp_path, sharding):
    """Two passes over 198 samples: the last global batch is short, so that rank 1 has an empty one."""
    runs, done = two_ranks
    assert "terminate called" not in done.err
    a, b = (checkpoint_tensors(runs / name, tmp_path) for name in ("one", sharding))
    assert set(a) == set(b)
    assert any("embeddings.uid" in name for name in a) and any("momentum" in name for name in a)
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=2e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    results = [result_of(runs / name) for name in ("one", sharding)]
    assert results[0]["samples"] == results[1]["samples"] == 2 * 198
    assert results[0]["auc"]["listen_plus"] == pytest.approx(results[1]["auc"]["listen_plus"], abs=2e-3)
    rows = [
        [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", sharding)
    ]
    for first, second in zip(*rows, strict=True):
        assert first["samples"] == second["samples"]
        if first["kind"] == "train":
            assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)
            assert first["learning_rate"] == second["learning_rate"]
            assert first["fill"] == pytest.approx(second["fill"], rel=1e-9)


def test_wrong_input_is_said_once_by_two_ranks(two_ranks):
    runs, done = two_ranks
    assert done.code != 0
    assert done.err.count("error: ") == 1
    assert result_of(runs / "wrong")["status"] == "failed"


def test_split_columns_and_a_narrow_wire_over_two_ranks(two_ranks):
    """Rows of 256 split in two pieces, sent as fp16: close to one process in fp32."""
    runs, _ = two_ranks
    a, b = losses(runs / "wide"), losses(runs / "narrow")
    assert a == pytest.approx(b, abs=1e-3) and a != b  # fp16 did travel
    stored = FileSystemReader(runs / "narrow/checkpoints/step_00000004").read_metadata().state_dict_metadata
    weight = stored["model.embedding_collection.embeddings.uid.weight"]
    assert [tuple(chunk.sizes) for chunk in weight.chunks] == [(13, 128), (13, 128)]


def test_deduplication_without_a_kernel_is_refused(small_config, tmp_path, capfd):
    config = small_config({"sharding.dedup_indices": "True"})
    assert main(["--config", config, "--device", "cpu", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "no CPU kernel" in capfd.readouterr().err
