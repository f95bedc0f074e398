"""Hold-out AUC and time of the default job (configs/synthetic.gin): mean and spread over seeds.

    python benchmarks/default_job.py [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.common import plot_records, record, write_records
from benchmarks.movielens import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    seeds = parser.parse_args().seeds
    results = []
    with tempfile.TemporaryDirectory() as runs:
        for seed in seeds:
            results.append(train("synthetic", seed, runs, []))
            print(f"seed {seed}: AUC {results[-1]['auc']['listen_plus']:.4f}", flush=True)
    aucs = [result["auc"]["listen_plus"] for result in results]
    walls = [result["wall_seconds"] for result in results]
    shape = f"{results[0]['samples']:,} training samples of configs/synthetic.gin"
    auc = record(
        "default_job/auc",
        shape,
        statistics.mean(aucs),
        "AUC",
        limit=results[0]["best_auc"],
        share_of_limit=statistics.mean(aucs) / results[0]["best_auc"],
        repeats=len(seeds),
        spread=max(aucs) - min(aucs),
        aucs=aucs,
    )
    seconds = record(
        "default_job/seconds",
        shape,
        statistics.mean(walls),
        "s",
        limit=180,
        repeats=len(seeds),
        spread=(max(walls) - min(walls)) / statistics.mean(walls),
        cpu_seconds=statistics.mean(result["cpu_seconds"] for result in results),
        load_average=os.getloadavg()[0],
    )
    for each in (auc, seconds):
        print(f"{each['name']}: {each['value']:.4f} {each['unit']}")
    plot_records(write_records("default_job", [auc, seconds]))


if __name__ == "__main__":
    main()
