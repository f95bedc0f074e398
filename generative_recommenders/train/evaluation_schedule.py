"""When a run evaluates, by samples trained."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EvalSchedule:
    """Evaluations at ``first`` samples and then at every multiple of ``every``."""

    first: int
    every: int

    def due(self, samples: int, last: int) -> bool:
        """Whether an evaluation is due at ``samples``, the last one having been at ``last`` (negative for none)."""
        if not self.every:
            return False
        point = self.first if last < self.first else (last // self.every + 1) * self.every
        return samples >= point

    def on_grid(self, samples: int) -> bool:
        """Whether the schedule has a point at exactly so many samples."""
        return bool(self.every) and samples >= self.first and samples % self.every == 0
