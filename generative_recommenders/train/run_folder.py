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

from generative_recommenders.disk import write_atomically
from generative_recommenders.errors import UserError
from generative_recommenders.train.flops import Peak
from generative_recommenders.train.progress import Progress


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

    def start(self, config_text: str | None, resumed_at: Progress | None) -> None:
        """Create the folder, or go on in it from ``resumed_at`` (what was logged after it is dropped).

        ``config_text`` becomes its ``config.gin``; ``None`` leaves the one that the run was trained with.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if config_text is not None:
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

    def add(self, kind: str, step: int, samples: int, figures: Mapping[str, object]) -> None:
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
