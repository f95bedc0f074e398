"""The rooms of the house: imports point one way."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "generative_recommenders"
# Room → rooms of the package it may import from, beside itself.
MAY_IMPORT = {"ops": set(), "modules": {"ops"}, "data": set(), "train": {"ops", "modules", "data"}}


def imported(path):
    """Full names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "generative_recommenders" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                assert parts[1] in MAY_IMPORT[room] | {room}, f"{path.relative_to(PACKAGE)} imports {name}"
            assert room != "ops" or parts[0] != "torchrec", f"{path.relative_to(PACKAGE)} imports torchrec"
            assert room == "train" or parts[0] != "gin", f"{path.relative_to(PACKAGE)} imports gin"


def circles(root):
    """Modules below ``root`` that import themselves through others, or such a one; imports inside functions count."""
    names = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in root.rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}
    edges = {}
    for name, path in modules.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):  # of a package either a module or something that the package has
                inner = (f"{node.module}.{alias.name}" for alias in node.names)
                targets |= {full if full in modules else node.module for full in inner}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        edges[name] = targets & modules.keys() - {name}
    while True:
        leaves = {name for name, targets in edges.items() if not targets}
        if not leaves:
            return sorted(edges)
        edges = {name: targets - leaves for name, targets in edges.items() if name not in leaves}


@pytest.mark.parametrize("room", [*MAY_IMPORT, "."])
def test_no_module_imports_itself_in_a_circle(room):
    assert circles(PACKAGE / room) == []


def test_modules_do_not_read_the_environment():
    for path in (PACKAGE / "modules").rglob("*.py"):
        assert "generative_recommenders.settings" not in set(imported(path)), path
