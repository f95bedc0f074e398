"""Checkpoints: a resumed run equals the uninterrupted one to the bit, and nothing is restored in silence."""

import json
import re
import shutil
import signal
import time
import types

import pytest
import torch

from generative_recommenders.train import checkpoint, loop, run_folder
from generative_recommenders.train.__main__ import main
from generative_recommenders.train.loop import Trainer
from generative_recommenders.train.progress import Progress

DROPOUT = {"model.output_dropout_ratio": "0.2", "optimizer.warmup_steps": "4", "train.log_every": "1"}


@pytest.fixture
def train(small_config, tmp_path, capfd):
    def run(name, *bindings, resume=False, more=(), config=None):
        path = config or small_config({**DROPOUT, **dict(more)})
        arguments = ["--config", path, "--runs-dir", str(tmp_path / "runs"), "--run-name", name]
        arguments += ["--resume"] * resume
        for binding in bindings:
            arguments += ["--bind", binding]
        status = main(arguments)
        return status, capfd.readouterr()

    return run


def metrics(tmp_path, name):
    """The rows of a run without what depends on the clock."""
    rows = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for timed in ("seconds", "samples_per_second", "tokens_per_second"):
            row.pop(timed, None)
    return rows


def result(tmp_path, name):
    return json.loads((tmp_path / "runs" / name / "result.json").read_text())


@pytest.mark.parametrize("stop", [3, 13, 17])  # inside a pass, at its end, in the next
def test_a_resumed_run_equals_the_uninterrupted_one(train, tmp_path, stop):
    more = {"train.epochs": "2", "train.eval_every_samples": "48", "checkpoint.every_steps": str(stop)}
    assert train("straight", more=more)[0] == 0
    assert train("halves", f"train.max_steps={stop}", more=more)[0] == 0
    status, output = train("halves", more=more, resume=True)
    assert status == 0
    assert f"(step {stop})" in output.out
    # The first half ends with an evaluation of its own, which the straight run may not have there.
    extra = {"kind": "eval", "step": stop}
    straight, halves = ([row for row in metrics(tmp_path, name)] for name in ("straight", "halves"))
    same = lambda rows: [row for row in rows if not extra.items() <= row.items()]
    assert same(halves) == same(straight)
    assert result(tmp_path, "halves")["auc"] == result(tmp_path, "straight")["auc"]


def test_a_checkpoint_loads_the_same_evaluation(train, tmp_path):
    assert train("x", more={"checkpoint.at_end": "True"})[0] == 0
    load = f"checkpoint.load={tmp_path / 'runs' / 'x'}"
    status, output = train("again", "train.mode=eval", load)
    assert status == 0 and f"weights from {tmp_path / 'runs' / 'x' / 'checkpoints'}" in output.out
    assert result(tmp_path, "again")["auc"] == result(tmp_path, "x")["auc"]


def test_a_run_that_is_evaluated_again_keeps_the_configuration_it_was_trained_with(train, tmp_path):
    more = {"checkpoint.at_end": "True"}
    assert train("x", more=more)[0] == 0
    trained = (tmp_path / "runs" / "x" / "config.gin").read_text(encoding="utf-8")
    assert train("x", "train.mode=eval", more=more, resume=True)[0] == 0
    assert (tmp_path / "runs" / "x" / "config.gin").read_text(encoding="utf-8") == trained
    assert result(tmp_path, "x")["config"]["train.mode"] == "eval"  # the result says what was done last


def test_a_missing_random_state_is_an_error(train, tmp_path):
    assert train("x", "train.max_steps=2", more={"checkpoint.every_steps": "1"})[0] == 0
    newest = checkpoint.newest(tmp_path / "runs" / "x" / "checkpoints")
    (newest / "rank_0.pt").unlink()
    status, output = train("x", more={"checkpoint.every_steps": "1"}, resume=True)
    assert status == 2
    assert "random state of rank 0 is missing" in output.err


def test_another_configuration_is_refused_and_named(train):
    assert train("x", "train.max_steps=2", more={"checkpoint.every_steps": "1"})[0] == 0
    status, output = train("x", "optimizer.dense_lr=0.5", more={"checkpoint.every_steps": "1"}, resume=True)
    assert status == 2
    assert "optimizer.dense_lr = 0.001, this run has 0.5" in output.err


def test_weights_of_another_model_are_refused(train, tmp_path):
    assert train("x", "train.max_steps=2", more={"checkpoint.every_steps": "1"})[0] == 0
    load = f"checkpoint.load={tmp_path / 'runs' / 'x'}"
    status, output = train("y", load, "model.hstu_attn_qk_dim=4")
    assert status == 2
    assert "does not fit this model" in output.err


def test_the_newest_checkpoints_stay(train, tmp_path):
    assert train("x", "train.max_steps=5", more={"checkpoint.every_steps": "1", "checkpoint.keep": "3"})[0] == 0
    names = sorted(path.name for path in (tmp_path / "runs" / "x" / "checkpoints").iterdir())
    assert names == ["step_00000003", "step_00000004", "step_00000005"]


def test_a_half_written_checkpoint_is_passed_over(train, tmp_path):
    assert train("x", "train.max_steps=2", more={"checkpoint.every_steps": "1"})[0] == 0
    folder = tmp_path / "runs" / "x" / "checkpoints"
    shutil.copytree(folder / "step_00000001", folder / "step_00000009.partial")
    assert checkpoint.newest(folder).name == "step_00000002"
    status, output = train("x", "train.max_steps=4", more={"checkpoint.every_steps": "1"}, resume=True)
    assert status == 0
    assert not list(folder.glob("*.partial"))


def did_not_finish(tmp_path, name="x"):
    """Leave a run's folder as a kill would: the result says so, and has no figures."""
    run_folder.RunFolder(tmp_path / "runs" / name).write_result(run_folder.Result())


def test_a_run_without_checkpoint_and_results_begins_anew_and_says_so(train, tmp_path):
    assert train("x", "train.max_steps=2")[0] == 0
    did_not_finish(tmp_path)
    status, output = train("x")
    assert status == 2 and "or --resume to begin it again" in output.err
    status, output = train("x", "train.max_steps=2", resume=True)
    assert status == 0
    assert "from the beginning" in output.out
    assert [row["step"] for row in metrics(tmp_path, "x") if row["kind"] == "train"] == [1, 2]


@pytest.mark.parametrize("bindings", [["train.max_steps=2"], ["train.max_steps=2", "train.target_auc=1.0"]])
def test_results_without_a_checkpoint_are_not_replaced_by_beginning_again(train, tmp_path, bindings):
    train("x", *bindings)
    before = {path: path.read_bytes() for path in (tmp_path / "runs" / "x").rglob("*") if path.is_file()}
    status, output = train("x", *bindings, resume=True)
    assert status == 2 and output.err.count("\n") == 1
    for said in ("runs/x has no checkpoint", "another --run-name", "checkpoint.at_end=True"):
        assert said in output.err
    assert {path: path.read_bytes() for path in (tmp_path / "runs" / "x").rglob("*") if path.is_file()} == before
    status, output = train("x", *bindings)
    assert status == 2 and output.err.endswith("holds an earlier run; give another --run-name\n")


def test_a_name_in_use_offers_resume_where_there_is_a_checkpoint(train):
    assert train("x", "train.max_steps=2", more={"checkpoint.every_steps": "1"})[0] == 0
    status, output = train("x")
    assert status == 2 and "or --resume to go on from its newest checkpoint" in output.err


def test_evaluating_a_resumed_run_needs_its_weights(train, tmp_path):
    assert train("x", "train.max_steps=2")[0] == 0
    did_not_finish(tmp_path)
    status, output = train("x", "train.mode=eval", resume=True)
    assert status == 2 and "no weights to evaluate" in output.err


def test_metrics_after_the_checkpoint_are_forgotten(train, tmp_path):
    more = {"checkpoint.every_steps": "2"}
    assert train("x", "train.max_steps=3", more=more)[0] == 0
    assert train("x", "train.max_steps=5", more=more, resume=True)[0] == 0
    assert [row["step"] for row in metrics(tmp_path, "x") if row["kind"] == "train"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_and_the_run_goes_on_from_there(train, tmp_path, monkeypatch, number):
    from generative_recommenders.train.loop import Trainer

    real = Trainer.step

    def step(self, batch):
        real(self, batch)
        if self.progress.step == 4:
            signal.raise_signal(number)

    monkeypatch.setattr(Trainer, "step", step)
    status, output = train("x", more={"checkpoint.at_end": "True"})
    monkeypatch.undo()
    assert status == 1
    assert result(tmp_path, "x")["reason"] == f"stopped by {number.name}"
    assert result(tmp_path, "x")["samples"] == 64
    assert output.err == f"error: stopped by {number.name}\n"
    assert train("x", more={"checkpoint.at_end": "True"}, resume=True)[0] == 0
    assert train("straight")[0] == 0
    assert result(tmp_path, "x")["auc"] == result(tmp_path, "straight")["auc"]


def test_checkpoints_by_time_and_by_windows(train, tmp_path):
    more = {"train.mode": "'streaming-train-eval'", "checkpoint.every_windows": "1", "checkpoint.keep": "9"}
    assert train("windows", more=more)[0] == 0
    assert len(list((tmp_path / "runs" / "windows" / "checkpoints").iterdir())) == 3
    assert train("time", more={"checkpoint.every_seconds": "0.000001", "checkpoint.keep": "99"})[0] == 0
    assert len(list((tmp_path / "runs" / "time" / "checkpoints").iterdir())) == 13


def losses(tmp_path, name):
    return {row["step"]: row["loss"] for row in metrics(tmp_path, name) if row["kind"] == "train"}


def test_two_ranks_resume_their_own_streams_after_a_kill(trainer_process, small_config, tmp_path):
    """Six steps straight, against three steps, an evaluation, a kill, and the rest."""
    more = {**DROPOUT, "checkpoint.every_steps": "3", "train.eval_every_samples": "96"}
    config = small_config(more)
    arguments = ["--config", config, "--bind", "train.max_steps=6"]
    trainer_process(*arguments, "--run-name", "straight", ranks=2, check=0)
    killed = trainer_process(*arguments, "--run-name", "x", ranks=2, env={"TINY_KILL_AT_STEP": "4"})
    assert killed.code != 0
    assert result(tmp_path, "x")["status"] == "failed"
    trainer_process(*arguments, "--run-name", "x", "--resume", ranks=2, check=0)
    assert losses(tmp_path, "x") == losses(tmp_path, "straight")
    assert result(tmp_path, "x")["auc"] == result(tmp_path, "straight")["auc"]
    states = [
        [
            torch.load(tmp_path / "runs" / name / "checkpoints/step_00000006" / f"rank_{rank}.pt")["cpu"]
            for rank in (0, 1)
        ]
        for name in ("straight", "x")
    ]
    assert torch.equal(states[0][0], states[1][0]) and torch.equal(states[0][1], states[1][1])
    assert not torch.equal(states[0][0], states[0][1])


@pytest.mark.slow
def test_a_lost_stream_of_one_rank_stops_all(trainer_process, small_config, tmp_path):
    config = small_config({**DROPOUT, "checkpoint.every_steps": "3"})
    trainer_process("--config", config, "--run-name", "x", "--bind", "train.max_steps=3", ranks=2, check=0)
    (tmp_path / "runs/x/checkpoints/step_00000003/rank_1.pt").unlink()
    lost = trainer_process("--config", config, "--run-name", "x", "--resume", ranks=2)
    assert lost.code != 0
    assert lost.err.count("random state of rank 1 is missing") == 1


@pytest.mark.slow
def test_a_checkpoint_loads_on_another_number_of_ranks(trainer_process, small_config, tmp_path):
    config = small_config({**DROPOUT, "checkpoint.every_steps": "3"})
    trainer_process("--config", config, "--run-name", "x", "--bind", "train.max_steps=3", ranks=2, check=0)
    arguments = ["--config", config, "--bind", "train.mode=eval", "--bind", "checkpoint.load=runs/x"]
    trainer_process(*arguments, "--run-name", "two", ranks=2, check=0)
    trainer_process(*arguments, "--run-name", "one", check=0)
    assert result(tmp_path, "one")["auc"]["listen_plus"] == pytest.approx(
        result(tmp_path, "two")["auc"]["listen_plus"], abs=1e-3
    )
    done = trainer_process("--config", config, "--run-name", "x", "--resume", "--bind", "train.max_steps=5", check=0)
    assert "saved by 2 ranks, resumed on 1: dropout draws from new streams" in done.out
    assert " 88 %  step 4 " in done.out  # 3 · 32 + 16 of 3 · 32 + 2 · 16 samples


@pytest.mark.parametrize(
    "max_steps, stands_at, wanted",
    [
        (0, {}, 200),  # two windows of 70 and 30 samples, twice
        (5, {}, 100 + 32),  # 32 + 32 + 6, 30, and one more step
        (
            6,
            {"step": 4, "samples": 64, "samples_in_phase": 64},
            70 + 30,
        ),  # two steps are left
        (5, {"step": 4, "samples": 64, "samples_in_phase": 64}, 70),
        (9, {"step": 8, "samples": 100, "phase": 2, "samples_in_phase": 0}, 100 + 32),
        (3, {"step": 4, "samples": 64, "samples_in_phase": 64}, 64),
    ],
)
def test_what_a_run_will_have_trained_is_counted_from_where_it_stands(max_steps, stands_at, wanted):
    trainer = types.SimpleNamespace(
        config=types.SimpleNamespace(train=types.SimpleNamespace(batch_size=16, max_steps=max_steps, mode="train")),
        world=types.SimpleNamespace(size=2),
        phases=[types.SimpleNamespace(num_samples=samples) for samples in (70, 30, 70, 30)],
        progress=Progress(**stands_at),
    )
    assert Trainer.samples_at_end(trainer) == wanted


def rows_of(tmp_path, name, kind):
    return [row for row in metrics(tmp_path, name) if row["kind"] == kind]


def test_a_finished_run_that_is_resumed_trains_no_further(train, tmp_path):
    more = {"checkpoint.at_end": "True", "checkpoint.every_steps": "2"}
    assert train("x", "train.max_steps=4", more=more)[0] == 0
    before = metrics(tmp_path, "x")
    assert train("x", "train.max_steps=4", more=more, resume=True)[0] == 0
    assert metrics(tmp_path, "x") == before
    assert result(tmp_path, "x")["samples"] == 64


def seconds_shown(output):
    """Training alone and everything, off the closing table."""
    shown = dict(re.findall(r"│ seconds, (training alone|everything) +│ +([\d,.]+) │", output.out))
    return float(shown["training alone"]), float(shown["everything"])


def test_both_times_of_a_resumed_run_are_those_of_the_whole_run(train, tmp_path, monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)

    def lasting(seconds, work):
        def timed(*arguments):
            clock.now += seconds
            return work(*arguments)

        return timed

    monkeypatch.setattr(Trainer, "step", lasting(100.0, Trainer.step))
    monkeypatch.setattr(loop, "evaluate", lasting(7.0, loop.evaluate))
    more = {"checkpoint.at_end": "True", "train.log_every": "100"}
    _, output = train("x", "train.max_steps=2", more=more)
    assert seconds_shown(output) == (200.0, 207.0)
    status, output = train("x", "train.max_steps=5", more=more, resume=True)
    assert status == 0
    assert seconds_shown(output) == (500.0, 514.0) and result(tmp_path, "x")["seconds"] == 514.0


def test_a_run_that_trains_nothing_reports_no_training_time(train, tmp_path):
    assert train("x", "train.max_steps=2", more={"checkpoint.at_end": "True"})[0] == 0
    _, output = train("again", "train.mode=eval", f"checkpoint.load={tmp_path / 'runs' / 'x'}")
    assert "seconds, everything" in output.out and "training alone" not in output.out


def test_a_target_reached_before_the_run_was_resumed_still_counts(train, tmp_path):
    more = {"train.target_auc": "0.05", "train.eval_every_samples": "64", "checkpoint.every_steps": "4"}
    assert train("x", "train.max_steps=4", more=more)[0] == 0
    status, _ = train("x", "train.stop_at_target=True", more=more, resume=True)
    assert status == 0 and result(tmp_path, "x")["samples"] == 64


def test_an_evaluation_cut_short_is_made_up_for_and_logged_once(train, tmp_path, monkeypatch):
    more = {"train.eval_every_samples": "48", "checkpoint.every_steps": "3", "train.max_steps": "7"}
    assert train("straight", more=more)[0] == 0
    real, calls = loop.evaluate, iter(range(9))

    def cut(*arguments):
        if next(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(loop, "evaluate", cut)
    assert train("x", more=more)[0] == 1
    monkeypatch.undo()
    assert result(tmp_path, "x")["samples"] == 96 and len(rows_of(tmp_path, "x", "eval")) == 1
    assert train("x", more=more, resume=True)[0] == 0
    assert metrics(tmp_path, "x") == metrics(tmp_path, "straight")


def test_an_evaluation_after_the_checkpoint_of_its_step_is_not_kept_twice(train, tmp_path):
    more = {"train.epochs": "2", "checkpoint.every_steps": "13"}  # a pass is 13 steps: saved, then evaluated
    assert train("x", "train.max_steps=15", more=more)[0] == 0
    shutil.rmtree(tmp_path / "runs/x/checkpoints/step_00000015", ignore_errors=True)
    assert train("x", "train.max_steps=15", more=more, resume=True)[0] == 0
    assert [row["step"] for row in rows_of(tmp_path, "x", "eval")] == [13, 15]


def damage(kind, folder):
    if kind == "truncated":
        with (folder / "__0_0.distcp").open("r+b") as file:
            file.truncate(100)
    elif kind == "no index":
        (folder / ".metadata").unlink()
    elif kind == "random state":
        (folder / "rank_0.pt").write_text("garbage")
    else:
        (folder / "meta.json").write_text({"list": "[]", "no json": "{", "empty": "{}"}[kind])


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run of two steps with its configuration, to be copied and damaged."""
    import runpy

    tiny = runpy.run_path(str(__import__("pathlib").Path(__file__).with_name("launch_tiny.py")))
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "small.gin"
    path.write_text(tiny["small_gin"](**{**DROPOUT, "checkpoint.every_steps": "2"}))
    arguments = ["--config", str(path), "--runs-dir", str(folder / "runs"), "--run-name", "x"]
    assert main([*arguments, "--bind", "train.max_steps=2"]) == 0
    return folder


@pytest.mark.parametrize("kind", ["truncated", "no index", "random state", "list", "no json", "empty"])
def test_a_damaged_checkpoint_is_one_line_that_names_it(saved_run, tmp_path, capfd, kind):
    shutil.copytree(saved_run / "runs", tmp_path / "runs")
    damage(kind, tmp_path / "runs/x/checkpoints/step_00000002")
    arguments = ["--config", str(saved_run / "small.gin"), "--runs-dir", str(tmp_path / "runs"), "--run-name", "x"]
    capfd.readouterr()
    assert main([*arguments, "--resume"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "step_00000002" in error and len(error) < 900


@pytest.mark.parametrize("why", ["configuration", "damage"])
def test_a_refused_resume_leaves_the_result_alone(saved_run, tmp_path, capfd, why):
    shutil.copytree(saved_run / "runs", tmp_path / "runs")
    before = (tmp_path / "runs/x/result.json").read_text()
    assert json.loads(before)["status"] == "ok"
    arguments = ["--config", str(saved_run / "small.gin"), "--runs-dir", str(tmp_path / "runs"), "--run-name", "x"]
    if why == "damage":
        damage("truncated", tmp_path / "runs/x/checkpoints/step_00000002")
    more = ["--bind", "model.hstu_num_layers=3"] if why == "configuration" else []
    assert main([*arguments, "--resume", *more]) == 2
    assert (tmp_path / "runs/x/result.json").read_text() == before
    if why == "configuration":
        assert main([*arguments, "--resume"]) == 0  # nobody holds the folder


def test_a_run_is_not_resumed_in_a_mode_that_counts_otherwise(saved_run, tmp_path, capfd):
    shutil.copytree(saved_run / "runs", tmp_path / "runs")
    arguments = ["--config", str(saved_run / "small.gin"), "--runs-dir", str(tmp_path / "runs"), "--run-name", "x"]
    assert main([*arguments, "--resume", "--bind", "train.mode=streaming-train-eval"]) == 2
    assert "written with train.mode = 'train-eval'" in capfd.readouterr().err
    assert main([*arguments, "--resume", "--bind", "train.mode=eval"]) == 0


def test_weights_that_would_score_otherwise_are_loaded_with_a_warning(saved_run, tmp_path, capfd):
    load = f"checkpoint.load={saved_run / 'runs' / 'x'}"
    arguments = ["--config", str(saved_run / "small.gin"), "--runs-dir", str(tmp_path / "runs"), "--bind", load]
    arguments += ["--bind", "train.mode=eval", "--run-name"]
    assert main([*arguments, "same"]) == 0
    assert "warning" not in capfd.readouterr().out
    assert main([*arguments, "other", "--bind", "model.max_seq_len=99", "--bind", "model.attn_norm=batch_max"]) == 0
    output = capfd.readouterr().out
    assert "was trained with model.max_seq_len = 10, this run has 99" in output
    assert "was trained with model.attn_norm = 'max_seq_len'" in output


@pytest.mark.parametrize("task", ["skip", "like"])
def test_the_head_of_one_task_is_not_loaded_for_another(saved_run, tmp_path, capfd, task):
    load = f"checkpoint.load={saved_run / 'runs' / 'x'}"
    arguments = ["--config", str(saved_run / "small.gin"), "--runs-dir", str(tmp_path / "runs"), "--bind", load]
    assert main([*arguments, "--bind", "train.mode=eval", "--bind", f"model.tasks=('{task}',)"]) == 2
    assert f"those of listen_plus would be loaded for {task}" in capfd.readouterr().err


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(tmp_path):
    for name in ("step_00000002", "step_00000004.replaced", "step_00000004.partial"):
        (tmp_path / name).mkdir()
    assert checkpoint.newest(tmp_path).name == "step_00000004.replaced"
    (tmp_path / "step_00000004").mkdir()
    assert checkpoint.newest(tmp_path).name == "step_00000004"
