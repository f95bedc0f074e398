"""Command line of the trainer: ``python -m generative_recommenders.train --config …``, the same under torchrun."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

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
    _add_dry_run(options)
    return options


def _add_dry_run(options: argparse.ArgumentParser) -> None:
    """What a dry run plans for; the machine need not be there."""
    group = options.add_argument_group("dry run", "plan a run and print it, on any machine, without GPUs or data")
    group.add_argument("--dry-run", action="store_true", help="print plan, memory, FLOPs and traffic, and end")
    group.add_argument("--ranks", type=int, help="processes, an accelerator each (default: 8)")
    group.add_argument("--ranks-per-host", type=int, help="of them on one host (default: 8)")
    group.add_argument("--device-kind", help="a100, h100, h200, b200, mi300x or mi325x (default: h200)")
    group.add_argument("--device-memory", metavar="SIZE", help="of an accelerator, e.g. 139GiB (default: the kind's)")
    group.add_argument("--host-memory", metavar="SIZE", help="of a host, for tables the accelerators do not hold")
    group.add_argument("--mean-rows", type=float, help="joined rows of the mean sample, where it is not measured")


_OF_A_DRY_RUN = ("ranks", "ranks_per_host", "device_kind", "device_memory", "host_memory", "mean_rows")


def _asked_of_a_dry_run(given: argparse.Namespace) -> dict[str, Any]:
    """What was given of the machine to plan for."""
    return {name: getattr(given, name) for name in _OF_A_DRY_RUN if getattr(given, name) is not None}


def _dry_run(given: argparse.Namespace) -> int:
    from generative_recommenders.train.dry_run import DryRunArguments, dry_run

    arguments = DryRunArguments(tuple(given.config), tuple(given.bind), **_asked_of_a_dry_run(given))
    return dry_run(arguments, show if settings.get("RANK") in (None, 0) else lambda _line: None)


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
        if not given.dry_run and _asked_of_a_dry_run(given):
            option = next(iter(_asked_of_a_dry_run(given))).replace("_", "-")
            parser().error(f"--{option} plans for another machine: add --dry-run, or leave it out")
    except UserError as exc:
        _refuse(str(exc))
        raise SystemExit(2) from None
    if given.list_options:
        from generative_recommenders.train.options_table import options_table

        return guarded(lambda: show(options_table()))
    try:
        with quiet_loading():
            from generative_recommenders.train.arguments import Arguments
            from generative_recommenders.train.run import run
    except Exception as exc:  # libraries that do not fit raise whatever comes first: OSError, AttributeError, …
        return _not_loaded(exc)
    try:
        if settings.get("RANK") in (None, 0):
            for warning in filter(None, [*settings.strangers(), settings.lonely_task()]):
                complain(f"warning: {warning}")
        if given.dry_run:
            return _dry_run(given)
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
