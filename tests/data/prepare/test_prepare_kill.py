"""kill -9 at any moment, then the same command again: the same bytes as without the kill."""

import random
import signal
import subprocess
import sys
import time

import pytest

from generative_recommenders.data.prepare import prepare, verify
from generative_recommenders.data.synthetic import SyntheticSpec, generate
from generative_recommenders.data.yambda.files import yambda_source
from tests.data.killing import COUNTED

#: Prepares in many small passes; with a count, kills itself just before that file operation.
CHILD = (
    COUNTED
    + """
import sys
from generative_recommenders.data.prepare import Limits, columns, prepare
from generative_recommenders.data.yambda.files import yambda_source

folder, cache, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.replace, os.fsync, os.unlink = counted(os.replace), counted(os.fsync), counted(os.unlink)
columns.ColumnWriter.append = counted(columns.ColumnWriter.append)
prepare(yambda_source(folder, "50m"), cache, min_history=5, limits=Limits(2**30, 1), events_per_pass=9_000)
print(done)
"""
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files, the cache that an undisturbed run makes of them, its file operations and its seconds."""
    folder = tmp_path_factory.mktemp("kill")
    generate(folder, SyntheticSpec(seed=4), truth=False)
    began = time.monotonic()
    operations = int(child(folder, folder / "whole", 0).communicate()[0])
    assert operations > 60
    prepare(yambda_source(folder, "50m"), folder / "reference", min_history=5)
    assert contents(folder / "whole") == contents(folder / "reference")
    return folder, contents(folder / "whole"), operations, time.monotonic() - began


def child(folder, cache, count):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(cache), str(count)], stdout=subprocess.PIPE, text=True
    )


def contents(cache):
    return {file.name: file.read_bytes() for file in cache.iterdir() if file.name != "preparation.json"}


def killed_at_operation(folder, cache, count):
    assert child(folder, cache, count).wait() == -signal.SIGKILL


def test_kills_at_file_operations_then_rerun(made, tmp_path):
    """Three kills in a row, each anywhere in what is left to do, and a last run that ends."""
    folder, want, operations, _ = made
    rng = random.Random(0)
    for count in (rng.randrange(1, 40), rng.randrange(20, 40), rng.randrange(1, 20)):
        killed_at_operation(folder, tmp_path / "cache", count)
        assert not (tmp_path / "cache" / "COMPLETE").exists()
    assert child(folder, tmp_path / "cache", 0).wait() == 0
    assert contents(tmp_path / "cache") == want


def test_kill_between_manifest_and_end(made, tmp_path):
    """The last file operations: manifest, marker and the removal of the work folder."""
    folder, want, operations, _ = made
    killed_at_operation(folder, tmp_path / "cache", operations - 1)
    assert child(folder, tmp_path / "cache", 0).wait() == 0
    assert {name: data for name, data in contents(tmp_path / "cache").items()} == want


@pytest.mark.slow
def test_twenty_random_moments(made, tmp_path):
    folder, want, operations, seconds = made
    rng = random.Random(7)
    for number in range(20):
        cache = tmp_path / str(number)
        process = child(folder, cache, 0)
        time.sleep(rng.uniform(0.2, 1.0) * seconds / 2)
        process.kill()
        process.wait()
        if (cache / "COMPLETE").exists():
            verify(cache)
        assert child(folder, cache, 0).wait() == 0
        assert contents(cache) == want


@pytest.mark.slow
def test_kills_spread_over_all_file_operations(made, tmp_path):
    folder, want, operations, _ = made
    for count in range(1, operations + 1, operations // 20):
        cache = tmp_path / str(count)
        killed_at_operation(folder, cache, count)
        assert child(folder, cache, 0).wait() == 0
        assert contents(cache) == want
