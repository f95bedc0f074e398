"""Linter, formatter and type checker, and what they do not look for: what a reader can take in."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = REPO / "generative_recommenders"
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 450, 60


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


def test_no_file_is_longer_than_its_reader_has_patience():
    lines = {str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8").count("\n") for p in PACKAGE.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count >= MOST_LINES_OF_A_FILE} == {}


def long_functions(text):
    """Name and lines of each function of a module that does not fit a screen; kernels are what they must be."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(map(_of_a_kernel, node.decorator_list)):
            lines = node.end_lineno - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield node.name, lines


def _of_a_kernel(decorator):
    """Whether it is ``triton.jit`` or ``gluon.jit``, called or not."""
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(call) in ("triton.jit", "gluon.jit")


def test_no_function_is_longer_than_a_screen():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for name, lines in long_functions(path.read_text(encoding="utf-8")):
            found[f"{path.relative_to(PACKAGE)}: {name}"] = lines
    assert found == {}


def test_long_functions_are_found_and_kernels_are_not():
    body = "    x = 1\n" * MOST_LINES_OF_A_FUNCTION
    assert list(long_functions(f"def f():\n{body}")) == [("f", MOST_LINES_OF_A_FUNCTION + 1)]
    assert list(long_functions(f"def f():\n{body[10:]}")) == []
    assert list(long_functions(f"@triton.autotune([1], key=[])\n@triton.jit(debug=True)\ndef f():\n{body}")) == []
    assert list(long_functions(f"@gluon.jit\ndef f():\n{body}")) == []
    assert list(long_functions(f"@functools.cache\ndef f():\n{body}")) != []
