"""Where a run stands."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Progress:
    """Where a run stands: what the loop counts and what it has seen. Saved in ``meta.json``.

    ``seconds`` of training alone, ``seconds_in_all`` of everything, both from the run's beginning.
    """

    step: int = 0
    samples: int = 0
    phase: int = 0
    samples_in_phase: int = 0
    samples_at_last_eval: int = -1
    logged_step: int = 0
    best_auc: float | None = None
    seconds: float = 0.0
    seconds_in_all: float = 0.0
