"""Runs on a disk that fills up: one line that says so, nothing half-written, and a run that can go on afterwards."""

import json
import subprocess

import pytest

from generative_recommenders.train import report
from generative_recommenders.train.__main__ import main
from generative_recommenders.train.mlperf import MlperfLog
from generative_recommenders.train.run_folder import RunFolder

CHECKPOINT_OF_100_MB = ["model.num_position_buckets=524288", "checkpoint.every_steps=2", "train.max_steps=3"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 70 MiB and a function that fills what is left of it; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=70m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")

    def fill():
        with open(folder / "ballast", "wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                pass

    yield folder, fill
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def train(small_config, tmp_path, capfd):
    def run(runs, *bindings, name="x", extra=()):
        arguments = ["--config", small_config(), "--runs-dir", str(runs), "--run-name", name, *extra]
        status = main([*arguments, *(word for binding in bindings for word in ("--bind", binding))])
        return status, capfd.readouterr().err

    return run


def after(monkeypatch, owner, name, fill):
    """Fill the disk when ``owner.name`` has been called for the first time."""
    real, full = getattr(owner, name), []

    def filling(*arguments, **options):
        found = real(*arguments, **options)
        if not full:
            full.append(fill())
        return found

    monkeypatch.setattr(owner, name, filling)


def is_said_once(error, folder):
    assert error.startswith(f"error: no space left on the disk of {folder}"), error
    assert error.count("\n") == 1 and "GB left" in error and "traceback" not in error.lower()


def test_a_checkpoint_that_does_not_fit(train, small_disk):
    disk, _ = small_disk
    status, error = train(disk, *CHECKPOINT_OF_100_MB)
    assert status == 1
    is_said_once(error, disk / "x" / "checkpoints")
    assert "0.101 GB needed" in error and "--resume" in error
    result = json.loads((disk / "x" / "result.json").read_text())
    assert result["status"] == "failed" and result["reason"] == error.removeprefix("error: ").strip()
    assert list((disk / "x" / "checkpoints").iterdir()) == []


def test_a_run_goes_on_from_the_checkpoint_before(train, small_disk, monkeypatch):
    disk, fill = small_disk
    keep = ["checkpoint.every_steps=2", "train.log_every=2", "train.max_steps=6"]
    from generative_recommenders.train.checkpoint import Checkpointer

    after(monkeypatch, Checkpointer, "save", fill)
    status, error = train(disk, *keep)
    assert status == 1
    is_said_once(error, disk / "x")
    monkeypatch.undo()
    (disk / "ballast").unlink()
    status, error = train(disk, *keep, extra=["--resume"])
    assert (status, error) == (0, "")
    assert json.loads((disk / "x" / "result.json").read_text())["samples"] == 96


@pytest.mark.parametrize("what", ["figures", "mlperf", "end"])
def test_whatever_is_written_last(train, small_disk, monkeypatch, what):
    disk, fill = small_disk
    owner, name = {
        "figures": (RunFolder, "start"),  # metrics.jsonl and TensorBoard's events
        "mlperf": (MlperfLog, "begin"),
        "end": (report, "page"),
    }[what]
    after(monkeypatch, owner, name, fill)
    options = ["mlperf.enabled=True", "train.log_every=1000"] if what == "mlperf" else ["train.log_every=1"]
    status, error = train(disk, *options)
    assert status == 1
    is_said_once(error, disk / "x")
    assert not list((disk / "x").rglob("*.partial"))
    result = json.loads((disk / "x" / "result.json").read_text())
    assert result["status"] == ("ok" if what == "end" else "failed")  # the first one stands: the run did not finish


def test_a_limit_on_the_size_of_files_is_said_to_be_one(trainer_process, small_config, tmp_path):
    """The same, where nothing can be mounted: the writer in C++ tells neither from a full disk."""
    script = tmp_path / "limited.py"
    script.write_text(
        "import os, resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "sys.argv[0] = os.environ['LAUNCHER']; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    bindings = [word for binding in CHECKPOINT_OF_100_MB for word in ("--bind", binding)]
    launcher = str(__file__).replace("test_full_disk", "launch_tiny")
    arguments = ["--config", small_config(), "--run-name", "x", *bindings]
    error = trainer_process(*arguments, script=script, env={"LAUNCHER": launcher}, check=1).err
    is_said_once(error, "runs/x/checkpoints")
    assert "a quota or a limit on file sizes, as of ulimit -f" in error
