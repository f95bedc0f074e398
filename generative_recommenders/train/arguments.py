"""What a run is started with."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command line. ``resume``: ``no``, ``yes``, or ``auto`` (go on, or begin where there is nothing)."""

    config: tuple[str, ...]
    bind: tuple[str, ...] = ()
    run_name: str | None = None
    runs_dir: str = "runs"
    device: str = "auto"
    resume: str = "no"
