"""Options and flags that messages and pages name exist: a hint at one that does not is worse than none."""

import ast
import pathlib
import re

import pytest

from generative_recommenders.train.config import SECTIONS
from generative_recommenders.train.datasets import FACTORIES
from generative_recommenders.train.gin_files import option_names

REPO = pathlib.Path(__file__).resolve().parents[1]
MODULES = sorted((REPO / "generative_recommenders").rglob("*.py"))
NAMED = re.compile(rf"(?<![\w./-])({'|'.join([*SECTIONS, *FACTORIES])})\.([a-z_][a-z0-9_]*)(?![\w(/]|\.[a-z_])")
# Ends of file names, which look alike (``events.parquet``).
FILES = {"parquet", "csv", "gin", "json", "md", "py", "npy", "tsv", "zip", "html", "log"}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
# Of argparse, pip and torchrun.
FLAGS_OF_OTHERS = {"--help", "--no-deps", "--nnodes", "--rdzv-endpoint"}


def named(text):
    return {f"{section}.{option}" for section, option in NAMED.findall(text) if option not in FILES}


def strings(path):
    """The text constants of a module, those in f-strings too; no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_every_option_that_a_message_names_exists():
    found = {}
    for path in MODULES:
        for text in strings(path):
            found.update(dict.fromkeys(named(text), path.name))
    assert len(found) > 30  # it does find them
    unknown = {name: where for name, where in found.items() if name not in set(option_names())}
    assert unknown == {}


def flags_of_commands():
    """The flags that any command of the package takes."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                yield from (part.value for part in node.args if isinstance(part, ast.Constant))


def test_every_flag_that_a_message_names_exists():
    found = {flag: path.name for path in MODULES for text in strings(path) for flag in FLAG.findall(text)}
    known = {*flags_of_commands(), *FLAGS_OF_OTHERS}
    assert {"--extend", "--dry-run", "--resume"} <= set(found)  # it does find them
    assert {flag: where for flag, where in found.items() if flag not in known} == {}


@pytest.mark.parametrize("pattern", ["README.md", "CHANGELOG.md", "docs/*.md", "configs/*.gin", "scripts/*.sh"])
def test_every_option_that_a_page_names_exists(pattern):
    paths = list(REPO.glob(pattern))
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    found = {name: page for page, text in texts.items() for name in named(text) - {"data.windows"}}  # Python there
    assert paths and {name: where for name, where in found.items() if name not in set(option_names())} == {}
