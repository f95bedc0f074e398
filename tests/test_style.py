"""Linter, formatter and type checker, and what they do not look for."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parents[1]


CHECKS = {
    "linter": ("ruff", "check", "--no-cache", "."),
    "formatter": ("ruff", "format", "--check", "--no-cache", "."),
    "type checker": ("mypy",),
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_repository_is_clean_by_the(check):
    done = subprocess.run([sys.executable, "-m", *CHECKS[check]], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_ignored_finding_is_named():
    places = []
    for path in sorted((REPO / "generative_recommenders").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"# type: ignore(?!\[)|# mypy: |# noqa(?!: )", line):
                places.append(f"{path.relative_to(REPO)}:{number}")
    assert places == []


@pytest.mark.parametrize("folder", ["generative_recommenders", "benchmarks"])
def test_every_text_file_is_opened_in_utf8_whatever_the_environment_prefers(folder):
    places = []
    for path in sorted((REPO / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _opens_text(node) and not any(k.arg == "encoding" for k in node.keywords):
                places.append(f"{path.relative_to(REPO)}:{node.lineno}")
    assert places == []


def _opens_text(call):
    """Whether a call is ``open`` of a text file, or ``read_text``, ``write_text``, ``.open("a")`` of a path."""
    if isinstance(call.func, ast.Attribute):
        if call.func.attr in ("read_text", "write_text"):
            return True
        modes = call.args[:1] if call.func.attr == "open" else None
    else:
        modes = call.args[1:2] if isinstance(call.func, ast.Name) and call.func.id == "open" else None
    if modes is None or (modes and not isinstance(modes[0], ast.Constant)):
        return False  # EventCache.open(path), os.open(path, flags)
    if not modes:
        return isinstance(call.func, ast.Name)
    return isinstance(modes[0].value, str) and "b" not in modes[0].value
