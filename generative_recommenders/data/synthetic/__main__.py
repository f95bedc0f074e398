"""``python -m generative_recommenders.data.synthetic --path FOLDER [--events N]``: files as Yambda's, generated."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from generative_recommenders.data.prepare.command_line import guarded
from generative_recommenders.data.synthetic.generate import generate
from generative_recommenders.data.synthetic.spec import SyntheticSpec, yambda_like
from generative_recommenders.data.yambda.layout import SIZES


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m generative_recommenders.data.synthetic", description=__doc__)
    parser.add_argument("--path", required=True, help="folder for the files")
    parser.add_argument("--size", default="50m", choices=SIZES, help="the name that the files go by (default 50m)")
    parser.add_argument(
        "--events",
        type=int,
        help="roughly so many, with Yambda's distributions: a user's are drawn, 4,520 on average, so a small number "
        "may be missed widely; the number written is printed (default: a small data set of 100 users)",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def run() -> None:
        spec = SyntheticSpec() if options.events is None else yambda_like(options.events)
        events = generate(options.path, dataclasses.replace(spec, seed=options.seed), size=options.size)
        print(f"{options.path}: {events:,} events")

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
