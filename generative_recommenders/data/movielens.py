"""MovieLens: real ratings with times. A rating of 4 or more plays listen_plus, a lower one skip; the rating itself is a
label too, ``item_rating``, in hundredths of a star.

The hold-out is the newest 10 % of the ratings. Histories, crosses and batches are those of every other data set; on top
of ids, genres, year and what is known of the user, features may be running statistics (``online_stats.py``).
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import importlib.metadata
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from generative_recommenders.data.baseline import online_baseline
from generative_recommenders.data.cache import EventCache, cache_from_events
from generative_recommenders.data.crosses import cross_parts, is_cross, limit_rows
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.data.history import SCAN_LIMIT
from generative_recommenders.data.identity import Vocabulary
from generative_recommenders.data.online_stats import online_columns
from generative_recommenders.data.reader import HistoryOptions
from generative_recommenders.data.schema import LISTEN_PLUS, SKIP, FeatureSchema
from generative_recommenders.data.windows import DAY, split_last_fraction
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path
from generative_recommenders.ranking import auc

POSITIVE_RATING = 4.0
#: Stars that a rating can have.
MOST_STARS = 5
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
    """Ratings as read: columns [E], attributes by item and by user (original id → value), genres of each item.

    Whoever has no entry among the attributes has the unknown id 0.
    """

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    item_attributes: Mapping[str, Mapping[int, int | str]]
    user_attributes: Mapping[str, Mapping[int, int | str]]
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
    hundredths = np.rint(100 * ratings.rating).astype(np.int64)
    cache = cache_from_events(
        ratings.user,
        ratings.item,
        ratings.time,
        np.where(positive, LISTEN_PLUS, SKIP),
        min_history=min_history,
        attributes=ratings.item_attributes,
        context={RATING_LABEL: hundredths},  # ordered with the events; an outcome, so it does not stay there
    )
    context, ids = dict(cache.context), dict(cache.ids)
    for name, table in sorted(ratings.user_attributes.items()):
        context[name], ids[name] = _of_users(cache, table)
    labels = {RATING_LABEL: np.unique(hundredths)[context.pop(RATING_LABEL).astype(np.int64) - 1]}
    del ids[RATING_LABEL]
    genres = [(), *(ratings.genres.get(item, ()) for item in np.unique(ratings.item).tolist())]
    columns, rows = online_columns(cache, (cache.bits & LISTEN_PLUS) > 0, genres)
    ids |= {name: Vocabulary.of(range(1, count)) for name, count in rows.items()}  # buckets: their edges are constants
    vocab = {name: known.rows for name, known in ids.items()}
    return dataclasses.replace(cache, context={**context, **columns}, vocab=vocab, ids=ids, labels=labels).validate()


def baseline_auc(cache: EventCache, cut: int) -> float:
    """AUC of the online baseline over all ratings at or after second ``cut``; nan where they are of one class."""
    labels = (cache.bits & LISTEN_PLUS).astype(np.int64)
    users = cache.user_of(np.arange(cache.num_events))
    scores = online_baseline(users.tolist(), cache.item.tolist(), labels.tolist(), cache.time.tolist())
    held_out = cache.time >= cut
    return auc(labels[held_out], scores[held_out])


def read_100k(folder: pathlib.Path) -> Ratings:
    """Read the atomic files of MovieLens-100K."""
    table = _File(folder / "ml-100k.inter", "\t", ("user_id:token", "item_id:token", "rating:float", "timestamp:float"))
    items = _File(folder / "ml-100k.item", "\t", ("item_id:token", "release_year:token", "class:token_seq"))
    users = _File(folder / "ml-100k.user", "\t", ("user_id:token", "age:token", "gender:token", "occupation:token"))
    item_ids, user_ids = items.keys("item_id:token"), users.keys("user_id:token")
    raters = table.whole("user_id:token")
    ages = [None if age is None else age // 5 for age in users.whole_or_none("age:token")]
    strangers = np.setdiff1d(raters, user_ids)
    if len(strangers):
        raise UserError(
            f"{users.path} has no line of user {strangers[0]}, who has ratings in {table.path}: the files do not "
            "belong together"
        )
    genres = [(text or "").split() for text in items.texts("class:token_seq")]
    return Ratings(
        user=raters,
        item=table.whole("item_id:token"),
        rating=table.stars("rating:float"),
        time=table.times("timestamp:float"),
        item_attributes=_item_attributes(item_ids, genres, items.texts("release_year:token")),
        user_attributes={
            "age": _known(user_ids, ages),
            "gender": _known(user_ids, users.texts("gender:token")),
            "occupation": _known(user_ids, users.texts("occupation:token")),
        },
        genres=dict(zip(item_ids, genres, strict=True)),
    )


def read_small(folder: pathlib.Path) -> Ratings:
    """Read ``ratings.csv`` and ``movies.csv``."""
    table = _File(folder / "ratings.csv", ",", ("userId", "movieId", "rating", "timestamp"))
    movies = _File(folder / "movies.csv", ",", ("movieId", "title", "genres"))
    item_ids = movies.keys("movieId")
    genres = [text.split("|") if text else [] for text in movies.texts("genres")]
    return Ratings(
        user=table.whole("userId"),
        item=table.whole("movieId"),
        rating=table.stars("rating"),
        time=table.times("timestamp"),
        item_attributes=_item_attributes(item_ids, genres, movies.texts("title")),
        user_attributes={},
        genres=dict(zip(item_ids, genres, strict=True)),
    )


def _item_attributes(
    item_ids: list[int], genres: list[list[str]], years: list[str | None]
) -> dict[str, dict[int, int | str]]:
    joined = ["|".join(each) or None for each in genres]
    return {"genres": _known(item_ids, joined), "year": _known(item_ids, [_year(text) for text in years])}


def _known(ids: list[int], values: Sequence[int | str | None]) -> dict[int, int | str]:
    """id → its value, where it has one."""
    return {key: value for key, value in zip(ids, values, strict=True) if value is not None}


def _year(text: str | None) -> int | None:
    """``1995`` or ``Heat (1995)`` → 1995; None where there is none."""
    found = re.search(r"\(?\b((?:18|19|20)\d\d)\b\)?\s*$", text or "")
    return int(found.group(1)) if found else None


def _of_users(cache: EventCache, table: Mapping[int, int | str]) -> tuple[np.ndarray, Vocabulary]:
    """u32 [E], the user's attribute as a dense id at each event (0 unknown), and what those ids stand for."""
    values = [table.get(user) for user in cache.user_ids.tolist()]
    known: list = sorted({value for value in values if value is not None})
    number: dict[int | str | None, int] = {value: index + 1 for index, value in enumerate(known)}
    dense = np.array([number.get(value, 0) for value in values], np.uint32)
    return dense[cache.user_of(np.arange(cache.num_events))], Vocabulary.of(known)


def _recbole_folder() -> pathlib.Path:
    try:
        wheel = importlib.metadata.distribution("recbole")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"MovieLens-100K was not found: {WHERE_100K}") from None
    folder = pathlib.Path(str(wheel.locate_file("recbole/dataset_example/ml-100k")))
    return _folder(folder, WHERE_100K)


def _folder(path: str | pathlib.Path, where: str) -> pathlib.Path:
    folder = user_path(path)
    if not folder.is_dir():
        raise UserError(f"MovieLens folder {folder} does not exist: {where}")
    return folder


class _File:
    """A file of the archive as text; empty fields are nulls. Its errors name file, column and line."""

    def __init__(self, path: pathlib.Path, separator: str, columns: Sequence[str]) -> None:
        self.path, self._table = path, _read(path, separator, columns)

    def texts(self, column: str) -> list[str | None]:
        """[lines]; None for an empty field."""
        return self._table[column].to_list()

    def numbers(self, column: str) -> np.ndarray:
        """float64 [lines], finite."""
        values = self._cast(column)
        if values.null_count():
            raise self._fault(column, _first(values.is_null()), "an empty field is not a number")
        return values.to_numpy()

    def whole(self, column: str) -> np.ndarray:
        """int64 [lines], from 0 on."""
        self.numbers(column)
        return np.array(self.whole_or_none(column), np.int64)

    def keys(self, column: str) -> list[int]:
        """[lines], whole numbers, each of them once: what the other columns tell about."""
        values = self.whole(column)
        _, first = np.unique(values, return_index=True)
        again = np.setdiff1d(np.arange(len(values)), first)
        if len(again):
            line = int(np.flatnonzero(values == values[again[0]])[0]) + 2
            raise self._fault(column, int(again[0]), f"{values[again[0]]} stands in line {line} already: leave one")
        return values.tolist()

    def stars(self, column: str) -> np.ndarray:
        """float64 [lines], ratings."""
        values = self.numbers(column)
        wrong = np.flatnonzero((values < 0) | (values > MOST_STARS))
        if len(wrong):
            hint = f"{values[wrong[0]]:g} is no rating: stars run from 0 to {MOST_STARS}"
            raise self._fault(column, int(wrong[0]), hint)
        return values

    def times(self, column: str) -> np.ndarray:
        """int64 [lines], seconds."""
        values = self.whole(column)
        late = np.flatnonzero(values >= 2**32)
        if len(late):
            hint = f"{values[late[0]]}, but time runs from 0 to {2**32 - 1} s (milliseconds? divide by 1000)"
            raise self._fault(column, int(late[0]), hint)
        return values

    def whole_or_none(self, column: str) -> list[int | None]:
        """[lines], from 0 on; None for an empty field."""
        values = self._cast(column)
        wrong = ((values != values.floor()) | (values < 0) | (values >= 2**53)).fill_null(False)
        if wrong.any():
            line = _first(wrong)
            raise self._fault(column, line, f"{values[line]:g} is not a whole number from 0 on")
        return values.cast(pl.Int64).to_list()

    def _cast(self, column: str) -> pl.Series:
        """Finite numbers and nulls."""
        texts = self._table[column]
        values = texts.cast(pl.Float64, strict=False)
        wrong = texts.is_not_null() & ~values.is_finite().fill_null(False)
        if wrong.any():
            line = _first(wrong)
            raise self._fault(column, line, f"{texts[line]!r} is not a number")
        return values

    def _fault(self, column: str, row: int, reason: str) -> UserError:
        return UserError(f"{self.path}, column {column!r}, line {row + 2}: {reason}")


def _first(wrong: pl.Series) -> int:
    """Number of the first true value, where there is one."""
    return wrong.to_list().index(True)


def _read(path: pathlib.Path, separator: str, columns: Sequence[str]) -> pl.DataFrame:
    if not path.is_file():
        raise UserError(f"{path} does not exist: the folder must hold the files of the MovieLens archive")
    try:
        with path.open("rb") as file:
            # Titles of the tab separated files may begin with a quote; where all fields have quotes, so has the header.
            quote = '"' if separator == "," or file.read(4).removeprefix(codecs.BOM_UTF8).startswith(b'"') else None
        _check_widths(path, separator, quote)
        table = pl.read_csv(path, separator=separator, quote_char=quote, infer_schema=False, glob=False)
    except pl.exceptions.NoDataError:
        raise UserError(f"{path} is empty: fetch the archive again") from None
    except (pl.exceptions.PolarsError, UnicodeDecodeError, csv.Error, OSError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): fetch the archive again") from None
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise UserError(f"{path} has no column {missing[0]!r}, it has {', '.join(table.columns)}")
    if not len(table):
        raise UserError(f"{path} holds a header and no line: fetch the archive again")
    filled = pl.all().str.strip_chars()
    return table.select(pl.when(filled != "").then(filled).name.keep())


def _check_widths(path: pathlib.Path, separator: str, quote: str | None) -> None:
    """Every line must have the header's fields: the reader takes what a cut-off line lacks for empty fields."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if quote is None:
            lines = csv.reader(file, delimiter=separator, quoting=csv.QUOTE_NONE)
        else:
            lines = csv.reader(file, delimiter=separator)
        header = next(lines, [])
        for fields in lines:
            if fields and len(fields) != len(header):
                raise UserError(
                    f"{path}, line {lines.line_num}: {len(fields)} fields, but the header has {len(header)}: fetch the "
                    "archive again"
                )
