"""Whole runs on the tiny data set: what they leave behind, their exit status, and every way to fail."""

import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import types

import pytest
import torch

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.train import datasets, flop_meter, optimizers, place, run_folder, signals
from generative_recommenders.train.__main__ import main
from generative_recommenders.train.datasets import DATA_OPTIONS
from generative_recommenders.train.flop_meter import FlopMeter
from generative_recommenders.train.flops import PEAK_TFLOPS
from generative_recommenders.train.loop import Trainer
from generative_recommenders.train.progress import Progress
from generative_recommenders.train.reporting import Reporter
from generative_recommenders.train.run_folder import Result

LAUNCHER = pathlib.Path(__file__).with_name("launch_tiny.py")
REPO = LAUNCHER.parents[2]
FIELDS = [
    "status",
    "seconds",
    "samples",
    "auc",
    "best_auc",
    "baseline_auc",
    "auc_best_seen",
    "config",
    "reason",
    "peak",
]


@pytest.fixture
def train(small_config, tmp_path, capfd):
    """``train("train.seed=2", name="x")`` → exit status, result.json (or None), output."""

    def run(*bindings, name="x", more=(), extra=()):
        arguments = ["--config", small_config(more), "--runs-dir", str(tmp_path / "runs"), "--run-name", name, *extra]
        for binding in bindings:
            arguments += ["--bind", binding]
        status = main(arguments)
        path = tmp_path / "runs" / name / "result.json"
        output = capfd.readouterr()
        return status, json.loads(path.read_text()) if path.exists() else None, output

    return run


def rows(tmp_path, name="x"):
    return run_folder.RunFolder(tmp_path / "runs" / name).metrics()


def test_a_good_run_leaves_everything_and_exits_with_zero(train, tmp_path):
    status, result, output = train("train.epochs=2", "train.target_auc=0.05", "train.max_gap_to_best=1.0")
    assert status == 0, output.err
    assert list(result) == FIELDS
    assert result["status"] == "ok" and result["reason"] is None and result["peak"] is None
    assert result["samples"] == 2 * 198
    assert result["best_auc"] == 0.9 and result["baseline_auc"] == 0.5
    assert set(result["auc"]) == {"listen_plus"}
    assert result["auc_best_seen"] >= result["auc"]["listen_plus"]
    assert result["config"]["train.epochs"] == 2
    folder = tmp_path / "runs" / "x"
    evaluations = [row for row in rows(tmp_path) if row["kind"] == "eval"]
    assert [row["samples"] for row in evaluations] == [198, 396]
    assert evaluations[-1]["listen_plus/auc"] == result["auc"]["listen_plus"]
    assert evaluations[-1]["listen_plus/samples"] == 66
    training = [row for row in rows(tmp_path) if row["kind"] == "train"]
    assert {"loss", "learning_rate", "samples_per_second", "tokens_per_second", "fill", "exec"} <= set(training[0])
    assert training[-1]["samples"] == 396
    assert list((folder / "tensorboard").glob("events.*"))
    assert "train.epochs = 2" in (folder / "config.gin").read_text()
    assert not list(folder.rglob("*.partial"))
    for shown in ("hold-out AUC", "baseline AUC", "best reachable AUC", "samples trained", "0.9000", "0.5000"):
        assert shown in output.out


def test_the_report_is_self_contained_and_escapes(train, tmp_path):
    train(name="a<b")
    text = (tmp_path / "runs" / "a<b" / "report.html").read_text()
    assert "<svg" in text and "hold-out AUC" in text and "train.batch_size = 16" in text
    assert "a&lt;b" in text and "a<b" not in text
    for outside in ("http://", "https://", "src=", "<script"):
        assert outside not in text


@pytest.mark.parametrize(
    "binding, reason",
    [
        ("train.target_auc=0.999", "below the target"),
        ("train.max_gap_to_best=0.001", "below the best reachable"),
    ],
)
def test_a_run_that_misses_what_was_asked_fails(train, binding, reason):
    status, result, output = train(binding)
    assert status == 1
    assert result["status"] == "failed" and reason in result["reason"]
    assert reason in output.out


def test_one_class_in_the_hold_out_warns_and_reaches_no_target(train):
    status, result, output = train("tiny.one_class=True", "train.target_auc=0.4", "train.stop_at_target=True")
    assert status == 1
    assert result["auc"] == {"listen_plus": 0.5} and result["auc_best_seen"] is None
    assert "one class" in result["reason"]
    assert "warning: listen_plus has one class only" in output.out


def test_a_target_that_ends_the_run_ends_it(train):
    status, result, _ = train(
        "train.epochs=50", "train.target_auc=0.2", "train.stop_at_target=True", "train.eval_every_samples=64"
    )
    assert status == 0
    assert result["samples"] < 200


@pytest.mark.parametrize(
    "bindings, extra, wanted",
    [
        (["train.bacth_size=4"], [], "train.batch_size"),
        (["train.batch_size=0"], [], "train.batch_size = 0"),
        (["tiny.users=0"], [], "no events"),
        ([], ["--device", "cuda"], "--device cuda: not available"),
        ([], ["--device", "tpu"], "expected auto, cpu or cuda"),
        (["model.backend='CUDNN'"], [], "CUDNN"),
        (["model.max_seq_len=3"], [], "model.max_seq_len = 3: a sample can have 10 rows"),
        (["train.mode='eval'"], [], "needs weights"),
        (["checkpoint.load='/nowhere'"], [], "/nowhere: holds no complete checkpoint"),
        (["sharding.tables={'user': 'row_wise'}"], [], "no such table"),
        (["model.tasks=('listen_plus', 'rating')"], [], "data set tiny has no label item_rating"),
        ([], ["--resume"], "holds no run"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that must be absent")
def test_wrong_input_is_one_line_and_exit_status_two(train, bindings, extra, wanted):
    status, result, output = train(*bindings, extra=extra)
    assert status == 2
    assert wanted in output.err
    assert output.err.count("\n") == 1 and output.err.startswith("error: ")
    assert output.out == ""
    if "--resume" not in extra:
        assert result["status"] == "failed" and wanted in result["reason"]


def test_an_unnamed_run_that_never_began_leaves_nothing(small_config, tmp_path, capfd):
    arguments = ["--config", small_config(), "--runs-dir", str(tmp_path / "runs")]
    assert main([*arguments, "--bind", "train.sed=1"]) == 2
    assert not (tmp_path / "runs").exists()
    assert main([*arguments, "--bind", "model.backend=CUDNN"]) == 2
    assert capfd.readouterr().err.count("\n") == 2
    assert not (tmp_path / "runs").exists()


def test_a_name_in_use_is_refused_and_the_earlier_result_stays(train):
    assert train()[0] == 0
    status, result, output = train()
    assert status == 2 and "holds an earlier run" in output.err
    assert result["status"] == "ok"


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_run_name_is_a_plain_folder_name(train, name):
    assert train(name=name)[0] == 2


def test_a_loss_that_is_not_finite_stops_the_run(train, monkeypatch):
    real = optimizers.Optimizers.finish_step
    steps = iter(range(1000))
    bad = lambda self: real(self) * (float("nan") if next(steps) == 3 else 1.0)
    monkeypatch.setattr(optimizers.Optimizers, "finish_step", bad)
    status, result, output = train("train.log_every=2", "checkpoint.every_steps=5", "train.epochs=3")
    assert status == 1
    assert "not finite since step 3" in result["reason"]
    assert output.err.count("\n") == 1


def test_an_unforeseen_error_is_one_line_and_keeps_its_traceback(train, monkeypatch, tmp_path):
    def broken(self):
        raise RuntimeError("something\nbroke")

    monkeypatch.setattr(optimizers.Optimizers, "finish_step", broken)
    status, result, output = train()
    assert status == 1
    assert result["reason"] == "RuntimeError: something broke"
    assert output.err.count("\n") == 1 and "traceback_rank0.txt" in output.err
    assert "finish_step" in (tmp_path / "runs" / "x" / "traceback_rank0.txt").read_text()


def test_the_traceback_is_shown_on_request(train, monkeypatch):
    monkeypatch.setenv("HSTU_TRACEBACK", "1")
    status, _, output = train("train.batch_size=0")
    assert status == 2 and "Traceback" in output.err


def test_training_alone_does_not_evaluate(train):
    status, result, _ = train("train.mode='train'", "train.max_steps=3")
    assert status == 0
    assert result["auc"] == {} and result["samples"] == 48


@pytest.mark.parametrize(
    "bindings",
    [
        ["train.epochs=2", "train.eval_every_samples=40"],
        ["train.mode=streaming-train-eval", "train.eval_every_windows=2"],
        ["train.epochs=3", "train.eval_every_epochs=2", "train.max_steps=30"],
        ["train.mode=train"],
    ],
)
def test_the_evaluations_to_come_are_counted(train, tmp_path, monkeypatch, bindings):
    counted, real = {}, Trainer.log

    def log(self):
        counted[self.progress.samples] = self.evaluations_left()
        real(self)

    monkeypatch.setattr(Trainer, "log", log)
    assert train("train.log_every=1", *bindings)[0] == 0
    evaluations = [row["samples"] for row in rows(tmp_path) if row["kind"] == "eval"]
    assert counted == {samples: sum(later > samples for later in evaluations) for samples in counted}


def test_the_time_left_counts_evaluations_at_what_the_last_one_took():
    lines = []
    terminal = types.SimpleNamespace(progress=lambda samples, line: lines.append(line))
    reporter = Reporter(types.SimpleNamespace(size=1), None, terminal, started=0.0)
    reporter.total_samples = 3000
    for seconds in (0.0, 100.0):
        reporter.evaluation_seconds = seconds
        reporter.start(Progress())
        reporter.training(Progress(samples=1000), {"loss": 1.0}, 1.0, seconds=10.0, evaluations_left=4)
    assert [line.split("  ")[-1] for line in lines] == ["0:00:20 left", "0:07:00 left"]


def test_every_sample_is_accounted_for_in_the_introduction(train, monkeypatch):
    assert "tiny: 198 training samples in 3 windows, 66 in the hold-out\n" in train(name="all")[2].out
    real = datasets.FACTORIES["tiny"]

    def shortened(days: int = 4):
        dataset = real(days=days)
        del dataset.windows[0]
        return dataset

    monkeypatch.setitem(datasets.FACTORIES, "tiny", shortened)
    out = train(name="fewer")[2].out
    trained, unused = (
        int(n) for n in re.search(r"tiny: (\d+) training .* 66 in the hold-out, (\d+) in neither", out).groups()
    )
    assert trained + unused == 198


def test_streaming_evaluates_after_windows_and_ends_with_the_hold_out(train, tmp_path):
    status, result, _ = train("train.mode='streaming-train-eval'", "train.eval_every_windows=1")
    assert status == 0
    ends = [row["samples"] for row in rows(tmp_path) if row["kind"] == "eval"]
    assert len(ends) == 3 and ends[-1] == result["samples"] == 198


def test_several_tasks_are_each_reported(train):
    status, result, _ = train("model.tasks=('listen_plus', 'skip')")
    assert status == 0
    assert set(result["auc"]) == {"listen_plus", "skip"}


def test_the_saved_configuration_repeats_the_run(train, tmp_path):
    _, first, _ = train("train.seed=5", name="first")
    arguments = ["--config", str(tmp_path / "runs/first/config.gin"), "--runs-dir", str(tmp_path / "runs")]
    assert main([*arguments, "--run-name", "second"]) == 0
    second = json.loads((tmp_path / "runs" / "second" / "result.json").read_text())
    assert second["auc"] == first["auc"]
    assert second["config"] == first["config"]


def test_result_fields_are_exactly_these():
    import dataclasses

    assert [field.name for field in dataclasses.fields(Result)] == [*FIELDS, "rmse", "mae"]


def test_the_peak_that_hfu_divides_by_is_named_wherever_it_is_shown(train, tmp_path, monkeypatch):
    real = FlopMeter.__init__

    def on_a_gpu(self, model, world):
        real(self, model, world)
        self.peak, self.why_no_peak = flop_meter.common_peak(["NVIDIA H200"], torch.bfloat16)

    monkeypatch.setattr(FlopMeter, "__init__", on_a_gpu)
    status, result, output = train()
    assert status == 0
    assert result["peak"] == {"tflops_per_second": 989.4, "dtype": "bfloat16", "device": "NVIDIA H200"}
    said = "989.4 TFLOP/s per NVIDIA H200 (bfloat16, dense, of its data sheet)"
    assert f"peak that MFU and HFU divide by: {said}" in output.out
    assert said in (tmp_path / "runs/x/report.html").read_text()
    assert all("hfu" in row for row in rows(tmp_path) if row["kind"] == "train")


@pytest.mark.gpu
def test_the_peak_of_a_gpu_is_the_one_of_its_name(train):
    status, result, output = train("train.max_steps=2")
    name = torch.cuda.get_device_name()
    assert status == 0
    if name in PEAK_TFLOPS:
        assert result["peak"] == {
            "tflops_per_second": PEAK_TFLOPS[name]["float32"],  # the tiny model has no autocast
            "dtype": "float32",
            "device": name,
        }
    else:
        assert result["peak"] is None and f"no peak is known for device {name!r}" in output.out


def test_ranks_on_unlike_devices_have_no_common_peak():
    peak, why_not = flop_meter.common_peak(["NVIDIA H200", "NVIDIA B200"], torch.bfloat16)
    assert peak is None and "devices differ (NVIDIA B200, NVIDIA H200)" in why_not


@pytest.mark.parametrize("with_limit", [True, False])
def test_tables_that_do_not_fit_name_options_that_exist(train, monkeypatch, with_limit):
    if with_limit:
        real = datasets.FACTORIES["tiny"]
        monkeypatch.setitem(datasets.FACTORIES, "tiny", lambda table_rows_limit=None: real())
    status, _, output = train("sharding.hbm_cap_gb=0.000001")
    assert status == 2 and output.err.count("\n") == 1
    assert "the tables do not fit 1 x cpu" in output.err and "sharding.hbm_cap_gb" in output.err
    assert ("tiny.table_rows_limit" in output.err) == with_limit


def test_a_regression_task_is_reported_beside_the_auc(small_config, tmp_path, capfd):
    ratings = ["userId,movieId,rating,timestamp"]
    ratings += [f"{k % 9},{k % 7},{(k % 9 + k % 7) % 9 / 2 + 0.5},{1000 + 10 * k}" for k in range(300)]
    (tmp_path / "ratings.csv").write_text("\n".join(ratings) + "\n")
    movies = ["movieId,title,genres", *(f"{m},Film ({1990 + m}),Drama" for m in range(7))]
    (tmp_path / "movies.csv").write_text("\n".join(movies) + "\n")
    small = {"data.dataset": "'movielens_small'", "movielens_small.path": f"'{tmp_path}'"}
    small |= {"movielens_small.min_history": "0"}
    small |= {"model.tasks": "('listen_plus', 'rating')", "train.epochs": "3", "optimizer.dense_lr": "0.01"}
    path = small_config(small)
    text = "".join(line for line in pathlib.Path(path).read_text().splitlines(True) if not line.startswith("tiny."))
    pathlib.Path(path).write_text(text)
    assert main(["--config", path, "--runs-dir", str(tmp_path / "runs"), "--run-name", "x"]) == 0
    output = capfd.readouterr().out
    result = json.loads((tmp_path / "runs" / "x" / "result.json").read_text())
    assert list(result) == [*FIELDS, "rmse", "mae"] and set(result["auc"]) == {"listen_plus"}
    last = [row for row in rows(tmp_path) if row["kind"] == "eval"][-1]
    assert last["rating/rmse"] == result["rmse"]["rating"] >= last["rating/mae"] == result["mae"]["rating"] > 0
    truth = [float(line.split(",")[2]) for line in ratings[-30:]]
    assert last["rating/samples"] == 30 and last["rating/label_mean"] == pytest.approx(sum(truth) / 30, abs=1e-6)
    assert last["rating/rmse"] < 3.5  # stars, not hundredths: an untrained head says about 3.5
    for shown in ("rating RMSE", "hold-out RMSE, rating", "hold-out MAE, rating"):
        assert shown in output
    assert "Hold-out RMSE, rating" in (tmp_path / "runs" / "x" / "report.html").read_text()


def test_the_command_line_explains_itself_in_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--confg", "x"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        main([])
    assert "--config is missing" in capsys.readouterr().err


def test_the_list_of_options_may_be_read_in_part():
    reader, writer = os.pipe()
    os.close(reader)  # as ``| head`` does when it has seen enough
    command = [sys.executable, "-m", "generative_recommenders.train", "--list-options"]
    done = subprocess.run(command, cwd=REPO, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_option_is_listed(capsys):
    assert main(["--list-options"]) == 0
    text = capsys.readouterr().out
    for name in ("train.batch_size = 64", "movielens_100k.history_length", "TRITON_HSTU_LAST_LAYER_TARGETS_ONLY"):
        assert name in text
    shipped = {option for name in datasets._KNOWN for option in datasets.parameters(name)}
    assert shipped <= set(DATA_OPTIONS)


def test_a_path_that_cannot_be_read_is_one_line_and_exit_status_two(tmp_path, capfd):
    config = tmp_path / "x.gin"
    config.write_text("data.dataset = 'synthetic_yambda'\nsynthetic_yambda.path = '/proc/x'\n")
    assert main(["--config", str(config), "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "/proc/x" in error and "Errno" not in error
    assert not (tmp_path / "runs").exists()


def test_a_name_that_the_file_system_refuses_is_one_line(train, capfd):
    arguments = ["--config", "nowhere.gin", "--run-name", "x" * 300]
    assert main(arguments) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_two_runs_cannot_share_a_folder(train, tmp_path):
    other = run_folder.RunFolder(tmp_path / "runs" / "x")
    other.hold()
    status, result, output = train()
    assert status == 2 and result is None and "another run is using it" in output.err
    other.release()
    assert train()[0] == 0


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["checkpoint", "metrics", "report"])
def test_a_full_disk_is_said_in_one_line_and_leaves_no_half(train, tmp_path, monkeypatch, where):
    if where == "checkpoint":
        monkeypatch.setattr("generative_recommenders.train.checkpoint.torch.save", full)
    elif where == "metrics":
        monkeypatch.setattr(run_folder.RunFolder, "add", full)
    else:
        monkeypatch.setattr("generative_recommenders.train.report.page", full)
    status, result, output = train("checkpoint.every_steps=2", "train.max_steps=3")
    assert status == 1
    assert output.err.startswith("error: no space left on the disk") and output.err.count("\n") == 1
    assert not list((tmp_path / "runs" / "x").rglob("*.partial"))
    if where != "report":
        assert result["status"] == "failed" and "no space left" in result["reason"]


def test_a_reader_that_goes_away_does_not_end_the_run(trainer_process, small_config, tmp_path):
    script = tmp_path / "closed.py"
    script.write_text(
        "import os, runpy, sys\n"
        "read, write = os.pipe(); os.dup2(write, 1); os.close(write); os.close(read)\n"
        "sys.argv[0] = os.environ['LAUNCHER']; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = ["--config", small_config(), "--run-name", "x", "--bind", "train.max_steps=2"]
    trainer_process(*arguments, script=script, env={"LAUNCHER": str(LAUNCHER)}, check=0)
    assert json.loads((tmp_path / "runs" / "x" / "result.json").read_text())["status"] == "ok"


@pytest.mark.parametrize(
    "environment, wanted",
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3: must be below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0"}, "only one of them is set"),
        ({"RANK": "one"}, "RANK='one'"),
    ],
)
def test_a_launch_by_hand_that_cannot_work_is_one_line(train, monkeypatch, environment, wanted):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, _, output = train()
    assert status == 2 and output.err.count("\n") == 1 and wanted in output.err


def test_an_echo_of_a_signal_is_not_a_second_one():
    with signals.StopSignals() as stop, stop.deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(signals.Stopped, match="SIGINT"):
            stop.check(types.SimpleNamespace(sum_on_host=lambda *values: list(values)))
        stop._first_at -= signals.ECHO_SECONDS
        with pytest.raises(signals.Stopped, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a backend that a CPU cannot serve")
@pytest.mark.parametrize(
    "in_file, environment, bound, blamed",
    [
        ("CUDNN", {}, None, "option model.backend"),
        ("CUDNN", {"HSTU_BACKEND": "PYTORCH"}, None, None),
        ("PYTORCH", {"HSTU_BACKEND": "CUDNN"}, None, "environment variable HSTU_BACKEND"),
        ("PYTORCH", {"HSTU_LMSD_BACKEND": "CUDNN"}, None, "environment variable HSTU_LMSD_BACKEND"),
        ("PYTORCH", {"HSTU_BACKEND": "CUDNN"}, "PYTORCH", None),
        ("PYTORCH", {"HSTU_LMSD_BACKEND": "CUDNN"}, "PYTORCH", None),
        ("PYTORCH", {"HSTU_BACKEND": "PYTORCH"}, "CUDNN", "the backend argument"),
    ],
)
def test_a_backend_is_as_strong_as_the_place_that_names_it(train, monkeypatch, in_file, environment, bound, blamed):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bindings = [] if bound is None else [f"model.backend={bound}"]
    status, _, output = train("train.max_steps=1", *bindings, more={"model.backend": repr(in_file)})
    if blamed is None:
        assert status == 0, output.err
    else:
        assert status == 2
        assert f"backend CUDNN (from {blamed}) is unavailable" in output.err
    assert settings.get("HSTU_BACKEND") == environment.get("HSTU_BACKEND")  # nothing is left behind


def files(folder):
    """Path → content of every file of a run."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


AUTO = ["--resume=auto"]


def test_resume_auto_begins_goes_on_and_ends(train, tmp_path):
    """One command at the first start, after a stop, and after the end."""
    more = {"checkpoint.every_steps": "3", "train.max_steps": "9"}
    status, result, output = train("train.max_steps=4", more=more, extra=AUTO)
    assert status == 0 and result["samples"] == 64 and "resuming" not in output.out and "warning" not in output.out
    status, result, output = train(more=more, extra=AUTO)  # asked for more than it has done
    assert status == 0 and result["samples"] == 144
    assert "step_00000003 (step 3)" in output.out
    before = files(tmp_path / "runs")
    status, result, output = train(more=more, extra=AUTO)
    assert status == 0 and result["status"] == "ok" and output.err == ""
    assert output.out == f"{tmp_path / 'runs' / 'x'}: the run is finished, nothing to do\n"
    assert files(tmp_path / "runs") == before
    louder = ["train.log_every=1", "checkpoint.keep=5"]
    assert "nothing to do" in train(*louder, more=more, extra=AUTO)[2].out
    status, _, output = train("optimizer.dense_lr=0.5", more=more, extra=AUTO)  # another run, and no way to go on as it
    assert status == 2 and "optimizer.dense_lr" in output.err
    assert files(tmp_path / "runs") == before


def test_resume_auto_without_checkpoints_loses_nothing(train, tmp_path):
    status, _, output = train("train.target_auc=1.0", extra=AUTO)
    assert status == 1 and "warning: --resume=auto can only begin again without checkpoints" in output.out
    before = files(tmp_path / "runs")
    status, _, output = train("train.target_auc=1.0", extra=AUTO)
    assert status == 2 and "beginning again would replace its results" in output.err
    assert files(tmp_path / "runs") == before
    run_folder.RunFolder(tmp_path / "runs" / "x").write_result(Result())  # as a kill leaves it
    status, result, output = train(extra=AUTO)
    assert status == 0 and result["status"] == "ok" and "from the beginning" in output.out


def test_resume_auto_of_a_run_that_failed_before_it_began_begins(train):
    assert train("model.max_seq_len=3", extra=AUTO)[0] == 2
    assert train(extra=AUTO)[0] == 0


def test_resume_auto_needs_a_name_and_says_no_other_word(small_config, capfd):
    assert main(["--config", small_config(), *AUTO]) == 2
    assert "needs --run-name" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["--config", small_config(), "--resume=perhaps"])
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "environment, warned",
    [
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS=2"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, None),  # the first task says it
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=8"),
        ({"PMI_SIZE": "3"}, "PMI_SIZE=3"),
        ({"PMI_SIZE": "many", "SLURM_NTASKS": ""}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "SLURM_NTASKS=2"),
        ({"SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"SLURM_NNODES": "2", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "SLURM_NNODES=2"),
        ({"SLURM_NNODES": "2", "RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, None),
    ],
)
def test_a_task_that_is_a_whole_run_among_others_is_warned(monkeypatch, environment, warned):
    for name in [*settings._TASKS, *settings._TASKS.values(), *settings._NODES, "RANK", "WORLD_SIZE", "SLURM_NODEID"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    warning = settings.lonely_task()
    assert (warning is None) if warned is None else (warned in warning and "torchrun" in warning)


def test_a_warning_of_several_tasks_is_one_line_and_the_run_goes_on(train, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    status, _, output = train("train.max_steps=1")
    assert status == 0
    assert output.err.startswith("warning: SLURM_NTASKS=2, but this process is a run of its own")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_with_the_name_of_the_run_is_named_as_such(tmp_path, resume):
    (tmp_path / "x").write_text("notes")
    with pytest.raises(UserError, match=r"--run-name x: \S+/x is a file; give another --run-name"):
        place.claim(str(tmp_path), "x", resume)
