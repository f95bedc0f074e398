"""Generated listening data whose best reachable AUC is known, in exactly Yambda's file formats."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from generative_recommenders.data.cache import MARKER, EventCache
from generative_recommenders.data.synthetic.generate import TRUTH, generate
from generative_recommenders.data.synthetic.spec import SyntheticSpec, yambda_like
from generative_recommenders.data.yambda.layout import cache_folder
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

if TYPE_CHECKING:
    from generative_recommenders.data.dataset import RankingDataset

__all__ = ["SyntheticSpec", "generate", "synthetic_yambda", "true_probability", "yambda_like"]

_SIZE = "50m"


def synthetic_yambda(
    path: str = "generated",
    *,
    users: int = SyntheticSpec.users,
    items: int = SyntheticSpec.items,
    days: int = SyntheticSpec.days,
    events_median: float = SyntheticSpec.events_median,
    events_mean: float = SyntheticSpec.events_mean,
    seed: int = 0,
    min_history: int = 10,
    history_length: int = 60,
    history_strategy: str = "interleaved",
    history_ties: str = "exclude",
    holdout_days: float = 2,
    window_seconds: int = 86_400,
    item_features: Sequence[str] = ("item_id", "artist_id", "album_id"),
    contextual_features: Sequence[str] = ("uid", "user_x_artist", "user_x_hour"),
    table_rows_limit: int | None = None,
    num_workers: int = 0,
) -> RankingDataset:
    """Generate (once per spec, in a sub-folder of ``path``), prepare and open a planted problem.

    ``best_auc`` of the data set is the AUC of the true probabilities over exactly its hold-out samples: no model can be
    expected to do better. Several processes may call this at once: one generates, the others wait.
    """
    from generative_recommenders.data.prepared import dataset_of_cache
    from generative_recommenders.data.reader import HistoryOptions
    from generative_recommenders.data.windows import split_last_day
    from generative_recommenders.ranking import auc

    if round(holdout_days * 86_400) < 1:
        raise UserError(f"synthetic_yambda.holdout_days = {holdout_days}: give at least a second, 1 / 86400")
    spec = SyntheticSpec(
        users=users, items=items, days=days, events_median=events_median, events_mean=events_mean, seed=seed
    )
    folder = user_path(path) / hashlib.sha256(repr((spec, min_history)).encode()).hexdigest()[:12]
    cache = _generated_cache(folder, spec, min_history)
    split = split_last_day(
        cache, train_days=days, test_seconds=round(holdout_days * 86_400), window_seconds=window_seconds
    )
    lo, hi = cache.anchor_range(split.holdout.start, split.holdout.end)
    events = cache.anchors[lo:hi].astype(np.int64)
    return dataset_of_cache(
        "synthetic_yambda",
        cache,
        split,
        HistoryOptions(history_length, history_strategy, history_ties),
        item_features=item_features,
        contextual_features=contextual_features,
        table_rows_limit=table_rows_limit,
        num_workers=num_workers,
        best_auc=auc(cache.bits[events] == 1, true_probability(folder / TRUTH, cache, events)),
    )


def true_probability(truth: str | pathlib.Path, cache: EventCache, events: np.ndarray) -> np.ndarray:
    """float32 [N] true probability of listen_plus of N listens (event numbers of a cache), from ``truth``."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(truth)
    key = lambda user, time: (user.astype(np.uint64) << np.uint64(32)) | time.astype(np.uint64)  # noqa: E731
    known = key(table["uid"].to_numpy(), table["timestamp"].to_numpy())
    wanted = key(cache.user_ids[cache.user_of(events)], cache.time[events])
    place = np.searchsorted(known, wanted)
    if not np.array_equal(known[np.minimum(place, len(known) - 1)], wanted):
        raise ValueError(f"{truth} does not know every listen asked for: it belongs to other data")
    return table["probability"].to_numpy()[place]


def _generated_cache(folder: pathlib.Path, spec: SyntheticSpec, min_history: int) -> EventCache:
    folder.mkdir(parents=True, exist_ok=True)
    cache = cache_folder(folder, _SIZE)
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (cache / MARKER).exists():
            with contextlib.suppress(UserError):  # made by another version: goes on below
                return EventCache.open(cache)
        from generative_recommenders.data.prepare import prepare  # needs DuckDB, which opening does not
        from generative_recommenders.data.yambda.files import yambda_source

        if not (folder / "generated").exists():
            generate(folder, spec, size=_SIZE)
            (folder / "generated").touch()
        source = yambda_source(folder, _SIZE)
        try:
            prepare(source, cache, min_history=min_history)
        except UserError:  # made by another version or at another path: the folder is our own, so replace it
            prepare(source, cache, min_history=min_history, overwrite=True)
        return EventCache.open(cache)
