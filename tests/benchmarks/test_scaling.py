"""The page of what fits where says what the dry run says."""

import pathlib
import subprocess
import sys

import pytest

from benchmarks import scaling

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("host", "heading"), [(0, "device memory alone"), (scaling.HOST_GIB, "of host memory per host")]
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_rows_of_the_page_are_current(host, heading, ranks):
    section = scaling.PAGE.read_text(encoding="utf-8").split(heading, 1)[1].split("\n## ")[0]
    line = next(line for line in section.splitlines() if line.startswith(f"| {ranks} |"))
    cells = [scaling.cell(scaling.setting_of(ranks, size, host)) for size in scaling.DEVICES]
    assert line == f"| {ranks} | " + " | ".join(cells) + " |"


@pytest.mark.slow
def test_the_page_is_current():
    command = [sys.executable, "benchmarks/scaling.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
