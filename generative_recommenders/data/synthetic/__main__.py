"""``python -m generative_recommenders.data.synthetic --path FOLDER [--events N]``: files as Yambda's, generated."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from generative_recommenders.data.synthetic.generate import generate
from generative_recommenders.data.synthetic.spec import SyntheticSpec, yambda_like
from generative_recommenders.data.yambda.layout import SIZES
from generative_recommenders.terminal import guarded, show


def parser() -> argparse.ArgumentParser:
    """The command line."""
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
    return parser


def run(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    spec = SyntheticSpec() if options.events is None else yambda_like(options.events)
    events = generate(options.path, dataclasses.replace(spec, seed=options.seed), size=options.size)
    show(f"{options.path}: {events:,} events")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return guarded(lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
