"""Compiled loops and their cache: damaged entries and full disks cost time, not results."""

import errno
import pathlib
import subprocess
import sys

import pytest
from numba.core import caching

from generative_recommenders import compile_caches
from generative_recommenders.data.compiled import compiled

CODE = """
import sys, time
sys.path.insert(0, {folder!r})
import loops
assert loops.twice(21) == 42
print(sum(loops.twice.stats.cache_hits.values()), sum(loops.twice.stats.cache_misses.values()))
"""


@pytest.fixture
def hits(tmp_path):
    """Runs a compiled loop in a process of its own → "hits misses" of its cache."""
    (tmp_path / "loops.py").write_text(
        "from generative_recommenders.data.compiled import compiled\n\n@compiled\ndef twice(x):\n    return 2 * x\n"
    )

    def run():
        code = CODE.format(folder=str(tmp_path))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_machine_code_is_kept_and_a_damaged_entry_is_made_again(hits, tmp_path, suffix):
    assert hits() == "0 1"
    assert hits() == "1 0"
    (entry,) = (tmp_path / "__pycache__").glob(f"*.{suffix}")
    entry.write_bytes(entry.read_bytes()[:20])  # cut off by a kill
    assert hits() == "0 1"


def test_a_full_disk_costs_time_and_a_line(monkeypatch, capsys):
    def full(self, key, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    compile_caches.say_compiled_anew.cache_clear()
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)

    @compiled
    def thrice(x):
        return 3 * x

    assert thrice(2) == 6 and thrice(2.5) == 7.5
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "No space left on device" in said
    assert "NUMBA_CACHE_DIR" in said and str(pathlib.Path(__file__).parent) in said
    compile_caches.say_compiled_anew.cache_clear()
