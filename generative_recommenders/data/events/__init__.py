"""Own events: a documented file schema through the same preparation and reading as the public data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from generative_recommenders.data.dataset import RankingDataset

__all__ = ["events"]


def events(
    cache: str,
    *,
    min_history: int | None = None,
    history_length: int = 200,
    history_strategy: str = "last_n",
    history_ties: str = "exclude",
    scan_limit: int = 20_000,
    holdout_fraction: float = 0.1,
    train_days: float | None = None,
    window_seconds: int = 86_400,
    item_features: Sequence[str] | None = None,
    contextual_features: Sequence[str] | None = None,
    table_rows: Mapping[str, int] | None = None,
    table_rows_limit: int | None = None,
    num_workers: int = 0,
) -> RankingDataset:
    """A cache that ``python -m generative_recommenders.data.events prepare`` made; the newest samples are the hold-out.

    ``item_features``: by default the item's id and every attribute; ``contextual_features``: by default the user's id
    and every context column, crosses (``user_x_<attribute>``, ``item_x_hour`` …) may be added. ``min_history``: what
    the cache must have been prepared with, None takes it as it is. ``train_days``: train on the newest so many days
    before the hold-out, None: on all (a model that goes on day after day has seen the others).
    """
    from generative_recommenders.data.prepared import dataset_of_cache, open_cache
    from generative_recommenders.data.reader import HistoryOptions
    from generative_recommenders.data.windows import split_last_fraction

    command = (
        "python -m generative_recommenders.data.events prepare --events FILE --columns user=…,item=…,time=…,label=…"
    )
    opened = open_cache(cache, min_history, f"{command} --cache {cache}")
    return dataset_of_cache(
        "events",
        opened,
        split_last_fraction(opened, holdout_fraction, window_seconds, train_days),
        HistoryOptions(history_length, history_strategy, history_ties, scan_limit),
        item_features=("item_id", *opened.attributes) if item_features is None else item_features,
        contextual_features=("uid", *opened.context) if contextual_features is None else contextual_features,
        table_rows=table_rows,
        table_rows_limit=table_rows_limit,
        num_workers=num_workers,
    )
