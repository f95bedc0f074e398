"""What the data commands share: options of preparation, and its summary."""

from __future__ import annotations

import argparse
import pathlib

from generative_recommenders.data.prepare.engine import Limits
from generative_recommenders.data.prepare.pipeline import prepare
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.data.prepare.source import Source
from generative_recommenders.data.prepare.verify import describe
from generative_recommenders.terminal import show


def add_prepare_options(parser: argparse.ArgumentParser, min_history: int | None) -> None:
    """--min-history, --extend, --cross-users, --memory, --threads, --overwrite, --no-space-check."""
    shown = "by size: 50m and 500m 50, 5b 4086" if min_history is None else min_history
    parser.add_argument(
        "--min-history",
        type=int,
        default=min_history,
        help=f"earlier events that a sample must have (default {shown})",
    )
    parser.add_argument(
        "--extend",
        metavar="OLD_CACHE",
        help="an earlier cache: ids that it knows keep their numbers, crosses their sizes, new ids are appended",
    )
    parser.add_argument(
        "--cross-users",
        type=int,
        metavar="N",
        help="size crosses for N users (default: as many as there are), so that the cache has room to be extended",
    )
    parser.add_argument("--memory", help="resident memory of the whole process, such as 4GiB (default 3GiB)")
    parser.add_argument("--threads", type=int, help="threads (default: all cores)")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a cache of other input or settings, once the new one is complete",
    )
    parser.add_argument("--no-space-check", action="store_true", help="start even if the disk looks too small")


def run_prepare(source: Source, cache: str | pathlib.Path, min_history: int, options: argparse.Namespace) -> None:
    """Prepare and print a summary."""
    prepare(
        source,
        cache,
        min_history=min_history,
        extend=options.extend,
        cross_users=options.cross_users,
        limits=Limits.parse(options.memory, options.threads),
        overwrite=options.overwrite,
        check_space=not options.no_space_check,
        progress=Progress(),
    )
    show(describe(cache))
