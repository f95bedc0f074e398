"""The linter, part of the full tier."""

import pathlib
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_repository_is_clean_by_the_linter():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", str(REPO)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
