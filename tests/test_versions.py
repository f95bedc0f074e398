"""Importing the package with a wrong FBGEMM/torch pair, without triton and without a GPU."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from generative_recommenders import _versions
from generative_recommenders._versions import PAIRS, pair_problem

REPO = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fbgemm, torch", sorted(PAIRS.items()))
def test_every_known_pair_is_accepted(fbgemm, torch):
    assert pair_problem(f"{torch}.0+cpu", {"fbgemm-gpu-cpu": f"{fbgemm}.0"}) is None


@pytest.mark.parametrize(
    "torch, fbgemm, fix",
    [
        ("2.13.0", {"fbgemm-gpu": "1.9.0"}, "pip install 'fbgemm-gpu==1.8.*'"),
        ("2.14.1+cu130", {"fbgemm-gpu-cpu": "1.8.0"}, "pip install 'fbgemm-gpu-cpu==1.9.*'"),
        ("2.99.0", {"fbgemm-gpu": "1.8.0"}, "pip install 'torch==2.13.*'"),
        ("2.13.0", {"fbgemm-gpu": "1.77.0"}, "pip install 'fbgemm-gpu==1.8.*'"),
        ("2.13.0", {}, "pip install 'fbgemm-gpu-cpu==1.8.*'"),
        (None, {}, "pip install torch=="),
        ("2.13.0", {"fbgemm-gpu-cpu": "1.8.0", "fbgemm-gpu": "1.8.0"}, "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu"),
    ],
)
def test_a_wrong_pair_says_in_one_line_what_to_install(torch, fbgemm, fix):
    problem = pair_problem(torch, fbgemm)
    assert fix in problem
    assert "\n" not in problem


def test_two_unknown_releases_are_left_alone():
    assert pair_problem("3.0.0", {"fbgemm-gpu": "2.0.0"}) is None


@pytest.mark.parametrize(
    "file, text, version",
    [
        ("__init__.py", "import torch  # none here\n", ""),
        ("_version.py", "__version__: str = '1.9.0'\n", "1.9.0"),
        ("docs/version.py", '# by the build\n__version__ = "1.8.0+cpu"\n', "1.8.0+cpu"),
        ("__init__.py", "raise RuntimeError('run')\n__version__ = version()\n", ""),
    ],
)
def test_a_package_unpacked_by_hand_is_not_called_missing(tmp_path, monkeypatch, file, text, version):
    """Importable, but without metadata: the version is read from its files, none of which is run."""
    path = tmp_path / "fbgemm_by_hand" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("__init__.py").touch()
    (tmp_path / "fbgemm_by_hand" / "__init__.py").touch()
    path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _versions.unpacked_version("fbgemm_by_hand") == version
    assert _versions.unpacked_version("fbgemm_of_nobody") is None
    assert "fbgemm_by_hand" not in sys.modules


@pytest.mark.parametrize("unpacked, problem", [("", None), (None, "not installed"), ("1.9.0", "does not fit")])
def test_without_metadata_the_files_decide(monkeypatch, unpacked, problem):
    monkeypatch.setattr(_versions, "installed_version", {"torch": "2.13.0"}.get)
    monkeypatch.setattr(_versions, "unpacked_version", {"fbgemm_gpu": unpacked}.get)
    if problem is None:
        _versions.check_installed_pair()
    else:
        with pytest.raises(ImportError, match=problem):
            _versions.check_installed_pair()


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


FAKE_VERSIONS = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "1.9.0" if name == "fbgemm-gpu-cpu" else real(name)
"""


def test_import_of_a_wrong_pair_raises_the_line():
    done = run(FAKE_VERSIONS + "import generative_recommenders")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: fbgemm-gpu-cpu 1.9.0 does not fit torch")


def test_running_a_module_with_a_wrong_pair_prints_one_line_only():
    code = FAKE_VERSIONS + (
        "import runpy, sys; sys.argv = ['-m']; runpy.run_module('generative_recommenders.train', run_name='__main__')"
    )
    done = run(code)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: fbgemm-gpu-cpu 1.9.0 does not fit torch")


def test_import_works_without_triton_and_without_a_gpu():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import generative_recommenders, generative_recommenders.ops.dispatch as d\n"
        "assert d.triton_import_error() and not d.triton_interpreted()\n"
    )
    done = run(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


# What a package does at its import on a machine that it is not made for.
NO_DRIVER = """
import logging
try:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")
except OSError as error:
    logging.error("Could not load the library 'fbgemm_gpu_config.so'!\\n\\n\\nlibnvidia-ml.so.1\\n\\n\\n")
    raise OSError("Could not load this library: /venv/fbgemm_gpu/fbgemm_gpu_config.so") from error
"""
OTHER_LIBRARY = 'raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")'
OTHER_RELEASE = "raise AttributeError(\"'_OpNamespace' 'fbgemm' object has no attribute 'merge_pooled'\\n  at line 3\")"
MISSING = "raise ModuleNotFoundError(\"No module named 'torchrec'\", name='torchrec')"


@pytest.fixture
def pretend(tmp_path):
    """Environment in which importing ``package`` does what ``code`` says."""

    def make(package, code):
        (tmp_path / "fake" / package).mkdir(parents=True)
        (tmp_path / "fake" / package / "__init__.py").write_text(code)
        return {**os.environ, "PYTHONPATH": f"{tmp_path / 'fake'}:{REPO}", "OMP_NUM_THREADS": "1"}

    return make


def module(name, *arguments, env):
    command = [sys.executable, "-m", f"generative_recommenders.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, cwd="/")


@pytest.mark.parametrize(
    "package, code, wanted",
    [
        ("fbgemm_gpu", NO_DRIVER, "libnvidia-ml.so.1 is missing: .* NVIDIA's driver, and this machine has none"),
        ("torch", OTHER_LIBRARY, "libcudart.so.13 is missing, which torch .* need"),
        ("torchrec", OTHER_RELEASE, r"torch .*, torchrec .* cannot be loaded together \(AttributeError: .*line 3"),
        ("torchrec", MISSING, "package torchrec is not installed: install"),
    ],
    ids=["driver", "library", "release", "package"],
)
def test_libraries_that_cannot_be_loaded_are_one_line(pretend, package, code, wanted):
    done = module("train", "--config", REPO / "configs" / "synthetic.gin", env=pretend(package, code))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and re.match(f"error: {wanted}", done.stderr), done.stderr


def test_the_traceback_of_a_library_is_shown_on_request(pretend):
    environment = {**pretend("fbgemm_gpu", NO_DRIVER), "HSTU_TRACEBACK": "1"}
    done = module("train", "--config", REPO / "configs" / "synthetic.gin", env=environment)
    assert done.returncode == 2 and "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: libnvidia-ml.so.1 is missing")


def test_without_a_driver_options_are_listed_and_data_is_prepared(pretend, tmp_path):
    environment = pretend("fbgemm_gpu", NO_DRIVER)
    listed = module("train", "--list-options", env=environment)
    assert (listed.returncode, listed.stderr) == (0, "") and "movielens_100k.history_length" in listed.stdout
    made = module("data.synthetic", "--path", tmp_path / "yambda", env=environment)
    assert (made.returncode, made.stderr) == (0, "")
    where = ["--size", "50m", "--path", tmp_path / "yambda"]
    limits = ["--memory", "1GiB", "--threads", "1", "--no-space-check"]
    for verb, more in (("prepare", limits), ("verify", []), ("info", [])):
        done = module("data.yambda", verb, *where, *more, env=environment)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    code = "from generative_recommenders.data.yambda import yambda; print(yambda({path!r}).holdout.num_samples > 0)"
    opened = [sys.executable, "-c", code.format(path=str(tmp_path / "yambda"))]
    done = subprocess.run(opened, capture_output=True, text=True, env=environment, timeout=120, cwd="/")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("code", ["raise RuntimeError('driver\\ntoo old')", "raise OSError('libtriton.so')"])
def test_a_triton_that_does_not_load_is_a_reason_not_to_take_it(pretend, code):
    ask = "import generative_recommenders.ops.dispatch as d; print(d.triton_import_error())"
    environment = pretend("triton", code)
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("triton cannot be imported (") and done.stdout.count("\n") == 1
