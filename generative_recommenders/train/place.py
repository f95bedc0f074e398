"""The folder that a run works in: which it is, whether it is free, and whether the run goes on there or begins.

One process decides, rank 0, and holds the folder against other runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import shutil
from collections.abc import Mapping

from generative_recommenders.errors import UserError
from generative_recommenders.options import OnResume
from generative_recommenders.paths import user_path
from generative_recommenders.train.arguments import Arguments
from generative_recommenders.train.checkpoint_meta import newest
from generative_recommenders.train.config import section_options
from generative_recommenders.train.distributed import World
from generative_recommenders.train.failures import one_line
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.run_folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Place:
    """A run's folder, whether the run goes on in it, and why there is nothing to do (or ``None``)."""

    folder: RunFolder
    resuming: bool
    finished: str | None


def open_folder(arguments: Arguments, config: RunConfig, world: World) -> Place:
    """The run's place on every rank: rank 0 picks the name, checks that it is free and decides for all.

    A collective call.

    Raises:
        UserError: on every rank, why there is no such place.
    """
    folder, resuming, finished, problem = None, False, None, None
    if world.is_main:
        try:
            folder, resuming, finished = _take_folder(arguments, config)
        except UserError as exc:
            problem = str(exc)
        except OSError as exc:
            problem = f"--runs-dir {arguments.runs_dir}: {one_line(exc)}"
    path, resuming, finished, problem = world.gather((folder and folder.path, resuming, finished, problem))[0]
    if problem is not None:
        raise UserError(problem)
    return Place(folder or RunFolder(path), resuming, finished)


def _take_folder(arguments: Arguments, config: RunConfig) -> tuple[RunFolder, bool, str | None]:
    """A folder that this run alone works in, whether it goes on there, and why there is nothing to do (or ``None``)."""
    name = arguments.run_name
    if name is not None:
        way = lambda: way_on(arguments.runs_dir, name, arguments.resume, config.values())
        folder = claim(arguments.runs_dir, name, way()[0])
        folder.hold()
        resuming, finished = way()  # again: whoever held it until now may have run in it
        if finished is None:
            claim(arguments.runs_dir, name, resuming)
        return folder, resuming, finished
    if arguments.resume != "no":
        raise UserError("--resume: needs --run-name, the name of the run to go on with")
    name = f"{pathlib.Path(arguments.config[-1]).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    while (user_path(arguments.runs_dir) / name).exists():  # another run began in the same second
        name += "x"
    folder = claim(arguments.runs_dir, name, resume=False)
    folder.hold()
    return folder, False, None


def claim(runs_dir: str, name: str, resume: bool) -> RunFolder:
    """The folder for a run of this name, not yet created.

    Raises:
        UserError: a name that is no plain folder name; an earlier run of that name without ``resume``; nothing to
            resume; results that resuming would replace by beginning again; a place that cannot be written.
    """
    if not name or name in (".", "..") or "/" in name or os.sep in name:
        raise UserError(f"--run-name {name!r}: must be a plain folder name")
    path = user_path(runs_dir) / name
    if path.exists() and not path.is_dir():
        raise UserError(f"--run-name {name}: {path} is a file; give another --run-name")
    started = (path / "config.gin").exists()
    if resume and not started:
        raise UserError(f"--resume: {path} holds no run; check --run-name and --runs-dir")
    if started:
        _check_earlier(path, resume)
    parent = next(p for p in [path, *path.parents] if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--runs-dir {runs_dir}: {parent} is not a writable folder; give another --runs-dir")
    if shutil.disk_usage(parent).free < 64 * 2**20:
        raise UserError(f"--runs-dir {runs_dir}: less than 64 MiB free; free some space or give another --runs-dir")
    return RunFolder(path)


def way_on(runs_dir: str, name: str, resume: str, options: Mapping[str, object]) -> tuple[bool, str | None]:
    """Whether a run of this name goes on in its folder, and why there is nothing left to do (or ``None``).

    Args:
        resume: ``no``, ``yes``, or ``auto``: go on if a run has begun there, unless it has done what is asked.
        options: what is asked now, by full name.
    """
    path = pathlib.Path(runs_dir) / name
    if resume != "auto":
        return resume == "yes", None
    if not (path / "config.gin").exists():
        return False, None
    result = _read_result(path)
    now = json.loads(json.dumps(dict(options), default=str))
    then = result.get("config")
    free = {name for name, option in section_options().items() if option.on_resume is OnResume.FREE}
    alike = isinstance(then, dict) and all(
        now.get(name) == then.get(name) for name in (now.keys() | then.keys()) - free
    )
    if result.get("status") == "ok" and alike:
        return True, f"{path}: the run is finished, nothing to do"
    return True, None


def _check_earlier(path: pathlib.Path, resume: bool) -> None:
    """Whether a run may go on, or begin again, in the folder of an earlier one."""
    found, results = newest(path / "checkpoints"), _has_results(path)
    if resume and found is None and results:
        raise UserError(
            f"--resume: {path} has no checkpoint to go on from, and beginning again would replace its results; give "
            "another --run-name (a run with --bind checkpoint.at_end=True can be resumed when it has ended)"
        )
    if not resume:
        way_on = ", or --resume to go on from its newest checkpoint"
        if found is None:
            way_on = "" if results else ", or --resume to begin it again (it has neither checkpoint nor results)"
        raise UserError(f"{path}: holds an earlier run; give another --run-name{way_on}")


def _has_results(path: pathlib.Path) -> bool:
    """Whether a run ended as asked, or with an evaluation; not one that was killed or stopped before any."""
    result = _read_result(path)
    return result.get("status") == "ok" or bool(result.get("auc"))


def _read_result(path: pathlib.Path) -> dict[str, object]:
    """``result.json`` of a run folder, empty where there is none to be read."""
    try:
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}
