"""Every command in a terminal that is not UTF-8, into a closed pipe, and without streams."""

import io
import os
import pathlib
import subprocess
import sys

import pytest

from generative_recommenders import terminal
from generative_recommenders.errors import UserError

REPO = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "generative_recommenders"
# PYTHONIOENCODING alone changes the streams; a locale without UTF-8 changes files as well.
ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


def command(*arguments, **more):
    more.setdefault("stderr", subprocess.PIPE)
    more.setdefault("stdout", subprocess.PIPE)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **more.pop("env", {})}
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, timeout=300, **more)


@pytest.fixture(params=["caché"])
def events(tmp_path, request):
    """Arguments of a small preparation, into a folder of that name."""
    file = tmp_path / f"events-{request.param}.csv"
    rows = [f"{u},{i % 7},{1_700_000_000 + 4000 * i + u},{i % 2}" for u in range(6) for i in range(12)]
    file.write_text("user,item,time,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    more = ["--min-history", "2", "--memory", "1GiB", "--threads", "1", "--no-space-check"]
    return ["--events", file, "--columns", "label=label", *more, "--cache", tmp_path / request.param]


# (A C library that reads file names as ASCII has no business with others: DuckDB and Arrow refuse them.)
@pytest.mark.parametrize(
    "events, env", [("caché", ASCII[0]), ("cache", ASCII[1])], indirect=["events"], ids=["streams", "locale"]
)
def test_data_commands_and_training_speak_ascii_where_nothing_else_is_heard(tmp_path, events, env):
    module = ["-m", f"{PACKAGE}.data.events"]
    prepared = command(*module, "prepare", *events, env=env)
    assert prepared.returncode == 0, prepared.stderr
    assert b" ... " in prepared.stdout
    for done in (command(*module, verb, "--cache", events[-1], env=env) for verb in ("info", "verify")):
        assert (done.returncode, done.stdout.isascii()) == (0, True), done.stderr
    sizes = "embedding_dim=16 num_layers=1 num_heads=1 attn_qk_dim=8 attn_linear_dim=8".split()
    options = [f"model.hstu_{size}" for size in sizes] + [f"events.cache='{events[-1]}'", "model.backend=PYTORCH"]
    gin = tmp_path / "small.gin"
    gin.write_text("data.dataset = 'events'\ntrain.max_steps = 1  # größe\n", encoding="utf-8")
    arguments = [word for option in options for word in ("--bind", option)]
    trained = command(
        "-m", f"{PACKAGE}.train", "--config", gin, "--runs-dir", tmp_path, "--run-name", "x", *arguments, env=env
    )
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.isascii() and b"hold-out AUC" in trained.stdout
    for file in ("config.gin", "report.html"):
        assert str(events[-1]) in (tmp_path / "x" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", f"{PACKAGE}.train", "--list-options"),
        ("-m", f"{PACKAGE}.train", "--config", "nirgends-ö.gin"),
        ("-m", f"{PACKAGE}.data.events", "prepare", "--help"),
        ("-m", f"{PACKAGE}.data.events", "info", "--cache", "nirgends-ö"),
        ("-m", f"{PACKAGE}.data.yambda", "prepare", "--help"),
        ("-m", f"{PACKAGE}.data.yambda", "info", "--size", "50m", "--path", "nirgends-ö"),
        ("-m", f"{PACKAGE}.data.synthetic", "--help"),
        ("-m", f"{PACKAGE}.data.synthetic", "--path", "/proc/nirgends-ö"),
        ("-m", f"{PACKAGE}.settings"),
        ("-m", f"{PACKAGE}.ops.attention.tune", "--help"),
        ("benchmarks/summary.py", "--check"),
        ("benchmarks/targets_only_demo.py", "--help"),
    ],
    ids=lambda arguments: " ".join(arguments[-2:]),
)
def test_no_command_fails_for_want_of_an_encoding(arguments):
    done = command(*arguments, env=ASCII[1], cwd=REPO)
    wrong = any("nirgends" in argument for argument in arguments)
    assert done.returncode == (2 if wrong else 0), done.stderr
    assert (done.stdout + done.stderr).isascii() and b"Traceback" not in done.stderr
    if wrong:
        assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_preparation_outlives_its_reader(tmp_path, events, stream):
    reader, writer = os.pipe()
    os.close(reader)  # as ``| head`` does when it has seen enough
    done = command("-m", f"{PACKAGE}.data.events", "prepare", *events, **{stream: writer})
    os.close(writer)
    assert done.returncode == 0, done.stderr
    if stream == "stdout":
        assert b"Error" not in done.stderr
    assert command("-m", f"{PACKAGE}.data.events", "verify", "--cache", events[-1]).returncode == 0


@pytest.mark.parametrize("arguments", [("settings",), ("data.events", "prepare", "--help")], ids=lambda a: a[0])
def test_output_may_be_read_in_part(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = command("-m", f"{PACKAGE}.{arguments[0]}", *arguments[1:], stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_streams_a_command_does_its_work(tmp_path, events):
    script = f"{sys.executable} -m {PACKAGE}.data.events"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    arguments = " ".join(f"'{a}'" for a in events)
    done = subprocess.run(f"{script} prepare {arguments} >&- 2>&-", shell=True, env=environment)
    assert done.returncode == 0
    wrong = subprocess.run(f"{script} info --cache /nowhere 2>&-", shell=True, env=environment, stdout=subprocess.PIPE)
    assert (wrong.returncode, wrong.stdout) == (2, b"")  # an error is no output


def test_characters_have_a_plain_form(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.speak_any_encoding()
    assert terminal.show("3 × 4 → 12 … é ☃ \udcff") == 0
    assert stream.buffer.getvalue() == "3 × 4 -> 12 ... é \\u2603 \\udcff\n".encode("latin-1")


def test_what_the_user_chose_for_the_streams_stays(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="ignore")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.speak_any_encoding()
    assert stream.errors == "ignore"


@pytest.mark.parametrize(
    "problem, status, line",
    [
        (UserError("bad"), 2, "error: bad\n"),
        (OSError("broken\ndisk"), 2, "error: broken disk\n"),
        (KeyboardInterrupt(), 130, "stopped: run the same command again to go on\n"),
    ],
)
def test_a_guarded_command_ends_in_one_line(capsys, problem, status, line):
    def main():
        raise problem

    assert terminal.guarded(main) == status
    assert capsys.readouterr().err == line


def test_a_guarded_command_gives_its_own_status():
    assert terminal.guarded(lambda: None) == 0 and terminal.guarded(lambda: 1) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("settings",), ("train", "--list-options")], ids=lambda a: a[0])
def test_output_that_a_full_disk_does_not_take_is_one_line(arguments):
    with open("/dev/full", "wb") as full:
        done = command("-m", f"{PACKAGE}.{arguments[0]}", *arguments[1:], stdout=full)
    assert done.returncode == 2 and done.stderr.startswith(b"error: no space left on the disk")
    assert done.stderr.count(b"\n") == 1
