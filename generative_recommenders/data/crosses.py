"""Crossed ids: several keys hashed into the rows of one table.

A crossed id is xxh64 (seed 0) over the keys as little-endian int64, modulo the rows of the cross's table. xxh64 of
inputs below 32 bytes is a short chain of multiplications and rotations, written out here so that a whole batch is
hashed in one compiled loop. Source: the xxHash specification, "XXH64 algorithm description".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numba
import numpy as np

from generative_recommenders.data.compiled import compiled
from generative_recommenders.data.schema import CROSS_JOINT
from generative_recommenders.errors import UserError

#: What a cross is made of; ``user`` is the uid, ``hour`` the hour of day of the request, the others the candidate's.
CROSSES = (
    "user_x_artist",
    "user_x_album",
    "user_x_hour",
    "item_x_hour",
    "artist_x_hour",
    "user_x_is_organic",
    "user_x_artist_x_hour",
)

#: Rows of each cross's table per user of the data set. At a million users these are the public benchmark's tables.
ROWS_PER_USER = {
    "user_x_artist": 100,
    "user_x_album": 40,
    "user_x_hour": 24,
    "item_x_hour": 40,
    "artist_x_hour": 32,
    "user_x_is_organic": 2,
    "user_x_artist_x_hour": 40,
}

#: Name of how keys become rows: another rule gives the same ids other rows.
HASH_RULE = "xxh64 seed 0, int64 little-endian, modulo rows"

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


def is_cross(feature: str) -> bool:
    """Whether a contextual feature is a cross, by its name: ``a_x_b`` or ``a_x_b_x_c``."""
    return CROSS_JOINT in feature


def cross_parts(feature: str) -> tuple[str, ...]:
    """``user_x_artist`` → ``("user", "artist")``; one to three parts, else ``UserError``."""
    parts = tuple(feature.split(CROSS_JOINT))
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise UserError(f"cross {feature!r} has {len(parts)} parts: two or three joined by '_x_' are possible")
    return parts


def cross_ids(keys: Sequence[np.ndarray], rows: int, out: np.ndarray | None = None) -> np.ndarray:
    """int64 [B] crossed ids in [0, rows) of one to three int64 [B] key columns, written into ``out`` if given."""
    if not 1 <= len(keys) <= 3:
        raise ValueError(f"one to three key columns can be crossed, got {len(keys)}")
    table = np.empty((len(keys[0]), len(keys)), np.int64)
    for column, values in enumerate(keys):
        table[:, column] = values
    out = np.empty(len(table), np.int64) if out is None else out
    _hash_rows(table, np.uint64(rows), out)
    return out


def cross_rows(feature: str, users: int) -> int:
    """Rows of a cross's table for that many users; a cross not in ``ROWS_PER_USER`` is sized as user_x_artist."""
    cross_parts(feature)
    return ROWS_PER_USER.get(feature, ROWS_PER_USER["user_x_artist"]) * users


def limit_rows(rows: Mapping[str, int], limit: int | None) -> tuple[dict[str, int], list[str]]:
    """``rows`` with every cross cut to ``limit`` rows (None: no limit); tables of plain ids keep theirs.

    The second value has one line per table that was cut, for the run's log.
    """
    if limit is not None and limit < 1:
        raise UserError(f"table_rows_limit = {limit}: give at least 1, or None for no limit")
    kept, notes = dict(rows), []
    for name, count in rows.items():
        if limit is not None and is_cross(name) and count > limit:
            kept[name] = limit
            notes.append(f"table {name}: {count:,} rows hashed down to {limit:,} (table_rows_limit)")
    return kept, notes


@numba.njit(inline="always")
def _rotate(x, r):
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


@compiled
def _hash_rows(table, rows, out):
    count, width = table.shape
    for i in range(count):
        h = _P5 + np.uint64(8 * width)
        for j in range(width):
            k = _rotate(np.uint64(table[i, j]) * _P2, 31) * _P1
            h = _rotate(h ^ k, 27) * _P1 + _P4
        h = (h ^ (h >> np.uint64(33))) * _P2
        h = (h ^ (h >> np.uint64(29))) * _P3
        h = h ^ (h >> np.uint64(32))
        out[i] = np.int64(h % rows)
