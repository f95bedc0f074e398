"""``python -m generative_recommenders.data.yambda download|prepare|verify|info --size 50m|500m|5b --path FOLDER``."""

from __future__ import annotations

import argparse
import sys

from generative_recommenders.data.prepare.command_line import add_prepare_options, run_prepare
from generative_recommenders.data.prepare.progress import Progress
from generative_recommenders.data.prepare.verify import describe, verify
from generative_recommenders.data.yambda.download import download
from generative_recommenders.data.yambda.files import yambda_source
from generative_recommenders.data.yambda.layout import MIN_HISTORY, SIZES, cache_folder
from generative_recommenders.terminal import guarded, show


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m generative_recommenders.data.yambda", description="Yambda: from the hub to the event cache."
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in {
        "download": "fetch the files from the hub (resumes, checks)",
        "prepare": "turn the files into the event cache (resumes)",
        "verify": "check a prepared cache against its manifest",
        "info": "print counts and sizes of a prepared cache",
    }.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--size", required=True, choices=SIZES)
        command.add_argument("--path", required=True, help="folder of the data set's files")
        if name != "download":
            command.add_argument("--cache", help="folder of the cache (default PATH/cache/SIZE)")
        if name == "prepare":
            add_prepare_options(command, None)
    return top


def run(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    if options.command == "download":
        return download(options.path, options.size)
    cache = options.cache or cache_folder(options.path, options.size)
    if options.command == "prepare":
        least = MIN_HISTORY[options.size] if options.min_history is None else options.min_history
        return run_prepare(yambda_source(options.path, options.size), cache, least, options)
    if options.command == "verify":
        verify(cache, Progress())
        show(f"{cache}: every checksum and every column is right")
        return None
    show(describe(cache))
    return None


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return guarded(lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
