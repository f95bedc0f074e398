import struct

import numpy as np
import pytest
import xxhash

from generative_recommenders.data.crosses import (
    CROSSES,
    ROWS_PER_USER,
    cross_ids,
    cross_parts,
    cross_rows,
    is_cross,
    limit_rows,
)
from generative_recommenders.errors import UserError


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 7, 1000, 100_000_000, 2**62])
def test_equals_the_xxhash_package(width, rows):
    rng = np.random.default_rng(width)
    keys = [rng.integers(-(2**63), 2**63 - 1, 200, dtype=np.int64) for _ in range(width)]
    for column in keys:
        column[:6] = [0, 1, -1, 2**63 - 1, -(2**63), 23]
    expected = [
        xxhash.xxh64(struct.pack(f"<{width}q", *map(int, row)), seed=0).intdigest() % rows
        for row in zip(*keys, strict=True)
    ]
    assert cross_ids(keys, rows).tolist() == expected


def test_writes_into_a_given_row():
    out = np.full(3, -1)
    cross_ids([np.array([1, 2, 3]), np.array([4, 5, 6])], 10, out=out)
    assert (out >= 0).all() and (out < 10).all()


def test_takes_no_more_than_three_keys():
    with pytest.raises(ValueError, match="got 4"):
        cross_ids([np.zeros(1, np.int64)] * 4, 10)


def test_names():
    assert [is_cross(name) for name in ("uid", "user_x_hour", "max_len")] == [False, True, False]
    assert cross_parts("user_x_artist_x_hour") == ("user", "artist", "hour")
    with pytest.raises(UserError, match="_x_x_"):
        cross_parts("user_x__x_hour_x_x_")


def test_tables_at_a_million_users_are_those_of_the_public_benchmark():
    rows, notes = limit_rows({name: cross_rows(name, 1_000_000) for name in ROWS_PER_USER}, None)
    assert rows == {
        "user_x_artist": 100_000_000,
        "user_x_album": 40_000_000,
        "user_x_hour": 24_000_000,
        "item_x_hour": 40_000_000,
        "artist_x_hour": 32_000_000,
        "user_x_is_organic": 2_000_000,
        "user_x_artist_x_hour": 40_000_000,
    }
    assert set(rows) == set(CROSSES) and notes == []


def test_a_limit_hashes_big_crosses_down_and_says_so():
    rows, notes = limit_rows({"uid": 5000, "user_x_artist": 900, "user_x_hour": 200}, 300)
    assert rows == {"uid": 5000, "user_x_artist": 300, "user_x_hour": 200}
    assert notes == ["table user_x_artist: 900 rows hashed down to 300 (table_rows_limit)"]
    with pytest.raises(UserError, match="table_rows_limit = 0"):
        limit_rows({}, 0)
