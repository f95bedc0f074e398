"""Renders which machines hold the public benchmark, ``docs/scaling.md``, from dry runs.

python benchmarks/scaling.py            # writes the page
python benchmarks/scaling.py --check    # exit 1 if the page is not what the dry run says
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from generative_recommenders.train.dry_run import DryRunArguments, read_setting
from generative_recommenders.train.hardware import GIB, NETWORK
from generative_recommenders.train.step_cost import step_flops, step_seconds, targets_only_decision
from generative_recommenders.train.what_fits import RECOMPUTE, Outcome, Setting, plan, with_section

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scaling.md"
CONFIG = ROOT / "configs" / "yambda_5b.gin"
RANKS = (1, 2, 4, 8, 16, 64)
#: GiB of a device, and the kind whose rates and kernels stand for it.
DEVICES = {80: "h100", 96: "h200", 139: "h200", 192: "mi300x"}
HOST_GIB = 1024
LEAST_BATCH = 64
#: From nothing recomputed (but in the targets-only last layer, where it is free) to everything.
LEVELS = ("little", "layers", "all")

HEAD = """# What fits where

Generated from dry runs of `configs/yambda_5b.gin` by `python benchmarks/scaling.py`; do not edit. A cell is the largest
batch per GPU (a power of two up to the benchmark's 1,024) with which tables, step and 8 GiB of headroom fit, and the
least recomputation with which that batch does:

- *little*: the last layer alone, for the candidates only;
- *layers*: normed x, U, V, Q, K and y of every layer (`model.recompute_normed_x`, `recompute_uvqk`, `recompute_y`);
- *all*: the preprocessor's MLPs too (`model.recompute_preprocessor`).

Eight GPUs make a host. Memory is planned for the fullest batch to expect, whose rows the dry run prints; a smaller
batch changes what is trained, since the global batch is the batch per GPU times the GPUs. How the sums are made, and
what they were checked against: [training.md](training.md#plan-and-dry-run).
"""


def setting_of(ranks: int, device: int, host: int) -> Setting:
    """The public benchmark on so many GPUs of so many GiB, with so many GiB of host memory (0: none) per host."""
    return read_setting(
        DryRunArguments(
            (str(CONFIG),),
            ranks=ranks,
            device_kind=DEVICES[device],
            device_memory=f"{device}GiB",
            host_memory=f"{host}GiB" if host else None,
        )
    )


def at(setting: Setting, batch: int, level: str) -> Outcome:
    """Planned with another batch and level of recomputation."""
    options = dict.fromkeys(RECOMPUTE[:3], level != "little")
    options |= {"recompute_preprocessor": level == "all", "recompute_last_layer": True}
    return plan(with_section(with_section(setting, "train", batch_size=batch), "model", **options))


def largest(setting: Setting) -> tuple[Outcome | None, str]:
    """The largest batch that fits, with the least recomputation."""
    batch = setting.config.train.batch_size
    while batch >= LEAST_BATCH:
        if at(setting, batch, LEVELS[-1]).plan is not None:
            for level in LEVELS:
                outcome = at(setting, batch, level)
                if outcome.plan is not None:
                    return outcome, level
        batch //= 2
    return None, ""


def cell(setting: Setting) -> str:
    """Batch, recomputation, and what is in host memory."""
    outcome, level = largest(setting)
    if outcome is None:
        return "no"
    host = [table for table in outcome.plan.tables if table.placement == "host"]
    share = f", {sum(sum(table.host_bytes) for table in host) / GIB:,.0f} GiB in host memory" if host else ""
    return f"{outcome.load.shape.samples:,} {level}{share}"


def table(host: int) -> list[str]:
    """One table: GPUs down, their memory across."""
    lines = ["| GPUs | " + " | ".join(f"{size} GiB" for size in DEVICES) + " |", "|---" * (len(DEVICES) + 1) + "|"]
    for ranks in RANKS:
        cells = [cell(setting_of(ranks, size, host)) for size in DEVICES]
        lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
    return lines


def links() -> list[str]:
    """The exchange of looked-up rows as a share of a step, by wire precision and number of GPUs."""
    lines = ["| GPUs | wire | GB per GPU, step and way | 450 GB/s | 400 Gbit/s |", "|---" * 5 + "|"]
    for ranks in (8, 64):
        for wire in ("float32", "bfloat16"):
            found = at(with_section(setting_of(ranks, 139, 0), "sharding", wire_precision=wire), 1024, "all")
            amount, work = found.plan.link_bytes(), found.setting.work
            computation = targets_only_decision(found.sizes).computation
            executed = step_flops(found.sizes, found.load.shape.samples, work.mean_rows, computation)
            seconds = step_seconds(executed, found.setting.kind, found.load.shape.half)
            shares = [amount / rate / (amount / rate + seconds) for rate in (found.setting.kind.link, NETWORK)]
            words = " | ".join(f"{share:.0%}" for share in shares)
            lines.append(f"| {ranks} | {wire} | {amount / 1e9:.1f} | {words} |")
    return lines


def render() -> str:
    """The whole page."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    parts = [HEAD, "## In device memory alone\n", *table(0)]
    parts += [f"\n## With {HOST_GIB // 1024} TiB of host memory per host\n", *table(HOST_GIB)]
    parts += [
        "\n## The exchange\n",
        "Looked-up rows forward, their gradients backward, ids and dense gradients, as a share of a step in which\n"
        "nothing hides them (`sharding.wire_precision`; H200, 1,024 samples a GPU):\n",
        *links(),
    ]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    if parser.parse_args().check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == render()
        print("docs/scaling.md is current" if current else "docs/scaling.md is out of date: run benchmarks/scaling.py")
        return 0 if current else 1
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
