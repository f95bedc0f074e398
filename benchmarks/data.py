"""The data path on generated Yambda-like events: files to cache (prepare), cache to batches (read).

    python benchmarks/data.py prepare [--events 20000000 100000000] [--memory 3GiB] [--threads 2] [--folder FOLDER]
    python benchmarks/data.py read …      (options: python benchmarks/data_read.py --help)

Prepare runs in a process of its own: events per second by wall clock from start to exit, the kernel's high-water mark
of its resident memory, bytes per event on disk, and the seconds that opening the cache takes in a fresh process. The
file is once as Yambda's, ordered by user, and once with its rows shuffled; both must give the same cache.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.common import plot_records, record, write_records

ROOT = pathlib.Path(__file__).resolve().parent.parent

PREPARE = """
import sys
from generative_recommenders.data.yambda.__main__ import main
status = main(sys.argv[1:])
for line in open("/proc/self/status", encoding="utf-8"):
    if line.startswith("VmHWM"):
        print("peak", int(line.split()[1]) * 1024)
sys.exit(status)
"""
OPEN = """
import sys, time
from generative_recommenders.data.cache import EventCache
began = time.perf_counter()
cache = EventCache.open(sys.argv[1])
cache.anchor_range(0, cache.time_range()[1])
print("seconds", time.perf_counter() - began)
"""


def run(code: str, *arguments: str) -> tuple[float, float]:
    """Run code in a fresh interpreter; wall seconds and the number in the last line it prints."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds, float(done.stdout.split()[-1])


def processor_seconds() -> float:
    """User and system time of all processes that ``run`` has started: what a busy machine cannot inflate much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shuffle_rows(folder: pathlib.Path, target: pathlib.Path) -> None:
    """The same files with the rows of the events in the order of a hash."""
    from generative_recommenders.data.prepare.engine import Limits

    (target / "flat" / "50m").mkdir(parents=True)
    for file in folder.glob("*_item_mapping.parquet"):
        shutil.copy(file, target)
    rows = f"SELECT * FROM read_parquet('{folder}/flat/50m/multi_event.parquet')"
    order = "hash(uid, timestamp, item_id, event_type)"
    connection = Limits(2 * 2**30, 2).connect(target / "spill")
    output = f"{target}/flat/50m/multi_event.parquet"
    connection.execute(f"COPY ({rows} ORDER BY {order}) TO '{output}' (FORMAT parquet)")
    connection.close()


def measure(folder: pathlib.Path, events: int, kind: str, memory: str, threads: int, repeats: int) -> dict:
    """One record for the files in ``folder``; the last cache stays there."""
    load, rates, peaks, processor = os.getloadavg()[0], [], [], []
    arguments = ["prepare", "--size", "50m", "--path", str(folder), "--memory", memory, "--threads", str(threads)]
    for _ in range(repeats):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        before = processor_seconds()
        seconds, peak = run(PREPARE, *arguments)
        processor.append(processor_seconds() - before)
        rates.append(events / seconds)
        peaks.append(peak)
    cache = folder / "cache" / "50m"
    manifest = json.loads((cache / "manifest.json").read_text(encoding="utf-8"))
    size = sum(entry["bytes"] for entry in manifest["columns"].values())
    median = statistics.median(rates)
    return record(
        "data/prepare",
        f"{events / 1e6:.0f} M events {kind}, {threads} threads, memory {memory}",
        median,
        "events/s",
        repeats=repeats,
        spread=(max(rates) - min(rates)) / median,
        peak_memory_gib=max(peaks) / 2**30,
        bytes_per_event=size / events,
        bytes_per_event_in_the_files=(folder / "flat/50m/multi_event.parquet").stat().st_size / events,
        open_seconds=run(OPEN, str(cache))[1],
        processor_seconds=statistics.median(processor),
        load_average_before=load,
    )


def prepare(options: argparse.Namespace) -> None:
    """Measure every size in turn and write the records."""
    from generative_recommenders.data.synthetic import generate, yambda_like

    for wanted in options.events:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            ordered, shuffled = pathlib.Path(name) / "ordered", pathlib.Path(name) / "shuffled"
            events = generate(ordered, yambda_like(wanted), truth=False)
            shuffle_rows(ordered, shuffled)
            records, made = [], []
            for folder, kind in ((ordered, "by user"), (shuffled, "shuffled")):
                records.append(measure(folder, events, kind, options.memory, options.threads, options.repeats))
                made.append((folder / "cache" / "50m" / "manifest.json").read_bytes())
                print(json.dumps(records[-1], indent=1))
            if made[0] != made[1]:
                raise SystemExit("the shuffled file gave another cache")
            plot_records(write_records("data", records))


def main() -> None:
    if sys.argv[1:2] == ["read"]:
        from benchmarks import data_read

        del sys.argv[1]
        return data_read.main()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("prepare", "read"))
    parser.add_argument("--events", type=int, nargs="+", default=[20_000_000, 100_000_000])
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the generated files go (default: the system's temporary folder)")
    return prepare(parser.parse_args())


if __name__ == "__main__":
    main()
