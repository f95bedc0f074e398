"""Yambda, the public music data set: download, preparation, and its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from generative_recommenders.data.yambda.layout import MIN_HISTORY, cache_folder, require_size

if TYPE_CHECKING:
    from generative_recommenders.data.dataset import RankingDataset

__all__ = ["yambda"]

ITEM_FEATURES = ("item_id", "artist_id", "album_id")
CONTEXTUAL_FEATURES = (
    "uid",
    "user_x_artist",
    "user_x_album",
    "user_x_hour",
    "item_x_hour",
    "artist_x_hour",
    "user_x_is_organic",
    "user_x_artist_x_hour",
)


def yambda(
    path: str,
    *,
    size: str = "50m",
    cache: str | None = None,
    min_history: int | None = None,
    history_length: int = 4086,
    history_strategy: str = "interleaved",
    history_ties: str = "exclude",
    scan_limit: int = 20_000,
    train_days: int = 300,
    gap_seconds: int = 1800,
    window_seconds: int = 86_400,
    item_features: Sequence[str] = ITEM_FEATURES,
    contextual_features: Sequence[str] = CONTEXTUAL_FEATURES,
    table_rows: Mapping[str, int] | None = None,
    table_rows_limit: int | None = None,
    num_workers: int = 0,
) -> RankingDataset:
    """The prepared cache of ``size`` under ``path`` (or in ``cache``), split by time as the benchmark does.

    The last day is the hold-out, the ``gap_seconds`` before it are unused, the ``train_days`` before those train, in
    windows of ``window_seconds``. ``min_history``: what the cache must have been prepared with, by default 50 (5b:
    4,086). Tables follow the vocabularies; ``table_rows_limit`` hashes big crosses down to so many rows.
    """
    from generative_recommenders.data.prepared import dataset_of_cache, open_cache
    from generative_recommenders.data.reader import HistoryOptions
    from generative_recommenders.data.windows import split_last_day

    folder = cache_folder(path, size) if cache is None else cache
    least = MIN_HISTORY[require_size(size)] if min_history is None else min_history
    command = f"python -m generative_recommenders.data.yambda prepare --size {size} --path {path}"
    events = open_cache(folder, least, command)
    return dataset_of_cache(
        f"yambda_{size}",
        events,
        split_last_day(events, train_days, gap_seconds, window_seconds=window_seconds),
        HistoryOptions(history_length, history_strategy, history_ties, scan_limit),
        section="yambda",
        item_features=item_features,
        contextual_features=contextual_features,
        table_rows=table_rows,
        table_rows_limit=table_rows_limit,
        num_workers=num_workers,
    )
