"""Command line of the trainer: ``python -m generative_recommenders.train --config …``, the same under torchrun."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.terminal import complain, show, speak_any_encoding


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
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and return the exit status."""
    speak_any_encoding()
    given = parser().parse_args(argv)
    settings.share_cores_politely()
    if given.list_options:
        from generative_recommenders.train.options_table import options_table

        return show(options_table())
    if not given.config:
        parser().error("--config is missing: give a gin file, for example configs/synthetic.gin")
    try:
        from generative_recommenders.train.run import Arguments, run
    except ImportError as exc:
        complain(f"error: {exc}; install the requirements (scripts/env.sh does)")
        return 2
    try:
        if settings.get("RANK") in (None, 0):
            for warning in settings.strangers():
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
