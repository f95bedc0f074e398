"""MovieLens: real ratings with times. A rating of 4 or more plays listen_plus, a lower one skip; the rating itself is a
label too, ``item_rating``, in hundredths of a star.

The hold-out is the newest 10 % of the ratings. Histories, crosses and batches are those of every other data set; on top
of ids, genres, year and what is known of the user, features may be running statistics (``online_stats.py``).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from generative_recommenders.data.baseline import auc, online_baseline
from generative_recommenders.data.cache import EventCache, cache_from_events
from generative_recommenders.data.crosses import cross_parts, is_cross, limit_rows
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.data.history import SCAN_LIMIT
from generative_recommenders.data.online_stats import online_columns
from generative_recommenders.data.reader import HistoryOptions
from generative_recommenders.data.schema import LISTEN_PLUS, SKIP, FeatureSchema
from generative_recommenders.data.windows import DAY, split_last_fraction
from generative_recommenders.errors import UserError

POSITIVE_RATING = 4.0
#: Rows of the table of a cross; the ids crossed are small, so this is roomy.
CROSS_ROWS = 4096

#: Label of a candidate: its rating times 100.
RATING_LABEL = "item_rating"

ITEM_FEATURES = ("item_id", "genres", "year")
CONTEXTUAL_FEATURES = ("uid",)

WHERE_100K = (
    "install the wheel that carries it (pip install --no-deps recbole==1.2.1), or name another folder with its files: "
    "--bind 'movielens_100k.path=\"…\"'"
)
WHERE_SMALL = (
    "download ml-latest-small.zip from grouplens.org/datasets/movielens, unpack it and name its folder: "
    "--bind 'movielens_small.path=\"…\"'"
)


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Ratings as read: columns [E], attributes by item and by user (original id → number), genres of each item."""

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    item_attributes: Mapping[str, Mapping[int, int]]
    user_attributes: Mapping[str, Mapping[int, int]]
    genres: Mapping[int, Sequence[str]]


def movielens_100k(path: str | None = None, **options) -> RankingDataset:
    """MovieLens-100K in atomic files (``ml-100k.inter``, ``.item``, ``.user``; tab separated).

    ``path``: their folder; None finds them in the installed ``recbole`` wheel, which is not imported. ``options``:
    those of ``movielens_dataset``. Users carry age, gender and occupation.
    """
    folder = _recbole_folder() if path is None else _folder(path, WHERE_100K)
    return movielens_dataset("movielens_100k", read_100k(folder), **options)


def movielens_small(path: str | None = None, **options) -> RankingDataset:
    """ml-latest-small: ``ratings.csv`` and ``movies.csv`` in the folder ``path``; ``options`` as for the other one."""
    if path is None:
        raise UserError(f"movielens_small.path is not set: {WHERE_SMALL}")
    return movielens_dataset("movielens_small", read_small(_folder(path, WHERE_SMALL)), **options)


def movielens_dataset(
    name: str,
    ratings: Ratings,
    *,
    item_features: Sequence[str] = ITEM_FEATURES,
    contextual_features: Sequence[str] = CONTEXTUAL_FEATURES,
    history_length: int = 60,
    history_strategy: str = "last_n",
    history_ties: str = "exclude",
    scan_limit: int = SCAN_LIMIT,
    min_history: int = 5,
    holdout_fraction: float = 0.1,
    window_days: float = 7,
    table_rows_limit: int | None = None,
    num_workers: int = 0,
) -> RankingDataset:
    """A data set of ratings.

    ``item_features``: ``item_id``, ``genres``, ``year`` and names of online_stats.py. ``contextual_features``: ``uid``,
    user attributes, names of online_stats.py, and crosses of all of them (``user_mean_x_item_mean``). ``min_history``:
    earlier ratings that a sample must have; 0 scores every rating, as the published figures do. ``window_days``: length
    of a training window, inside which samples are shuffled. ``baseline_auc`` is that of baseline.py on the hold-out.
    """
    cache = movielens_cache(ratings, min_history)
    if (seconds := round(window_days * DAY)) < 1:
        raise UserError(f"{name}.window_days = {window_days} (window_seconds {seconds}): give 1 / {DAY} or more")
    split = split_last_fraction(cache, holdout_fraction, round(window_days * DAY))
    rows = {feature: cache.vocab[feature] for feature in item_features if feature in cache.vocab}
    for feature in contextual_features:
        if is_cross(feature):
            cross_parts(feature)
            rows[feature] = CROSS_ROWS
        elif feature in cache.vocab:
            rows[feature] = cache.vocab[feature]
    for option, features in (("item_features", item_features), ("contextual_features", contextual_features)):
        for feature in features:
            if feature not in rows:
                known = ", ".join(sorted(cache.vocab))
                raise UserError(f"{name}.{option}: {name} has no feature {feature!r}: possible are {known}")
    rows, notes = limit_rows(rows, table_rows_limit)
    return RankingDataset(
        name,
        cache,
        FeatureSchema(tuple(item_features), tuple(contextual_features), rows, (RATING_LABEL,)),
        split,
        HistoryOptions(history_length, history_strategy, history_ties, scan_limit),
        num_workers=num_workers,
        baseline_auc=baseline_auc(cache, split.holdout.start),
        notes=[f"{cache.num_events:,} ratings of {cache.num_users:,} users", *notes],
    )


def movielens_cache(ratings: Ratings, min_history: int) -> EventCache:
    """The event cache of ratings; its context columns are the user attributes and the running statistics."""
    positive = ratings.rating >= POSITIVE_RATING
    known = {name: _by_user(ratings.user, table) for name, table in ratings.user_attributes.items()}
    hundredths = np.rint(100 * ratings.rating).astype(np.int64)
    cache = cache_from_events(
        ratings.user,
        ratings.item,
        ratings.time,
        np.where(positive, LISTEN_PLUS, SKIP),
        min_history=min_history,
        attributes=ratings.item_attributes,
        context={**known, RATING_LABEL: hundredths},  # ordered with the events; an outcome, so it does not stay there
    )
    context, rows = dict(cache.context), dict(cache.vocab)
    labels = {RATING_LABEL: np.unique(hundredths)[context.pop(RATING_LABEL).astype(np.int64) - 1]}
    del rows[RATING_LABEL]
    genres = [(), *(ratings.genres.get(item, ()) for item in np.unique(ratings.item).tolist())]
    columns, more_rows = online_columns(cache, (cache.bits & LISTEN_PLUS) > 0, genres)
    cache = dataclasses.replace(cache, context={**context, **columns}, vocab={**rows, **more_rows}, labels=labels)
    return cache.validate()


def baseline_auc(cache: EventCache, cut: int) -> float:
    """AUC of the online baseline over all ratings at or after second ``cut``."""
    labels = (cache.bits & LISTEN_PLUS).astype(np.int64)
    users = cache.user_of(np.arange(cache.num_events))
    scores = online_baseline(users.tolist(), cache.item.tolist(), labels.tolist(), cache.time.tolist())
    held_out = cache.time >= cut
    return auc(labels[held_out], scores[held_out])


def read_100k(folder: pathlib.Path) -> Ratings:
    """Read the atomic files of MovieLens-100K."""
    table = _read(folder / "ml-100k.inter", "\t", ("user_id:token", "item_id:token", "rating:float", "timestamp:float"))
    items = _read(folder / "ml-100k.item", "\t", ("item_id:token", "release_year:token", "class:token_seq"))
    users = _read(folder / "ml-100k.user", "\t", ("user_id:token", "age:token", "gender:token", "occupation:token"))
    item_ids, user_ids = _whole(items, "item_id:token"), _whole(users, "user_id:token")
    years = [_year(text) for text in items["release_year:token"].to_list()]
    genres = [(text or "").split() for text in items["class:token_seq"].to_list()]
    return Ratings(
        user=_whole(table, "user_id:token"),
        item=_whole(table, "item_id:token"),
        rating=_numbers(table, "rating:float"),
        time=_whole(table, "timestamp:float"),
        item_attributes=_item_attributes(item_ids, genres, years),
        user_attributes={
            "age": dict(zip(user_ids.tolist(), (_whole(users, "age:token") // 5).tolist(), strict=True)),
            "gender": _numbered(user_ids, users["gender:token"].to_list()),
            "occupation": _numbered(user_ids, users["occupation:token"].to_list()),
        },
        genres=dict(zip(item_ids.tolist(), genres, strict=True)),
    )


def read_small(folder: pathlib.Path) -> Ratings:
    """Read ``ratings.csv`` and ``movies.csv``."""
    table = _read(folder / "ratings.csv", ",", ("userId", "movieId", "rating", "timestamp"))
    movies = _read(folder / "movies.csv", ",", ("movieId", "title", "genres"), quote='"')
    item_ids = _whole(movies, "movieId")
    years = [_year(text) for text in movies["title"].to_list()]
    genres = [(text or "").split("|") for text in movies["genres"].to_list()]
    return Ratings(
        user=_whole(table, "userId"),
        item=_whole(table, "movieId"),
        rating=_numbers(table, "rating"),
        time=_whole(table, "timestamp"),
        item_attributes=_item_attributes(item_ids, genres, years),
        user_attributes={},
        genres=dict(zip(item_ids.tolist(), genres, strict=True)),
    )


def _item_attributes(
    item_ids: np.ndarray, genres: list[list[str]], years: list[int | None]
) -> dict[str, dict[int, int]]:
    known = {item: year for item, year in zip(item_ids.tolist(), years, strict=True) if year is not None}
    return {"genres": _numbered(item_ids, ["|".join(each) for each in genres]), "year": known}


def _numbered(ids: np.ndarray, texts: list[str]) -> dict[int, int]:
    """id → number of its text among the different texts."""
    number = {text: index for index, text in enumerate(sorted(set(texts)))}
    return {key: number[text] for key, text in zip(ids.tolist(), texts, strict=True)}


def _year(text: str | None) -> int | None:
    """``1995`` or ``Heat (1995)`` → 1995; None where there is none."""
    found = re.search(r"\(?\b((?:18|19|20)\d\d)\b\)?\s*$", text or "")
    return int(found.group(1)) if found else None


def _by_user(users: np.ndarray, table: Mapping[int, int]) -> np.ndarray:
    missing = [user for user in np.unique(users).tolist() if user not in table]
    if missing:
        raise UserError(f"user {missing[0]} has ratings but no line in the user file: the files do not belong together")
    return np.array([table[user] for user in users.tolist()], dtype=np.int64)


def _recbole_folder() -> pathlib.Path:
    try:
        wheel = importlib.metadata.distribution("recbole")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"MovieLens-100K was not found: {WHERE_100K}") from None
    folder = pathlib.Path(str(wheel.locate_file("recbole/dataset_example/ml-100k")))
    return _folder(folder, WHERE_100K)


def _folder(path: str | pathlib.Path, where: str) -> pathlib.Path:
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"MovieLens folder {folder} does not exist: {where}")
    return folder


def _read(path: pathlib.Path, separator: str, columns: Sequence[str], quote: str | None = None) -> pl.DataFrame:
    if not path.is_file():
        raise UserError(f"{path} does not exist: the folder must hold the files of the MovieLens archive")
    try:
        table = pl.read_csv(path, separator=separator, quote_char=quote, infer_schema=False, glob=False)
    except pl.exceptions.NoDataError:
        raise UserError(f"{path} is empty: fetch the archive again") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): fetch the archive again") from None
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise UserError(f"{path} has no column {missing[0]!r}, it has {', '.join(table.columns)}")
    if not len(table):
        raise UserError(f"{path} holds a header and no line: fetch the archive again")
    return table


def _numbers(table: pl.DataFrame, column: str) -> np.ndarray:
    values = table[column].cast(pl.Float64, strict=False)
    if values.null_count() or not values.is_finite().all():
        line = int((values.is_null() | ~values.is_finite()).arg_max()) + 2
        raise UserError(f"column {column!r}, line {line}: {table[column][line - 2]!r} is not a number")
    return values.to_numpy()


def _whole(table: pl.DataFrame, column: str) -> np.ndarray:
    values = _numbers(table, column)
    wrong = np.flatnonzero((values != np.floor(values)) | (values < 0) | (values >= 2**53))
    if len(wrong):
        raise UserError(f"column {column!r}, line {wrong[0] + 2}: {values[wrong[0]]:g} is not a whole number from 0 on")
    return values.astype(np.int64)
