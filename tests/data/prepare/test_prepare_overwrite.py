"""--overwrite: the old cache stays until the new one is complete, whatever happens on the way."""

import os
import random
import signal
import subprocess
import sys

import pytest

from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.prepare import prepare, replace, verify
from generative_recommenders.data.synthetic import SyntheticSpec, generate
from generative_recommenders.data.yambda.files import yambda_source
from generative_recommenders.errors import UserError
from tests.data.killing import COUNTED
from tests.data.prepare_oracle import random_rows, write_yambda

#: Replaces a cache; with a count, kills itself just before that file operation. ``plain``: no exchange in one step.
CHILD = (
    COUNTED
    + """
import sys
from generative_recommenders.data.prepare import columns, prepare, replace
from generative_recommenders.data.yambda.files import yambda_source

folder, cache, count, plain = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "plain"
for name in ("replace", "rename", "fsync", "unlink", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
replace._exchange = counted((lambda one, other: False) if plain else replace._exchange)
columns.ColumnWriter.append = counted(columns.ColumnWriter.append)
prepare(yambda_source(folder, "50m"), cache, min_history=7, overwrite=True)
print(done)
"""
)


def child(files, cache, count, way):
    command = [sys.executable, "-c", CHILD, str(files), str(cache), str(count), way]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def contents(cache):
    return {file.name: file.read_bytes() for file in cache.iterdir() if file.name != "preparation.json"}


@pytest.fixture
def files(tmp_path):
    rows, artists, albums = random_rows(random.Random(3), 2)
    write_yambda(tmp_path / "files", rows, artists, albums)
    return tmp_path / "files"


@pytest.fixture
def cache(files, tmp_path):
    """A complete cache, with a file of somebody else in its folder."""
    prepare(yambda_source(files, "50m"), tmp_path / "cache", min_history=2)
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    return tmp_path / "cache"


def test_bad_input_leaves_the_old_cache(files, cache, tmp_path):
    before = contents(cache)
    bad, artists, albums = random_rows(random.Random(4), 2)
    bad[-1]["event_type"] = "purchase"
    write_yambda(tmp_path / "bad", bad, artists, albums)
    with pytest.raises(UserError, match="purchase"):
        prepare(yambda_source(tmp_path / "bad", "50m"), cache, min_history=2, overwrite=True)
    assert contents(cache) == before and verify(cache)
    prepare(yambda_source(files, "50m"), cache, min_history=7, overwrite=True)
    assert EventCache.open(cache).min_history == 7
    assert (cache / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("way", ["at once", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_kill_at_any_file_operation_loses_neither_cache(files, cache, tmp_path, way):
    generate(tmp_path / "more", SyntheticSpec(users=20, seed=5), truth=False)
    old = contents(cache)
    operations = int(child(tmp_path / "more", cache, 0, way).stdout)
    new = contents(cache)
    assert operations > 40 and new["notes.txt"] == b"mine" and new != old
    spread = [*range(2, operations, operations // 3), *range(operations - 12, operations + 1, 3)]
    for count in spread:
        prepare(yambda_source(files, "50m"), cache, min_history=2, overwrite=True)
        assert child(tmp_path / "more", cache, count, way).returncode == -signal.SIGKILL
        if not cache.exists():  # between two renames
            assert way == "plain"
            replace.recover(cache)
        found = {name: data for name, data in contents(cache).items() if name != "notes.txt"}
        assert any(found == {k: v for k, v in whole.items() if k != "notes.txt"} for whole in (old, new)), count
        assert child(tmp_path / "more", cache, 0, way).returncode == 0
        assert contents(cache) == new
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "files", "more"]


def test_a_killed_replacement_goes_on_where_it_was(files, cache, tmp_path):
    generate(tmp_path / "more", SyntheticSpec(users=20, seed=5), truth=False)
    child(tmp_path / "more", cache, 30, "at once")
    kept = tmp_path / ".cache.new" / ".preparing" / "state.json"
    assert "scan" in kept.read_text()
    done = int(child(tmp_path / "more", cache, 0, "at once").stdout)
    fresh = int(child(tmp_path / "more", cache, 0, "at once").stdout)
    assert done < fresh


def test_two_replacements_at_once_are_refused(files, cache):
    with replace.replacement(cache) as new:
        with pytest.raises(UserError, match="another process"):
            prepare(yambda_source(files, "50m"), cache, min_history=7, overwrite=True)
        os.mkdir(new)
