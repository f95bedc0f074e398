"""Command line of the trainer: ``python -m generative_recommenders.train --config …``, the same under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from generative_recommenders import settings
from generative_recommenders.errors import UserError


class _Parser(argparse.ArgumentParser):
    """Errors in one line, that the caller prints."""

    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = _Parser(prog="python -m generative_recommenders.train", description="Train and evaluate a ranker.")
    options.add_argument("--config", action="append", metavar="FILE", help="gin file; a later one wins over an earlier")
    options.add_argument(
        "--bind", action="append", default=[], metavar="NAME=VALUE", help="set one option, e.g. 'train.batch_size=128'"
    )
    options.add_argument("--run-name", help="folder of the run under --runs-dir (default: configuration and time)")
    options.add_argument("--runs-dir", default="runs", help="where run folders are made (default: runs)")
    options.add_argument("--device", default="auto", help="auto (GPU if there is one), cpu or cuda")
    options.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        default="no",
        choices=("yes", "auto"),
        help="go on from the newest checkpoint of --run-name; --resume=auto begins where there is nothing yet",
    )
    options.add_argument("--list-options", action="store_true", help="print every option with its range, and end")
    return options


def _show(text: str) -> int:
    """Print; a reader that has seen enough (``| head``) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
    return 0


def _refuse(problem: str) -> None:
    """Say what is wrong with the command line; where there are other ranks, through rank 0 and so that they end too."""
    speaks = True
    try:
        rank, size = settings.get("RANK") or 0, settings.get("WORLD_SIZE") or 1
        if size > 1:
            from generative_recommenders.train import meeting

            speaks = rank == 0 or rank >= size  # the latter is no rank: let it speak
            meeting.meet({}, problem)
    except UserError as exc:
        problem, speaks = str(exc), speaks or isinstance(exc, meeting.NotMet)
    except ImportError:
        speaks = True
    if speaks:
        print(f"error: {problem}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and return the exit status."""
    settings.share_cores_politely()
    try:
        given = parser().parse_args(argv)
        if not given.config and not given.list_options:
            parser().error("--config is missing: give a gin file, for example configs/synthetic.gin")
    except UserError as exc:
        _refuse(str(exc))
        raise SystemExit(2) from None
    if given.list_options:
        from generative_recommenders.train.options_table import options_table

        return _show(options_table())
    try:
        from generative_recommenders.train.run import Arguments, run
    except ImportError as exc:
        print(f"error: {exc}; install the requirements (scripts/env.sh does)", file=sys.stderr)
        return 2
    try:
        if settings.get("RANK") in (None, 0):
            for warning in filter(None, [*settings.strangers(), settings.lonely_task()]):
                print(f"warning: {warning}", file=sys.stderr)
        return run(
            Arguments(
                tuple(given.config), tuple(given.bind), given.run_name, given.runs_dir, given.device, given.resume
            )
        )
    except UserError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
