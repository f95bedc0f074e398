"""Hold-out AUC of the trained ranker on MovieLens: mean and spread over seeds, beside the online baseline.

    python benchmarks/movielens.py [--small FOLDER] [--seeds 1 2 3] [--only 100k|small]

Each run is the one command of the documentation (``python -m generative_recommenders.train --config …``) in a process
of its own; ``--small`` is the folder of ml-latest-small (left out: MovieLens-100K alone).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.common import plot_records, record, write_records

REPO = pathlib.Path(__file__).resolve().parent.parent


def train(config: str, seed: int, runs: str, bindings: list[str]) -> dict:
    """One run; its ``result.json`` with the seconds it took (wall and CPU)."""
    name = f"{config}-{seed}"
    command = [sys.executable, "-m", "generative_recommenders.train", "--config", f"configs/{config}.gin"]
    command += ["--runs-dir", runs, "--run-name", name, "--bind", f"train.seed={seed}"]
    for binding in bindings:
        command += ["--bind", binding]
    wall, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads((pathlib.Path(runs) / name / "result.json").read_text(encoding="utf-8"))
    used = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    return result | {"wall_seconds": wall, "cpu_seconds": used}


def measure(which: str, seeds: list[int], bindings: list[str]) -> list[dict]:
    """Records of one data set: the ranker over the seeds, and the baseline, which has none."""
    config = f"movielens_{which}"
    results = []
    with tempfile.TemporaryDirectory() as runs:
        for seed in seeds:
            results.append(train(config, seed, runs, bindings))
            print(f"{config} seed {seed}: AUC {results[-1]['auc']['listen_plus']:.4f}", flush=True)
    aucs = [result["auc"]["listen_plus"] for result in results]
    baseline = results[0]["baseline_auc"]
    shape = "newest 10 % of ratings, rating >= 4"
    return [
        record(
            f"movielens/{which}/hstu",
            shape,
            statistics.mean(aucs),
            "AUC",
            baseline={"name": f"movielens/{which}/baseline", "value": baseline},
            repeats=len(seeds),
            spread=max(aucs) - min(aucs),
            aucs=aucs,
            seconds=statistics.mean(result["wall_seconds"] for result in results),
            cpu_seconds=statistics.mean(result["cpu_seconds"] for result in results),
            load_average=os.getloadavg()[0],
        ),
        record(f"movielens/{which}/baseline", shape, baseline, "AUC", repeats=1, spread=0.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", help="folder of ml-latest-small")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=("100k", "small"))
    options = parser.parse_args()
    records = []
    if options.only != "small":
        records += measure("100k", options.seeds, [])
    if options.only == "small" and not options.small:
        parser.error("--only small needs --small FOLDER")
    if options.only != "100k" and options.small:
        path = pathlib.Path(options.small).resolve()
        records += measure("small", options.seeds, [f'movielens_small.path="{path}"'])
    for each in records:
        print(f"{each['name']}: {each['value']:.4f} (spread {each['spread']:.4f}, {each['repeats']} runs)")
    plot_records(write_records("movielens", records))


if __name__ == "__main__":
    main()
