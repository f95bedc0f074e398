"""Preparation against the slow reference, and its independence of threads, memory, row order and file split."""

import random
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.prepare import Limits, prepare, verify
from generative_recommenders.data.synthetic import generate, yambda_like
from generative_recommenders.data.yambda.files import yambda_source
from tests.data.prepare_oracle import expected_cache, random_rows, write_yambda


def cache_bytes(folder):
    """Every file of a cache but the one that tells how it was made."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "preparation.json"}


def assert_equals(cache, want):
    for name in ("user_ids", "user_offsets", "item", "time", "bits", "organic", "item_count", "anchors"):
        assert getattr(cache, name).tolist() == want[name], name
    for name in ("artist_id", "album_id"):
        assert cache.attributes[name].tolist() == want[name], name
    for space, originals in want["vocabulary"].items():
        found = pq.read_table(cache.path / f"vocabulary_{space}.parquet")["original"].to_pylist()
        assert found == originals and cache.vocab[space] == len(originals) + 1
    assert {name: cache.counters[name] for name in want["nulls"]} == want["nulls"]


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_slow_reference(tmp_path, seed):
    rng = random.Random(seed)
    min_history = rng.choice([0, 1, 2, 5, 30])
    rows, artists, albums = random_rows(rng, min_history, crowded=seed % 3 > 0)
    write_yambda(tmp_path / "files", rows, artists, albums, files=rng.choice([1, 3]), group=rng.choice([7, 1000]))
    passes = rng.choice([20, 10_000])
    prepare(
        yambda_source(tmp_path / "files", "50m"), tmp_path / "cache", min_history=min_history, events_per_pass=passes
    )
    cache = EventCache.open(tmp_path / "cache")
    assert_equals(cache, expected_cache(rows, artists, albums, min_history))
    verify(tmp_path / "cache")


def test_bytes_do_not_depend_on_how_it_was_made(tmp_path):
    rng = random.Random(99)
    rows, artists, albums = random_rows(rng, 3)
    variants = [
        dict(limits=Limits(threads=1), files=1),
        dict(limits=Limits(threads=2, memory=Limits.least(2)), files=4, events_per_pass=15),
        dict(limits=Limits(threads=8, memory=2**30), files=2, group=3),
    ]
    made = []
    for number, variant in enumerate(variants):
        folder = tmp_path / str(number)
        write_yambda(folder, rows, artists, albums, files=variant.pop("files"), group=variant.pop("group", 50))
        prepare(yambda_source(folder, "50m"), folder / "cache", min_history=3, **variant)
        made.append(cache_bytes(folder / "cache"))
        rng.shuffle(rows)
        rng.shuffle(artists)
    assert made[0] == made[1] == made[2]


def test_a_pass_that_starts_within_equal_days_keeps_all_anchors(tmp_path):
    """Users and days are never cut, whatever the size of a pass."""
    rng = random.Random(5)
    rows, artists, albums = random_rows(rng, 0, crowded=False)
    for row in rows:
        row["timestamp"] *= 50  # many days
    write_yambda(tmp_path / "files", rows, artists, albums)
    prepare(yambda_source(tmp_path / "files", "50m"), tmp_path / "cache", min_history=0, events_per_pass=1)
    assert_equals(EventCache.open(tmp_path / "cache"), expected_cache(rows, artists, albums, 0))


def test_second_run_leaves_a_complete_cache_alone(tmp_path):
    rows, artists, albums = random_rows(random.Random(1), 2)
    write_yambda(tmp_path / "files", rows, artists, albums)
    source = yambda_source(tmp_path / "files", "50m")
    first = prepare(source, tmp_path / "cache", min_history=2)
    stamp = (tmp_path / "cache" / "item.npy").stat().st_mtime_ns
    assert prepare(source, tmp_path / "cache", min_history=2) == first
    assert (tmp_path / "cache" / "item.npy").stat().st_mtime_ns == stamp
    prepare(source, tmp_path / "cache", min_history=0, overwrite=True)
    assert EventCache.open(tmp_path / "cache").min_history == 0
    assert not (tmp_path / "cache" / ".preparing").exists()


#: Runs the command line and prints the high-water mark of its resident memory in KiB.
CHILD = """
import sys
from generative_recommenders.data.yambda.__main__ import main
assert main(sys.argv[1:]) == 0
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
def test_memory_limit_holds_and_leaves_no_trace_when_the_sort_spills(tmp_path):
    generate(tmp_path, yambda_like(12_000_000), truth=False)
    made = []
    for number, (mebibytes, threads) in enumerate([(Limits.least(1) >> 20, 1), (3072, 2), (1024, 8)]):
        options = [
            "--cache",
            str(tmp_path / f"cache{number}"),
            "--memory",
            f"{mebibytes}MiB",
            "--threads",
            str(threads),
        ]
        command = [sys.executable, "-c", CHILD, "prepare", "--size", "50m", "--path", str(tmp_path), *options]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        assert peak <= mebibytes * 1024
        verify(tmp_path / f"cache{number}")
        made.append(cache_bytes(tmp_path / f"cache{number}"))
    assert made[0] == made[1] == made[2]
    time = np.load(tmp_path / "cache0" / "time.npy")
    assert (np.diff(time[np.load(tmp_path / "cache0" / "anchors.npy")].astype(np.int64)) >= 0).all()
