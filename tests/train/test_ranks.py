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
    assert found["what stops one"] == "of rank 1" and found["what stops none"] == "done"


@pytest.mark.parametrize("sharding", ["row_wise", pytest.param("table_wise", marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_does(trainer_process, small_config, tmp_path, sharding):
    """Two passes over 198 samples: the last global batch is short, so that rank 1 has an empty one."""
    common = {
        **NO_DROPOUT,
        "train.epochs": "2",
        "checkpoint.at_end": "True",
        "optimizer.warmup_steps": "5",
        "sharding.tables": repr(dict.fromkeys(("uid", "item_id", "genre"), sharding)),
    }
    one = small_config({**common, "train.batch_size": "64"}, "one.gin")
    two = small_config({**common, "train.batch_size": "32"}, "two.gin")
    assert main(["--config", one, "--runs-dir", str(tmp_path / "runs"), "--run-name", "one"]) == 0
    done = trainer_process("--config", two, "--run-name", "two", ranks=2, check=0)
    assert "terminate called" not in done.err
    a, b = (checkpoint_tensors(tmp_path / "runs" / name, tmp_path) for name in ("one", "two"))
    assert set(a) == set(b)
    assert any("embeddings.uid" in name for name in a) and any("momentum" in name for name in a)
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=2e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    results = [result_of(tmp_path / "runs" / name) for name in ("one", "two")]
    assert results[0]["samples"] == results[1]["samples"] == 2 * 198
    assert results[0]["auc"]["listen_plus"] == pytest.approx(results[1]["auc"]["listen_plus"], abs=2e-3)
    rows = [
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for first, second in zip(*rows, strict=True):
        assert first["samples"] == second["samples"]
        if first["kind"] == "train":
            assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)
            assert first["learning_rate"] == second["learning_rate"]
            assert first["fill"] == pytest.approx(second["fill"], rel=1e-9)


def test_wrong_input_is_said_once_by_two_ranks(trainer_process, small_config, tmp_path):
    done = trainer_process("--config", small_config(), "--run-name", "x", "--bind", "train.sed=1", ranks=2)
    assert done.code != 0
    assert done.err.count("error: ") == 1
    assert result_of(tmp_path / "runs" / "x")["status"] == "failed"


def test_split_columns_and_a_narrow_wire_over_two_ranks(trainer_process, small_config, tmp_path):
    """Rows of 256 split in two pieces, sent as fp16: close to one process in fp32, and resumable."""
    common = {**NO_DROPOUT, "model.embedding_dim": "256", "train.max_steps": "4", "train.log_every": "1"}
    tables = repr(dict.fromkeys(("uid", "item_id"), "column_wise"))
    two = {"train.batch_size": "16", "sharding.tables": tables, "sharding.wire_precision": "'float16'"}
    one = small_config({**common, "train.batch_size": "32"}, "one.gin")
    assert main(["--config", one, "--runs-dir", str(tmp_path / "runs"), "--run-name", "one"]) == 0
    two = small_config({**common, **two, "checkpoint.at_end": "True"}, "two.gin")
    trainer_process("--config", two, "--run-name", "two", ranks=2, check=0)
    a, b = (losses(tmp_path / "runs" / name) for name in ("one", "two"))
    assert a == pytest.approx(b, abs=1e-3) and a != b  # fp16 did travel
    weight = (
        FileSystemReader(tmp_path / "runs/two/checkpoints/step_00000004")
        .read_metadata()
        .state_dict_metadata["model.embedding_collection.embeddings.uid.weight"]
    )
    assert [tuple(chunk.sizes) for chunk in weight.chunks] == [(13, 128), (13, 128)]


def test_deduplication_without_a_kernel_is_refused(small_config, tmp_path, capfd):
    config = small_config({"sharding.dedup_indices": "True"})
    assert main(["--config", config, "--device", "cpu", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "no CPU kernel" in capfd.readouterr().err


@pytest.mark.slow
def test_one_command_for_start_and_restart_under_an_elastic_launcher(trainer_process, small_config, tmp_path):
    """A worker is killed once: the launcher starts both again, and they end as a run that nobody killed."""
    config = small_config({"checkpoint.every_steps": "3", "train.max_steps": "6", "train.log_every": "1"})
    arguments = ["--config", config, "--resume=auto", "--run-name"]
    kill = {"TINY_KILL_AT_STEP": "5", "TINY_KILL_RANK": "1"}
    done = trainer_process(*arguments, "x", ranks=2, launcher=["--max-restarts", "1"], env=kill, check=0)
    assert "step_00000003 (step 3)" in done.out
    trainer_process(*arguments, "straight", ranks=2, check=0)
    assert losses(tmp_path / "runs/x") == losses(tmp_path / "runs/straight")
    assert result_of(tmp_path / "runs/x")["auc"] == result_of(tmp_path / "runs/straight")["auc"]
    before = (tmp_path / "runs/x/result.json").read_text()
    done = trainer_process(*arguments, "x", ranks=2, check=0)
    assert done.out.count("the run is finished, nothing to do") == 1
    assert (tmp_path / "runs/x/result.json").read_text() == before


def test_tables_that_do_not_fit_are_said_once_by_two_ranks(trainer_process, small_config, tmp_path):
    """Rank 0 alone plans: the other must not wait for a plan that never comes."""
    config = small_config({"sharding.hbm_cap_gb": "1e-7"})
    done = trainer_process("--config", config, "--run-name", "x", ranks=2)
    assert done.code != 0
    assert done.err.count("error: ") == 1 and "the tables do not fit 2 x cpu" in done.err
    assert "RuntimeError" not in done.err and "Traceback" not in done.err.split("error: ")[0]
    assert result_of(tmp_path / "runs" / "x")["status"] == "failed"


@pytest.mark.parametrize(
    ("option", "value"), [("sharding.host_memory_gb", "64.0"), ("sharding.tables", "{'uid': 'host'}")]
)
def test_host_memory_for_tables_that_are_there_anyhow_is_refused(small_config, tmp_path, capfd, option, value):
    config = small_config({option: value})
    assert main(["--config", config, "--device", "cpu", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert f"{option} asks for tables in host memory" in capfd.readouterr().err


def test_the_plan_is_printed_at_the_start(small_config, tmp_path, capfd):
    config = small_config({"train.max_steps": "1"})
    assert main(["--config", config, "--device", "cpu", "--runs-dir", str(tmp_path / "runs")]) == 0
    out = capfd.readouterr().out
    assert "plan of 3 tables" in out and "rows of a sample: 9 in the mean, 10 in the fullest batch" in out
