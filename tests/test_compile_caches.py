"""A package that cannot be written and a user without a home: everything works, and one line says what is slower."""

import os
import pathlib
import re

import pytest

from generative_recommenders import compile_caches
from tests import locked_out

SIZES = "embedding_dim=16 num_layers=1 num_heads=1 attn_qk_dim=8 attn_linear_dim=8".split()
LINE = r"warning: numba's machine code of the data loops cannot be kept .*: name a writable folder in NUMBA_CACHE_DIR\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    yield locked_out.read_only_package(folder)
    locked_out.unlock(folder)


@pytest.fixture
def writable(tmp_path):
    """Whoever has given up root's powers may still write where the test may."""
    return tmp_path


def test_the_lock_holds(package):
    done = locked_out.run(package, "-c", f"open('{package}/generative_recommenders/x', 'w')")
    assert "PermissionError" in done.stderr


def test_options_are_listed_without_a_word(package):
    done = locked_out.run(package, "-m", "generative_recommenders.train", "--list-options")
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.batch_size" in done.stdout


def test_data_is_prepared_and_trained_on(package, writable):
    rows = [f"{u},{i % 7},{1_700_000_000 + 4000 * i + u},{i % 2}" for u in range(6) for i in range(12)]
    (writable / "events.csv").write_text("user,item,time,label\n" + "\n".join(rows) + "\n")
    more = ["--min-history", 2, "--memory", "1GiB", "--threads", 1, "--no-space-check", "--cache", writable / "cache"]
    prepare = ["prepare", "--events", writable / "events.csv", "--columns", "label=label", *more]
    prepared = locked_out.run(package, "-m", "generative_recommenders.data.events", *prepare)
    assert prepared.returncode == 0 and "Traceback" not in prepared.stderr, prepared.stderr
    (writable / "x.gin").write_text(
        f"data.dataset = 'events'\nevents.cache = '{writable}/cache'\ntrain.max_steps = 1\n"
    )
    options = ["--config", writable / "x.gin", "--runs-dir", writable, "--run-name"]
    bindings = [word for size in SIZES for word in ("--bind", f"model.hstu_{size}")]
    train = ["-m", "generative_recommenders.train", *bindings, "--bind", "model.backend=PYTORCH", *options]
    first = locked_out.run(package, *train, "x")
    assert first.returncode == 0 and re.fullmatch(LINE, first.stderr), first.stderr


def test_imported_in_python_it_is_said_once_and_a_place_may_be_named(package, writable):
    code = "from generative_recommenders.data.dataset import permutation; import numpy; permutation(3, numpy.uint64(1))"
    assert re.fullmatch(LINE, locked_out.run(package, "-c", code).stderr)
    assert locked_out.run(package, "-c", code, env={"RANK": "1", "WORLD_SIZE": "2"}).stderr == ""
    named = locked_out.run(package, "-c", code, env={"NUMBA_CACHE_DIR": str(writable / "numba")})
    assert named.stderr == "" and list((writable / "numba").rglob("*.nbi"))


def test_a_place_for_runs_or_generated_data_that_cannot_be_written_is_one_line(package, writable):
    (writable / "shut").mkdir(mode=0o555)
    (writable / "x.gin").write_text("data.dataset = 'synthetic_yambda'\nsynthetic_yambda.path = 'shut/cache'\n")
    train = ["-m", "generative_recommenders.train", "--config", "x.gin", "--runs-dir"]
    for runs, wanted in (("shut/runs", "--runs-dir shut/runs: shut is not a writable folder"), ("runs", "shut/cache")):
        done = locked_out.run(package, *train, runs, cwd=writable)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        assert wanted in done.stderr


@pytest.fixture
def no_home(monkeypatch, capsys):
    """A process without a place for Triton; what it sets is undone."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER"):
        monkeypatch.setenv(name, "")  # so that monkeypatch puts back what was there
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/proc/no-home")
    compile_caches.say_compiled_anew.cache_clear()
    yield lambda: capsys.readouterr().err
    compile_caches.say_compiled_anew.cache_clear()


def test_triton_gets_a_folder_of_this_process_where_it_could_keep_nothing(no_home):
    compile_caches.give_triton_a_cache()
    own = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
    assert own.is_dir() and own.stat().st_mode & 0o077 == 0  # what is loaded from there is run
    said = no_home()
    assert said.count("\n") == 1 and "name a writable folder in TRITON_CACHE_DIR" in said
    compile_caches.give_triton_a_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(own) and no_home() == ""
    own.rmdir()


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER"])
def test_what_the_user_says_about_triton_s_cache_stands(no_home, monkeypatch, name):
    monkeypatch.setenv(name, "/proc/elsewhere")
    compile_caches.give_triton_a_cache()
    assert no_home() == "" and (name == "TRITON_CACHE_DIR" or "TRITON_CACHE_DIR" not in os.environ)


def test_a_home_that_can_be_written_is_left_to_triton(no_home, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    compile_caches.give_triton_a_cache()
    assert no_home() == "" and "TRITON_CACHE_DIR" not in os.environ
