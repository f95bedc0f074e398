"""Reading a prepared cache: samples per second and core for both histories, the gain of a second worker, first batch.

    python benchmarks/data_read.py [--cache FOLDER] [--events 20000000] [--length 4086] [--seconds 10]

``--cache`` is a prepared Yambda cache; without it, Yambda-like events are generated and prepared in a temporary folder.
*Per core* divides by the CPU time of the process, so that other programs on the machine weigh less; wall time stands
beside it. The gain of two workers is wall time against wall time and means something on an idle machine only: the
load average is recorded.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.common import plot_records, record, write_records
from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.crosses import CROSSES
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.data.prepared import dataset_of_cache
from generative_recommenders.data.reader import HistoryOptions
from generative_recommenders.data.windows import split_last_day

BATCH_SIZE = 64
REPEATS = 5


def open_dataset(cache: str, strategy: str, length: int, num_workers: int = 0) -> RankingDataset:
    """All features of the public benchmark over a prepared cache."""
    events = EventCache.open(cache)
    return dataset_of_cache(
        "benchmark",
        events,
        split_last_day(events),
        HistoryOptions(length, strategy),
        item_features=("item_id", "artist_id", "album_id"),
        contextual_features=("uid", *CROSSES),
        num_workers=num_workers,
    )


def first_batch(cache: str, length: int) -> float:
    """Seconds from opening the cache to the first batch, in this process."""
    began = time.perf_counter()
    dataset = open_dataset(cache, "interleaved", length)
    next(dataset.batches(dataset.windows, BATCH_SIZE, shuffle_seed=1))
    return time.perf_counter() - began


def first_batch_of_a_new_process(cache: str, length: int) -> float:
    """The same in a fresh interpreter, compiled loops from their cache on disk."""
    code = "import sys; from benchmarks.data_read import first_batch; print(first_batch(sys.argv[1], int(sys.argv[2])))"
    root = pathlib.Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", code, cache, str(length)]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return float(out.stdout.split()[-1])


def rates(dataset: RankingDataset, seconds: float, seed: int) -> dict[str, float]:
    """Samples and rows read in about ``seconds`` of the training windows, shuffled; per wall and per CPU second."""
    batches = dataset.batches(dataset.windows[len(dataset.windows) // 2 :], BATCH_SIZE, shuffle_seed=seed)
    for _ in itertools.islice(batches, 8):  # pages and threads
        pass
    wall, cpu, samples, rows = time.perf_counter(), time.process_time(), 0, 0
    for batch in batches:
        samples += batch.batch_size
        rows += batch.uih["item_id"].values().numel()
        if time.perf_counter() - wall > seconds:
            break
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    batches.close()
    return {"per_core": samples / cpu, "per_second": samples / wall, "mean_length": rows / samples}


def measure(cache: str, length: int, seconds: float) -> list[dict]:
    """The records."""
    records = []
    for strategy in ("interleaved", "last_n"):
        alone, both = open_dataset(cache, strategy, length), open_dataset(cache, strategy, length, num_workers=2)
        single = open_dataset(cache, strategy, length, num_workers=1)
        runs = {"in_place": [], "one_worker": [], "two_workers": []}
        for seed in range(REPEATS):  # interleaved, so that a change of the machine's load meets all three
            for name, dataset in zip(runs, (alone, single, both), strict=True):
                runs[name].append(rates(dataset, seconds / REPEATS, seed))
        values = [run["per_core"] for run in runs["in_place"]]
        mean_length = statistics.mean(run["mean_length"] for run in runs["in_place"])
        wall = {name: statistics.median(run["per_second"] for run in each) for name, each in runs.items()}
        records.append(
            record(
                f"data/{strategy}",
                f"length={length},batch={BATCH_SIZE}",
                statistics.median(values),
                "samples/s per core",
                repeats=REPEATS,
                spread=(max(values) - min(values)) / statistics.median(values),
                mean_length=mean_length,
                samples_per_second=wall,
                gain_of_two_workers=wall["two_workers"] / wall["one_worker"],
                load_average=os.getloadavg()[0],
            )
        )
    starts = [first_batch_of_a_new_process(cache, length) for _ in range(3)]
    records.append(
        record("data/first_batch", f"length={length},batch={BATCH_SIZE}", statistics.median(starts), "s", repeats=3,
               spread=(max(starts) - min(starts)) / statistics.median(starts), load_average=os.getloadavg()[0])
    )  # fmt: skip
    return records


def generated_cache(folder: str, events: int) -> str:
    """Generate Yambda-like files and prepare them; the cache's folder."""
    from generative_recommenders.data.prepare.engine import Limits
    from generative_recommenders.data.prepare.pipeline import prepare
    from generative_recommenders.data.synthetic.generate import generate
    from generative_recommenders.data.synthetic.spec import yambda_like
    from generative_recommenders.data.yambda.files import yambda_source

    generate(folder, yambda_like(events), truth=False)
    cache = os.path.join(folder, "cache")
    prepare(yambda_source(folder, "50m"), cache, min_history=4086, limits=Limits.parse("3GiB", None))
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", help="a prepared cache; default: generate and prepare one")
    parser.add_argument("--events", type=int, default=20_000_000, help="events to generate")
    parser.add_argument("--length", type=int, default=4086, help="history length")
    parser.add_argument("--seconds", type=float, default=10.0, help="reading time per strategy and number of workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or generated_cache(folder, options.events)
        records = measure(cache, options.length, options.seconds)
    for each in records:
        print(f"{each['name']}: {each['value']:,.5g} {each['unit']} ({each['shape']})")
    path = write_records("data", records)
    plot_records(path)


if __name__ == "__main__":
    main()
