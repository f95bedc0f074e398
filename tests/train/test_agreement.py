"""What ranks must have in common: how a difference is said, and what may differ."""

import json
import pathlib
import shutil
import types

import pytest

from generative_recommenders.train import agreement, build, gin_files
from generative_recommenders.train.__main__ import main


def test_a_difference_names_the_values_and_their_ranks():
    statements = [{"a": "1", "b": "x"} for _ in range(6)]
    assert agreement.difference(statements) is None
    statements[3] = {"a": "2", "b": "x"}
    assert agreement.difference(statements) == "a = 1 on ranks 0-2, 4-5, 2 on rank 3"
    assert agreement.difference([{}, {"a": "1"}]) == "a = unknown on rank 0, 1 on rank 1"
    many = [{str(k): str(rank) for k in range(5)} for rank in (0, 1)]
    assert agreement.difference(many, most=1) == "0 = 0 on rank 0, 1 on rank 1; and 4 more"
    assert len(agreement.difference([{"a": "x" * 1000}, {"a": "y"}])) < 200


@pytest.fixture
def say(small_config):
    def statement(*bindings, **arguments):
        return agreement.statement(gin_files.load([small_config()], bindings), arguments, "cpu")

    return statement


def test_every_option_that_decides_a_run_is_compared(say, monkeypatch):
    said = say()
    config = gin_files.load(["configs/synthetic.gin"])
    everything = set(agreement.statement(config, {}, "cpu"))
    own = {"synthetic_yambda.path", "synthetic_yambda.num_workers"}
    assert set(config.values()) - everything == own
    assert agreement.difference([said, say("train.log_every=3")]).startswith("train.log_every = 2 on rank 0, 3 on")
    assert agreement.difference([said, say("data.dataset=synthetic_yambda")]) is not None
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("HSTU_TRACEBACK", "1")
    assert agreement.difference([said, say()]) is None


def test_libraries_and_code_are_compared(say, monkeypatch):
    said = say()
    assert {"version of torch", "version of torchrec", "version of triton"} <= set(said)
    assert any("fbgemm" in name for name in said)
    monkeypatch.setattr(agreement, "installed_version", lambda name: "0.0" if name == "torch" else said.get(name, "1"))
    assert "version of torch" in agreement.difference([said, say()], most=9)


def test_the_code_is_known_by_its_content(tmp_path, monkeypatch):
    here = pathlib.Path(agreement.generative_recommenders.__file__).parent
    shutil.copytree(here, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    digest = agreement.code_digest()
    fake = types.SimpleNamespace(
        __file__=str(tmp_path / "copy" / "__init__.py"), __version__=agreement.generative_recommenders.__version__
    )
    monkeypatch.setattr(agreement, "generative_recommenders", fake)
    assert agreement.code_digest() == digest
    (tmp_path / "copy" / "__pycache__").mkdir()
    (tmp_path / "copy" / "__pycache__" / "x.pyc").write_text("no source")
    assert agreement.code_digest() == digest
    with (tmp_path / "copy" / "errors.py").open("a") as file:
        file.write("# one more line\n")
    assert agreement.code_digest() != digest


def test_weights_are_known_by_what_they_are_and_not_by_their_place(say, small_config, tmp_path):
    arguments = ["--config", small_config(), "--runs-dir", str(tmp_path / "runs"), "--run-name", "x"]
    more = ["--bind", "checkpoint.every_steps=1", "--bind", "train.max_steps=2", "--bind", "train.mode=train"]
    assert main([*arguments, *more]) == 0
    shutil.copytree(tmp_path / "runs/x/checkpoints", tmp_path / "copy")
    load = lambda path: say(f"checkpoint.load={path}")
    assert agreement.difference([load(tmp_path / "runs/x"), load(tmp_path / "copy")]) is None
    earlier = load(tmp_path / "copy/step_00000001")
    assert agreement.difference([load(tmp_path / "copy"), earlier]).startswith("checkpoint.load = ")
    assert agreement.difference([load("/nowhere"), load("/elsewhere")]).startswith("checkpoint.load = '/nowhere'")


class TwoRanks:
    """Rank ``rank`` of two, the other of which says what ``other`` holds, in order."""

    def __init__(self, rank, other):
        self.rank, self.size, self.is_main, self.other = rank, 2, rank == 0, list(other)

    def gather(self, value):
        both = [json.loads(json.dumps(value)), self.other.pop(0)]
        return both if self.rank == 0 else both[::-1]


def test_ranks_with_other_data_stop(small_config, monkeypatch):
    config = gin_files.load([small_config()])
    dataset = build.FACTORIES["tiny"]()
    dataset.identity = types.SimpleNamespace(content="one")
    monkeypatch.setitem(build.FACTORIES, "tiny", lambda **_: dataset)
    alike = agreement.data_statement(dataset)
    assert build.open_dataset(config, TwoRanks(0, [None, None, alike])) is dataset
    content = f"content of data set {dataset.name}"
    with pytest.raises(build.UserError, match=f"ranks found different data: {content} = one on rank 0, two on rank 1"):
        build.open_dataset(config, TwoRanks(0, [None, None, {**alike, content: "two"}]))
    fewer = {**alike, f"samples of its hold-out ({dataset.name})": "65"}
    with pytest.raises(build.UserError, match="samples of its hold-out .tiny. = 66 on rank 0, 65 on rank 1"):
        build.open_dataset(config, TwoRanks(0, [None, None, fewer]))
    with pytest.raises(build.UserError, match="^rank 1: no cache$"):  # rank 0 does not wait for it
        build.open_dataset(config, TwoRanks(0, [None, "no cache"]))
    with pytest.raises(build.UserError, match="^broken$"):
        build.open_dataset(config, TwoRanks(1, ["broken"]))
