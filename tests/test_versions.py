"""Importing the package with a wrong FBGEMM/torch pair, without triton and without a GPU."""

import os
import subprocess
import sys

import pytest

from generative_recommenders import _versions
from generative_recommenders._versions import PAIRS, pair_problem


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
