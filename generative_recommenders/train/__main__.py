"""Command line of the trainer: ``python -m generative_recommenders.train --config …``, the same under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from generative_recommenders import settings
from generative_recommenders.errors import UserError


class _Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str):
        self.exit(2, f"error: {message}; see --help\n")


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
    options.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --run-name")
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


def _asked_of_a_dry_run(given: argparse.Namespace) -> dict[str, object]:
    """What was given of the machine to plan for."""
    return {name: getattr(given, name) for name in _OF_A_DRY_RUN if getattr(given, name) is not None}


def _dry_run(given: argparse.Namespace) -> int:
    from generative_recommenders.train.dry_run import DryRunArguments, dry_run

    arguments = DryRunArguments(tuple(given.config), tuple(given.bind), **_asked_of_a_dry_run(given))
    return dry_run(arguments, _show if settings.get("RANK") in (None, 0) else lambda _line: None)


def _show(text: str) -> int:
    """Print; a reader that has seen enough (``| head``) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and return the exit status."""
    given = parser().parse_args(argv)
    settings.share_cores_politely()
    if given.list_options:
        from generative_recommenders.train.options_table import options_table

        return _show(options_table())
    if not given.dry_run and _asked_of_a_dry_run(given):
        option = next(iter(_asked_of_a_dry_run(given))).replace("_", "-")
        parser().error(f"--{option} plans for another machine: add --dry-run, or leave it out")
    if not given.config:
        parser().error("--config is missing: give a gin file, for example configs/synthetic.gin")
    try:
        from generative_recommenders.train.run import Arguments, run
    except ImportError as exc:
        print(f"error: {exc}; install the requirements (scripts/env.sh does)", file=sys.stderr)
        return 2
    try:
        if settings.get("RANK") in (None, 0):
            for warning in settings.strangers():
                print(f"warning: {warning}", file=sys.stderr)
        if given.dry_run:
            return _dry_run(given)
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
