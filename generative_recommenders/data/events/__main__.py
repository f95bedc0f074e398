"""``python -m generative_recommenders.data.events prepare|verify|info``: own events into the event cache."""

from __future__ import annotations

import argparse
import sys

from generative_recommenders.data.events.files import ROLES, EventColumns, events_source
from generative_recommenders.data.prepare.command_line import add_prepare_options, guarded, run_prepare
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.data.prepare.source import find_files
from generative_recommenders.data.prepare.verify import describe, verify
from generative_recommenders.errors import UserError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m generative_recommenders.data.events", description="Own events: from files to the event cache."
    )
    commands = top.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="turn event files into the event cache (resumes)")
    prepare.add_argument("--events", required=True, help="a .parquet, .csv or .tsv file, or a folder of them")
    prepare.add_argument(
        "--columns",
        default="",
        metavar="ROLE=COLUMN,…",
        help=f"columns of the roles {', '.join(ROLES)}; user, item and time default to their own names",
    )
    prepare.add_argument("--positive-at", type=float, help="labels from this value on are positive (ratings: 4)")
    prepare.add_argument(
        "--time-format", help="how times that are text are written, as for strptime (%%d/%%m/%%Y %%H:%%M)"
    )
    prepare.add_argument("--items", help="file with one row per item and attribute columns")
    prepare.add_argument("--item-column", help="the item's id in the item file (default: as in the events)")
    prepare.add_argument("--attributes", default="", metavar="COLUMN,…", help="item attributes, columns of --items")
    prepare.add_argument("--context", default="", metavar="COLUMN,…", help="further columns known before the outcome")
    add_prepare_options(prepare, 5)
    for command in (
        prepare,
        commands.add_parser("verify", help="check a prepared cache against its manifest"),
        commands.add_parser("info", help="print counts and sizes of a prepared cache"),
    ):
        command.add_argument("--cache", required=True, help="folder of the cache")
    return top


def columns_of(text: str, positive_at: float | None, time_format: str | None = None) -> EventColumns:
    """``user=userId,label=rating`` → the columns; ``UserError`` for an unknown role."""
    pairs = [part.split("=", 1) for part in _listed(text)]
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in ROLES or not pair[1]:
            raise UserError(f"--columns {'='.join(pair)!r}: expected ROLE=COLUMN with a role of {', '.join(ROLES)}")
    return EventColumns(**dict(pairs), positive_at=positive_at, time_format=time_format)


def run(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    if options.command == "prepare":
        find_files(options.events, "events")  # a missing file is said before what is wrong with the columns
        source = events_source(
            options.events,
            columns_of(options.columns, options.positive_at, options.time_format),
            items=options.items,
            item_column=options.item_column,
            attributes=_listed(options.attributes),
            context=_listed(options.context),
        )
        run_prepare(source, options.cache, options.min_history, options)
    elif options.command == "verify":
        verify(options.cache, Progress())
        print(f"{options.cache}: every checksum and every column is right")
    else:
        print(describe(options.cache))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parser().parse_args(arguments)
    return guarded(lambda: run(options))


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
