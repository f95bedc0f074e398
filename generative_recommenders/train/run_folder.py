"""What a run leaves behind: ``runs/<name>/`` with configuration, metrics, TensorBoard events, result and report.

Only rank 0 writes. ``result.json`` exists from the start (as failed, "did not finish") and is replaced whole at the
end, so that a run that was killed never looks like one that succeeded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path
from generative_recommenders.train.checkpoint import Progress, newest
from generative_recommenders.train.flops import Peak
from generative_recommenders.train.gin_files import FREE_ON_RESUME

# Of the options that a resumed run may change, those that ask for something else than what the run has done.
ASKED = frozenset(
    "train.mode train.epochs train.max_steps train.target_auc train.stop_at_target train.beat_baseline "
    "train.max_gap_to_best checkpoint.load".split()
)


@dataclasses.dataclass
class Result:
    """The content of ``result.json``, exactly these fields; ``best_auc`` is the best reachable AUC, where known.

    ``rmse`` and ``mae`` stand there only if the run has a regression task. ``peak`` is what MFU and HFU divide by.
    """

    status: str = "failed"
    seconds: float = 0.0
    samples: int = 0
    auc: dict[str, float] = dataclasses.field(default_factory=dict)
    best_auc: float | None = None
    baseline_auc: float | None = None
    auc_best_seen: float | None = None
    config: dict[str, object] = dataclasses.field(default_factory=dict)
    reason: str | None = "the run did not finish"
    peak: Peak | None = None
    rmse: dict[str, float] | None = None
    mae: dict[str, float] | None = None


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # cut off by a full disk, it is of no use
        raise


class RunFolder:
    """The folder of one run, on rank 0."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._writer: SummaryWriter | None = None
        self._held: int | None = None

    def hold(self) -> None:
        """Create the folder and keep other processes out of it until ``finish`` or this process's end, even a kill.

        Raises:
            UserError: another process is working in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise UserError(f"{self.path}: another run is using it; give another --run-name") from None
        except OSError:
            pass  # a file system without locks

    def release(self) -> None:
        """Let others in."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def start(self, config_text: str, resumed_at: Progress | None) -> None:
        """Create the folder, or go on in it from ``resumed_at`` (what was logged after it is dropped)."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.gin", config_text)
        if resumed_at is not None:
            self._forget_after(resumed_at)
        purge = None if resumed_at is None else resumed_at.step + 1
        self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=purge)

    @property
    def metrics_file(self) -> pathlib.Path:
        """One JSON object a line, each with ``kind`` (train or eval), ``step`` and ``samples``."""
        return self.path / "metrics.jsonl"

    def _forget_after(self, progress: Progress) -> None:
        last = {"train": progress.logged_step, "eval": progress.samples_at_last_eval}
        at = {"train": "step", "eval": "samples"}
        kept = [json.dumps(row) for row in self.metrics() if row[at[row["kind"]]] <= last[row["kind"]]]
        write_atomically(self.metrics_file, "".join(line + "\n" for line in kept))

    def metrics(self) -> list[dict]:
        """All rows written so far; a last line cut off by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def add(self, kind: str, step: int, samples: int, figures: dict[str, object]) -> None:
        """Append a row to ``metrics.jsonl`` and its numbers to TensorBoard. Non-finite numbers are written as null."""
        row = {"kind": kind, "step": step, "samples": samples, **figures}
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")
        if self._writer is not None:
            for name, value in figures.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
            self._writer.flush()

    def finish(self, result: Result) -> None:
        """Write ``result.json``, close the event files, let go of the folder."""
        self.write_result(result)
        self.close()

    def close(self) -> None:
        """Close the event files and let go of the folder."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._writer = None
            self.release()

    def discard(self) -> None:
        """Remove the folder of a run that never began, and the folder around it if that is empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def write_result(self, result: Result) -> None:
        """Replace ``result.json``."""
        self.path.mkdir(parents=True, exist_ok=True)
        fields = dataclasses.asdict(result)
        absent = [name for name in ("rmse", "mae") if fields[name] is None]
        text = json.dumps({k: v for k, v in fields.items() if k not in absent}, indent=1, default=str)
        write_atomically(self.path / "result.json", text + "\n")


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
    alike = isinstance(then, dict) and all(
        now.get(option) == then.get(option)
        for option in now.keys() | then.keys()
        if option in ASKED or option not in FREE_ON_RESUME
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
