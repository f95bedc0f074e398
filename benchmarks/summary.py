"""Renders every record of ``benchmarks/results`` as one page, ``docs/results.md``.

    python benchmarks/summary.py            # writes the page
    python benchmarks/summary.py --check    # exit 1 if the page is not what the records say
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
COLUMNS = ("name", "shape", "value", "share", "baseline", "device", "commit, date")
HEAD = """# Measured results

Generated from `benchmarks/results/*.json` by `python benchmarks/summary.py`; do not edit. Each file has a plot beside
it and is written by the script of its name (`python benchmarks/<file>.py`, data by `data.py` and `data_read.py`).
*Share* is the value against its limit: copy bandwidth or the rate of a large matrix product, measured in the same run;
for an AUC, the best reachable one.
"""


def number(value: float) -> str:
    """Four significant digits, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def row(record: dict) -> str:
    """One line of a file's table."""
    share = record.get("share_of_limit")
    baseline = record.get("baseline")
    found = "" if not baseline else f"{number(baseline['value'])} ({baseline['name']})"
    cells = (
        f"`{record['name']}`",
        record["shape"],
        f"{number(record['value'])} {record['unit']}",
        "" if share is None else f"{100 * share:.0f} %",
        found,
        record["device"],
        f"{record['versions']['commit']}, {record['date']}",
    )
    return "| " + " | ".join(cells) + " |"


def render(folder: pathlib.Path = ROOT / "benchmarks" / "results") -> str:
    """The whole page."""
    parts = [HEAD]
    for path in sorted(folder.glob("*.json")):
        parts.append(f"\n## {path.stem}\n")
        parts.append(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        parts.extend(row(record) for record in json.loads(path.read_text(encoding="utf-8")))
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    if parser.parse_args().check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == render()
        print("docs/results.md is current" if current else "docs/results.md is out of date: run benchmarks/summary.py")
        return 0 if current else 1
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
