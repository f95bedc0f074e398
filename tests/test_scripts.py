"""The scripts' environment, in a copy of the repository that has an empty one: nothing is installed."""

import pathlib
import shutil
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def copy(tmp_path):
    """A repository with scripts, requirements, a package of one line, and a .venv that counts as up to date."""
    copy = tmp_path / "a copy"
    for folder in ("scripts", "requirements"):
        shutil.copytree(REPO / folder, copy / folder)
    (copy / "generative_recommenders").mkdir()
    (copy / "generative_recommenders" / "__init__.py").write_text("HERE = __file__\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(copy / ".venv")], check=True)
    shell("{ cat requirements/*.txt; echo cpu; } | cksum | tr ' ' '-' > .venv/.requirements", copy)
    return copy


def shell(text, cwd):
    done = subprocess.run(
        ["bash", "-euc", text], cwd=cwd, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_active_environment_imports_the_package_from_any_folder(copy, tmp_path):
    made = shell("source scripts/env.sh", copy)
    assert made.stderr == ""
    activated = f". '{copy}/.venv/bin/activate' && python -c 'import generative_recommenders as g; print(g.HERE)'"
    (tmp_path / "elsewhere").mkdir()
    assert str(copy) in shell(activated, tmp_path / "elsewhere").stdout
    moved = tmp_path / "moved"
    copy.rename(moved)
    shell("source scripts/env.sh", moved)
    (written,) = moved.glob(".venv/lib/python3.*/site-packages/generative_recommenders.pth")
    assert written.read_text() == f"{moved}\n"
