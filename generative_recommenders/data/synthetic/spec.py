"""Size and signal of generated listening data."""

from __future__ import annotations

import dataclasses
import math

from generative_recommenders.errors import UserError

#: Yambda's shares of event types; the rest of the listens are skips.
LISTEN_SHARE = 0.972
LIKE_SHARE = 0.019
LISTEN_PLUS_SHARE = 0.613 / LISTEN_SHARE


@dataclasses.dataclass(frozen=True)
class SyntheticSpec:
    """What to generate. The same spec gives the same files.

    Events per user are log-normal with ``events_median`` and ``events_mean``, cut at ``events_max``, and lie within
    ``days`` days. A listen's log-odds of listen_plus are the sum of ``taste`` × (user taste · artist factors),
    ``quality`` × item quality, ``bias`` × user bias (each part standard normal or nearly so), and ``recency`` × exp(-Δ)
    with Δ the days since the user last listened to the artist; an intercept makes the mean Yambda's.
    """

    users: int = 100
    items: int = 100
    artists: int = 20
    albums: int = 40
    days: int = 15
    events_median: float = 640.0
    events_mean: float = 700.0
    events_max: int = 27_738
    groups: int = 4
    taste: float = 1.3
    quality: float = 0.7
    bias: float = 0.7
    recency: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "items", "artists", "albums", "days", "events_max", "groups"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: expected 1 or more")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}: expected 0 or more")
        if not 1 <= self.events_median <= self.events_mean:
            raise UserError(
                f"events_median {self.events_median} and events_mean {self.events_mean}: expected 1 <= median <= mean"
            )
        if self.days * 86_400 >= 2**32:
            raise UserError(f"days is {self.days}: the times would not fit 32 bits")

    @property
    def events_sigma(self) -> float:
        """Spread of the logarithm of a user's events."""
        return math.sqrt(2 * math.log(self.events_mean / self.events_median))


def yambda_like(events: int, seed: int = 0) -> SyntheticSpec:
    """About ``events`` events with Yambda's distributions; items and the like grow with users as in its sizes."""
    if events < 1:
        raise UserError(f"{events} events asked for: expected 1 or more")
    users = max(1, round(events / 4_520))  # the mean that is left after the cut at events_max
    items = max(10, round(9_340 * users**0.5))
    return SyntheticSpec(
        users=users,
        items=items,
        artists=max(2, round(items * 0.138)),
        albums=max(2, round(items * 0.359)),
        days=301,
        events_median=2_695,
        events_mean=4_763,
        groups=32,
        seed=seed,
    )
