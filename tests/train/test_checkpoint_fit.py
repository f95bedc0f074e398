"""What a checkpoint holds against what a model asks for: nothing is dropped or left out in silence."""

import json
import pathlib
import runpy
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from generative_recommenders.train.__main__ import main

tiny_module = runpy.run_path(str(pathlib.Path(__file__).with_name("launch_tiny.py")))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs of two steps that end in a checkpoint: two layers of width 16 ("two"), a table of 256 columns ("wide")."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "small.gin"
    path.write_text(tiny_module["small_gin"](**{"checkpoint.at_end": "True", "train.max_steps": "2"}))
    arguments = ["--config", str(path), "--runs-dir", str(folder / "runs"), "--run-name"]
    wide = ["--bind", "model.embedding_dim=256", "--bind"]
    assert main([*arguments, "two"]) == 0
    assert main([*arguments, "rows", *wide, 'sharding.tables={"item_id": "row_wise", "uid": "row_wise"}']) == 0
    assert main([*arguments, "columns", *wide, 'sharding.tables={"item_id": "column_wise"}']) == 0
    return folder


@pytest.fixture
def train(saved, tmp_path, capfd):
    """``train(name, *bindings, resume=…)`` → status and output; resuming works on a copy of the saved run."""

    def run(name, *bindings, resume=False):
        if resume and not (tmp_path / "runs" / name).exists():
            shutil.copytree(saved / "runs" / name, tmp_path / "runs" / name)
        arguments = ["--config", str(saved / "small.gin"), "--runs-dir", str(tmp_path / "runs"), "--run-name", name]
        for binding in bindings:
            arguments += ["--bind", binding]
        capfd.readouterr()
        return main([*arguments, *["--resume"] * resume]), capfd.readouterr()

    return run


def weights_of(run):
    """Every tensor of a run's newest checkpoint by name, read by torch's own converter."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (folder,) = (run / "checkpoints").iterdir()
    dcp_to_torch_save(folder, run / "all.pt")
    everything = torch.load(run / "all.pt", weights_only=True)
    return {name: tensor for name, tensor in everything.items() if name.startswith("model.")}


def test_layers_that_the_model_lacks_are_named(train, saved):
    load = f"checkpoint.load={saved / 'runs/two'}"
    status, output = train("one", load, "model.hstu_num_layers=1")
    assert status == 2 and output.err.count("\n") == 1
    for said in (
        "step_00000002",
        "transducer.stack.layers.1.",
        "more",
        "model.hstu_num_layers = 2",
        "checkpoint.partial",
    ):
        assert said in output.err


def test_layers_that_the_checkpoint_lacks_are_named(train, saved):
    status, output = train("three", f"checkpoint.load={saved / 'runs/two'}", "model.hstu_num_layers=3")
    assert status == 2 and output.err.count("\n") == 1
    for said in ("lacks", "transducer.stack.layers.2.", "model.hstu_num_layers = 2", "checkpoint.partial"):
        assert said in output.err


def test_a_table_that_the_model_lacks_is_named(train, saved, monkeypatch):
    monkeypatch.setitem(_factories(), "tiny", lambda: tiny_module["tiny"](genres=False))
    status, output = train("plain", f"checkpoint.load={saved / 'runs/two'}")
    assert status == 2 and "embedding_collection.embeddings.genre.weight" in output.err


def _factories():
    from generative_recommenders.train import datasets

    return datasets.FACTORIES


def test_on_request_the_rest_is_loaded_and_what_is_left_out_is_said(train, saved, tmp_path):
    load = f"checkpoint.load={saved / 'runs/two'}"
    status, output = train(
        "three", load, "model.hstu_num_layers=3", "checkpoint.partial=True", "optimizer.dense_lr=0.0"
    )
    assert status == 0
    assert "at their initial values" in output.out and "transducer.stack.layers.2." in output.out
    then, now = weights_of(saved / "runs/two"), weights_of(tmp_path / "runs/three")
    dense = [name for name in then if "embeddings." not in name]
    assert len(dense) > 50 and all(torch.equal(then[name], now[name]) for name in dense)
    status, output = train("one", load, "model.hstu_num_layers=1", "checkpoint.partial=True")
    assert status == 0
    count = sum(".layers.1." in name for name in then)
    assert f"left out {count} tensors" in output.out and "transducer.stack.layers.1." in output.out


def test_a_partial_load_needs_something_to_load(train):
    status, output = train("x", "checkpoint.partial=True")
    assert status == 2 and "checkpoint.partial = True: needs checkpoint.load" in output.err


@pytest.mark.parametrize("partial", ["False", "True"])
def test_another_shape_is_named_with_both_sizes(train, saved, partial):
    load = f"checkpoint.load={saved / 'runs/two'}"
    status, output = train("y", load, "model.head_hidden_dim=4", f"checkpoint.partial={partial}")
    assert status == 2 and output.err.count("\n") == 1
    for said in ("does not fit this model", "head.heads.0.0.bias", "(8,)", "(4,)", "model.head_hidden_dim = 8"):
        assert said in output.err
    assert "damaged" not in output.err


def drop(folder, part):
    """Take the tensors whose name has ``part`` out of a checkpoint's index."""
    reader = dcp.FileSystemReader(folder)
    index = reader.read_metadata()
    gone = [name for name in index.state_dict_metadata if part in name]
    for name in gone:
        del index.state_dict_metadata[name]
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return gone


@pytest.mark.parametrize("part", ["sparse_optimizer.state.embedding_collection.embeddings.uid", "dense_optimizer.head"])
def test_optimizer_state_that_is_missing_stops_a_resume(train, saved, tmp_path, part):
    shutil.copytree(saved / "runs/two", tmp_path / "runs/two")
    gone = drop(tmp_path / "runs/two/checkpoints/step_00000002", part)
    before = (tmp_path / "runs/two/result.json").read_text()
    status, output = train("two", "train.max_steps=3", resume=True)
    assert status == 2 and output.err.count("\n") == 1
    assert sorted(gone)[0] in output.err and "lacks" in output.err
    assert (tmp_path / "runs/two/result.json").read_text() == before


def test_a_state_that_the_run_does_not_know_stops_a_resume(train, saved, tmp_path, monkeypatch):
    from generative_recommenders.train.optimizers import Optimizers

    real = Optimizers.dense_state
    fewer = lambda self: {name: entry for name, entry in real(self).items() if not name.startswith("head")}
    monkeypatch.setattr(Optimizers, "dense_state", fewer)
    status, output = train("two", "train.max_steps=3", resume=True)
    assert status == 2 and "dense_optimizer.head" in output.err and "no place for" in output.err


@pytest.mark.parametrize("there, here, named", [("rows", "column_wise", "row-wise"), ("columns", "row_wise", "column")])
def test_another_layout_of_the_tables_sums_is_said_to_be_one(train, there, here, named):
    layout = f'sharding.tables={{"item_id": "{here}"}}'
    wide = ("model.embedding_dim=256", "train.max_steps=3")
    status, output = train(there, *wide, layout, resume=True)
    assert status == 2 and output.err.count("\n") == 1
    for said in ("item_id", "sharding.tables", "column_wise", "pieces", "checkpoint.load"):
        assert said in output.err
    assert "damaged" not in output.err
    kept = f'sharding.tables={{"item_id": "{"row_wise" if there == "rows" else "column_wise"}"}}'
    assert train(there, *wide, kept, resume=True)[0] == 0


def test_weights_alone_load_into_any_layout(train, saved, tmp_path):
    wide = ("model.embedding_dim=256", "optimizer.sparse_lr=0.0", "optimizer.dense_lr=0.0")
    status, _ = train(
        "y", *wide, 'sharding.tables={"item_id": "column_wise"}', f"checkpoint.load={saved / 'runs/rows'}"
    )
    assert status == 0
    then, now = weights_of(saved / "runs/rows"), weights_of(tmp_path / "runs/y")
    assert then.keys() == now.keys() and all(torch.equal(then[name], now[name]) for name in then)


@pytest.mark.parametrize("how", ["cut off", "gone", "overwritten", "index"])
def test_a_damaged_file_is_said_to_be_one(train, saved, tmp_path, how):
    shutil.copytree(saved / "runs/two", tmp_path / "runs/two")
    folder = tmp_path / "runs/two/checkpoints/step_00000002"
    data = folder / "__0_0.distcp"
    if how == "cut off":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "gone":
        data.unlink()
    elif how == "overwritten":
        data.write_bytes(b"x" * data.stat().st_size)
    else:
        (folder / ".metadata").write_bytes(b"nothing")
    status, output = train("two", "train.max_steps=3", resume=True)
    assert status == 2 and output.err.count("\n") == 1
    assert "damaged" in output.err and "use another" in output.err
    assert (".metadata" if how == "index" else "__0_0.distcp" if how != "overwritten" else "step_") in output.err
    assert json.loads((tmp_path / "runs/two/result.json").read_text())["status"] == "ok"
