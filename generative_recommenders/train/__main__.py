"""Command line of the trainer: ``python -m generative_recommenders.train --config …``, the same under torchrun."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Sequence

from generative_recommenders import settings
from generative_recommenders._versions import quiet_loading, why_not_loaded
from generative_recommenders.errors import UserError
from generative_recommenders.terminal import BAD_INPUT, complain, guarded, show, speak_any_encoding


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


def _not_loaded(exc: Exception) -> int:
    """Say in one line why the libraries cannot be loaded (``HSTU_TRACEBACK=1``: with the traceback)."""
    with contextlib.suppress(UserError):  # a malformed variable is said by a run that begins
        if settings.get("HSTU_TRACEBACK"):
            traceback.print_exception(exc)
    complain(f"error: {why_not_loaded(exc)}")
    return BAD_INPUT


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
    except Exception:  # libraries that do not fit: nobody can be met
        speaks = True
    if speaks:
        complain(f"error: {problem}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and return the exit status."""
    speak_any_encoding()
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

        return guarded(lambda: show(options_table()))
    try:
        with quiet_loading():
            from generative_recommenders.train.run import Arguments, run
    except Exception as exc:  # libraries that do not fit raise whatever comes first: OSError, AttributeError, …
        return _not_loaded(exc)
    try:
        if settings.get("RANK") in (None, 0):
            for warning in filter(None, [*settings.strangers(), settings.lonely_task()]):
                complain(f"warning: {warning}")
        return run(
            Arguments(
                tuple(given.config), tuple(given.bind), given.run_name, given.runs_dir, given.device, given.resume
            )
        )
    except UserError as exc:
        complain(f"error: {exc}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
