"""Options that messages and pages name exist: a hint at one that does not is worse than none."""

import ast
import pathlib
import re

import pytest

from generative_recommenders.train.config import SECTIONS
from generative_recommenders.train.datasets import FACTORIES
from generative_recommenders.train.gin_files import option_names

REPO = pathlib.Path(__file__).resolve().parents[1]
NAMED = re.compile(rf"(?<![\w./-])({'|'.join([*SECTIONS, *FACTORIES])})\.([a-z_][a-z0-9_]*)(?![\w(/]|\.[a-z_])")
# Ends of file names, which look alike (``events.parquet``).
FILES = {"parquet", "csv", "gin", "json", "md", "py", "npy", "tsv", "zip", "html", "log"}


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
    for path in (REPO / "generative_recommenders").rglob("*.py"):
        for text in strings(path):
            found.update(dict.fromkeys(named(text), path.name))
    assert len(found) > 30  # it does find them
    unknown = {name: where for name, where in found.items() if name not in set(option_names())}
    assert unknown == {}


@pytest.mark.parametrize("pattern", ["README.md", "CHANGELOG.md", "docs/*.md", "configs/*.gin", "scripts/*.sh"])
def test_every_option_that_a_page_names_exists(pattern):
    paths = list(REPO.glob(pattern))
    found = {name: path.name for path in paths for name in named(path.read_text(encoding="utf-8")) - {"data.windows"}}  # Python there
    assert paths and {name: where for name, where in found.items() if name not in set(option_names())} == {}
