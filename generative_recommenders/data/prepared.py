"""A ranking data set from a prepared event cache: what Yambda, generated data and own events have in common."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.crosses import cross_rows, is_cross, limit_rows
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.data.reader import HistoryOptions
from generative_recommenders.data.schema import NAME_RULE, FeatureSchema, clashing_name
from generative_recommenders.data.windows import Split
from generative_recommenders.errors import UserError


def open_cache(path: str | pathlib.Path, min_history: int | None, prepare_with: str) -> EventCache:
    """The cache in ``path``, which must have been prepared with ``min_history``; ``prepare_with`` is the command."""
    try:
        cache = EventCache.open(path)
    except UserError as error:
        raise UserError(f"{error} ({prepare_with})") from None
    if (name := clashing_name([*cache.attributes, *cache.context])) is not None:
        raise UserError(
            f"{cache.name} has a feature named {name!r}, which is not possible any more: rename its column and prepare "
            f"again ({NAME_RULE})"
        )
    if min_history is not None and cache.min_history != min_history:
        raise UserError(
            f"{cache.name} was prepared with min_history={cache.min_history}, asked for is {min_history}: "
            f"prepare again ({prepare_with} --min-history {min_history} --overwrite), or ask for {cache.min_history}"
        )
    return cache


def dataset_of_cache(
    name: str,
    cache: EventCache,
    split: Split,
    history: HistoryOptions,
    *,
    item_features: Sequence[str],
    contextual_features: Sequence[str],
    table_rows: Mapping[str, int] | None = None,
    table_rows_limit: int | None = None,
    num_workers: int = 0,
    best_auc: float | None = None,
    section: str | None = None,
) -> RankingDataset:
    """Tables as large as the vocabularies; crosses in proportion to the users they are sized by (``cross_users``).

    ``table_rows_limit`` cuts crosses, each of them one line of the data set's notes; ``table_rows`` overrides single
    tables.
    ``section``: what the options stand under in a configuration, for messages (None: ``name``).
    """
    rows, section = {}, section or name
    for option, features in (("item_features", item_features), ("contextual_features", contextual_features)):
        for feature in features:
            if is_cross(feature):
                rows[feature] = cross_rows(feature, cache.cross_users)
            elif feature in cache.vocab:
                rows[feature] = cache.vocab[feature]
            else:
                known = ", ".join(sorted(cache.vocab))
                raise UserError(
                    f"{section}.{option}: {name} has no feature {feature!r}: possible are {known} and crosses"
                )
    unknown = [feature for feature in table_rows or {} if feature not in rows]
    if unknown:
        raise UserError(f"{section}.table_rows names {unknown[0]!r}, which is no feature of {name}: {', '.join(rows)}")
    rows, notes = limit_rows(rows | dict(table_rows or {}), table_rows_limit)
    counted = f"{cache.num_events:,} events of {cache.num_users:,} users, {cache.num_anchors:,} samples"
    return RankingDataset(
        name,
        cache,
        FeatureSchema(tuple(item_features), tuple(contextual_features), rows),
        split,
        history,
        num_workers=num_workers,
        best_auc=best_auc,
        notes=[counted, *notes],
    )
