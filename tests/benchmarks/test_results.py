"""The records of the benchmarks are complete, and the page made from them is current."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
FIELDS = {
    "name", "device", "shape", "value", "unit", "limit", "share_of_limit", "baseline", "repeats", "spread", "versions",
    "date",
}  # fmt: skip


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_records_are_complete_and_unique(path):
    records = json.loads(path.read_text())
    for record in records:
        assert record.keys() >= FIELDS, record["name"]
        assert {"torch", "commit"} <= record["versions"].keys()
        assert record["value"] > 0
    keys = [(r["name"], r["shape"], r["device"]) for r in records]
    assert len(set(keys)) == len(keys)
    assert path.with_suffix(".png").exists()


def test_the_page_is_current():
    command = [sys.executable, "benchmarks/summary.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
