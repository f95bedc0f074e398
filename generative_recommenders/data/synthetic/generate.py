"""Listening data with planted structure, written in Yambda's file formats, a block of users at a time.

Users, items, artists and albums have ids with gaps. Items may have several artists and albums (the smallest id is the
true one, as everywhere) or none. Likes and the like follow a listen of the same item, half of them at the same second.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet

from generative_recommenders.data.synthetic.spec import LIKE_SHARE, LISTEN_PLUS_SHARE, LISTEN_SHARE, SyntheticSpec
from generative_recommenders.data.yambda.layout import EVENT_TYPES, MAPPINGS, events_path
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

TRUTH = "truth.parquet"
#: Events generated in one go, about.
BLOCK_EVENTS = 2**20
TICK = 5
TICKS_PER_DAY = 86_400 // TICK
FACTORS = 4
NULL_RATIO_SHARE = 0.001

EVENT_SCHEMA = pyarrow.schema(
    [
        ("uid", pyarrow.uint32()),
        ("timestamp", pyarrow.uint32()),
        ("item_id", pyarrow.uint32()),
        ("is_organic", pyarrow.uint8()),
        ("played_ratio_pct", pyarrow.uint16()),
        ("track_length_seconds", pyarrow.uint32()),
        ("event_type", pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
    ]
)
TRUTH_SCHEMA = pyarrow.schema(
    [("uid", pyarrow.uint32()), ("timestamp", pyarrow.uint32()), ("probability", pyarrow.float32())]
)


@dataclasses.dataclass(frozen=True)
class World:
    """Users and items: original ids, and what decides the outcomes. Index 0 is the first of each."""

    uid: np.ndarray
    item_id: np.ndarray
    artist_id: np.ndarray
    album_id: np.ndarray
    item_artist: np.ndarray
    item_album: np.ndarray
    events: np.ndarray
    taste: np.ndarray
    factors: np.ndarray
    quality: np.ndarray
    bias: np.ndarray
    track_length: np.ndarray


def generate(path: str | pathlib.Path, spec: SyntheticSpec, *, size: str = "50m", truth: bool = True) -> int:
    """Write the event file and the two mappings under ``path`` as Yambda's ``size`` has them; returns the events.

    With ``truth``, ``<path>/truth.parquet`` has every listen's true probability of listen_plus by (uid, timestamp): a
    user's listens all have different times. Files appear under their names when they are complete.
    """
    folder = user_path(path)
    world = make_world(spec)
    events = folder / "flat" / size / "multi_event.parquet"
    _check_path(folder, size, events)
    events.parent.mkdir(parents=True, exist_ok=True)
    _write_mappings(folder, spec, world)
    written = 0
    with _writer(events, EVENT_SCHEMA) as writer, _writer(folder / TRUTH, TRUTH_SCHEMA, truth) as truth_writer:
        intercept = None
        for number, (first, last) in enumerate(_blocks(world.events)):
            rng = np.random.default_rng([spec.seed, 1, number])
            block = _block_columns(spec, world, first, last, rng)
            if intercept is None:
                intercept = _intercept(block["log_odds"][block["kind"] == 0])
            probability = 1 / (1 + np.exp(-(block["log_odds"] + intercept)))
            writer.write_table(_event_table(world, block, probability, rng))
            truth_writer.write_table(_truth_table(world, block, probability))
            written += len(probability)
    return written


def make_world(spec: SyntheticSpec) -> World:
    """Draw users, items and their planted properties."""
    rng = np.random.default_rng([spec.seed, 0])
    directions = rng.standard_normal((spec.groups, FACTORS))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True) / FACTORS**0.5
    tastes = rng.standard_normal((spec.groups, FACTORS))
    tastes /= np.linalg.norm(tastes, axis=1, keepdims=True)
    near = lambda centres, count: (
        centres[rng.integers(0, spec.groups, count)]
        + 0.15
        * rng.standard_normal(  # noqa: E731
            (count, FACTORS)
        )
    )
    events = np.exp(rng.normal(np.log(spec.events_median), spec.events_sigma, spec.users))
    item_artist = rng.permutation(np.arange(spec.items) % spec.artists)
    return World(
        uid=_spaced_ids(rng, spec.users),
        item_id=_spaced_ids(rng, spec.items),
        artist_id=_spaced_ids(rng, spec.artists),
        album_id=_spaced_ids(rng, spec.albums),
        item_artist=item_artist,
        item_album=rng.integers(0, spec.albums, spec.items),
        events=np.clip(np.rint(events), 1, min(spec.events_max, spec.days * TICKS_PER_DAY // 2)).astype(np.int64),
        taste=near(tastes, spec.users).astype(np.float32),
        factors=near(directions, spec.artists).astype(np.float32),
        quality=rng.standard_normal(spec.items).astype(np.float32),
        bias=rng.standard_normal(spec.users).astype(np.float32),
        track_length=rng.integers(60, 420, spec.items).astype(np.uint32),
    )


def _block_columns(
    spec: SyntheticSpec, world: World, first: int, last: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Users [first, last): user, time, item, kind and log-odds (before the intercept) of every event, user by user."""
    events = world.events[first:last]
    user = np.repeat(np.arange(last - first), events)
    time = _times(spec, events, user, rng)
    # Popularity falls as rank^(-2/3); ranks are independent of every other property.
    item = np.minimum((spec.items * rng.random(len(user)) ** 3).astype(np.int64), spec.items - 1)
    kind = _kinds(len(user), rng)
    starts = np.zeros(len(user), bool)
    starts[np.cumsum(events)[:-1]] = starts[0] = True
    kind[starts] = 0
    follows = np.flatnonzero(kind)
    for _ in range(3):  # a like after a like takes the item of the listen before both
        item[follows] = item[follows - 1]
    together = follows[rng.random(len(follows)) < 0.5]
    time[together] = time[together - 1]
    log_odds = _log_odds(spec, world, user + first, time, item, kind == 0)
    return {"user": user + first, "time": time, "item": item, "kind": kind, "log_odds": log_odds}


def _times(spec: SyntheticSpec, events: np.ndarray, user: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Seconds, ascending and all different within a user, more of them in the evening."""
    free = spec.days * TICKS_PER_DAY - np.repeat(events, events)
    day, part = np.divmod(rng.random(len(user)) * free / TICKS_PER_DAY, 1.0)
    part += 0.1 * np.sin(2 * np.pi * part)
    ticks = np.clip((day + part) * TICKS_PER_DAY, 0, free - 1).astype(np.int64)
    ticks = np.sort((user << 32) | ticks) & 0xFFFFFFFF
    place = np.arange(len(user)) - np.repeat(np.cumsum(events) - events, events)
    return (ticks + place) * TICK


def _kinds(count: int, rng: np.random.Generator) -> np.ndarray:
    other = (1 - LISTEN_SHARE - LIKE_SHARE) / 3
    edges = np.cumsum([LISTEN_SHARE, LIKE_SHARE, other, other])
    return np.searchsorted(edges, rng.random(count), side="right").astype(np.int8)


def _log_odds(
    spec: SyntheticSpec, world: World, user: np.ndarray, time: np.ndarray, item: np.ndarray, listen: np.ndarray
) -> np.ndarray:
    artist = world.item_artist[item]
    taste = np.einsum("ef,ef->e", world.taste[user], world.factors[artist])
    # Days since the user's last listen of the artist: neighbours after a stable sort by (user, artist).
    listens = np.flatnonzero(listen)
    pair = user[listens] * spec.artists + artist[listens]
    order = np.argsort(pair, kind="stable")
    days = np.full(len(order), np.inf)
    same = np.flatnonzero(pair[order][1:] == pair[order][:-1]) + 1
    days[order[same]] = (time[listens][order[same]] - time[listens][order[same - 1]]) / 86_400
    recency = np.zeros(len(user))
    recency[listens] = np.exp(-days)
    return (
        spec.taste * taste + spec.quality * world.quality[item] + spec.bias * world.bias[user] + spec.recency * recency
    )


def _intercept(log_odds: np.ndarray) -> float:
    """Makes the mean probability Yambda's share of listen_plus, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = np.mean(1 / (1 + np.exp(-(log_odds + middle))))
        low, high = (middle, high) if mean < LISTEN_PLUS_SHARE else (low, middle)
    return low


def _event_table(
    world: World, block: dict[str, np.ndarray], probability: np.ndarray, rng: np.random.Generator
) -> pyarrow.Table:
    count = len(probability)
    no_listen = block["kind"] != 0
    plus = rng.random(count) < probability
    ratio = np.where(plus, np.minimum(rng.integers(50, 151, count), 100), rng.integers(0, 50, count)).astype(np.uint16)
    no_ratio = no_listen | (rng.random(count) < NULL_RATIO_SHARE)
    columns = [
        world.uid[block["user"]],
        block["time"].astype(np.uint32),
        world.item_id[block["item"]],
        (rng.random(count) < 0.6).astype(np.uint8),
        pyarrow.array(ratio, mask=no_ratio),
        pyarrow.array(world.track_length[block["item"]], mask=no_listen),
        pyarrow.DictionaryArray.from_arrays(pyarrow.array(block["kind"]), pyarrow.array(EVENT_TYPES)),
    ]
    return pyarrow.table(columns, schema=EVENT_SCHEMA)


def _truth_table(world: World, block: dict[str, np.ndarray], probability: np.ndarray) -> pyarrow.Table:
    listen = block["kind"] == 0
    columns = [
        world.uid[block["user"][listen]],
        block["time"][listen].astype(np.uint32),
        probability[listen].astype(np.float32),
    ]
    return pyarrow.table(columns, schema=TRUTH_SCHEMA)


def _write_mappings(folder: pathlib.Path, spec: SyntheticSpec, world: World) -> None:
    rng = np.random.default_rng([spec.seed, 2])
    for attribute, ids, owner in (
        ("artist_id", world.artist_id, world.item_artist),
        ("album_id", world.album_id, world.item_album),
    ):
        known = np.flatnonzero(rng.random(spec.items) >= 0.01)
        # One item in twenty has a second artist or album with a larger id.
        second = rng.choice(known, len(known) // 20, replace=False)
        second = second[owner[second] < len(ids) - 1]
        other = rng.integers(owner[second] + 1, len(ids))
        items = np.concatenate([world.item_id[known], world.item_id[second]])
        values = np.concatenate([ids[owner[known]], ids[other]])
        order = rng.permutation(len(items))
        schema = pyarrow.schema([("item_id", pyarrow.uint32()), (attribute, pyarrow.uint32())])
        with _writer(folder / MAPPINGS[attribute], schema) as writer:
            writer.write_table(pyarrow.table([items[order], values[order]], schema=schema))


def _spaced_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """Ascending u32 ids from 1 on with gaps."""
    return np.cumsum(rng.integers(1, 4, count)).astype(np.uint32)


def _blocks(events: np.ndarray) -> list[tuple[int, int]]:
    """Runs of users with about BLOCK_EVENTS events each."""
    block = np.cumsum(events) // BLOCK_EVENTS
    cuts = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(events)]
    return list(zip(cuts, cuts[1:], strict=False))


class _writer:
    """A parquet file that gets its name when it is complete; with ``wanted`` false nothing is written."""

    def __init__(self, path: pathlib.Path, schema: pyarrow.Schema, wanted: bool = True) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._file = pyarrow.parquet.ParquetWriter(self._partial, schema) if wanted else None

    def write_table(self, table: pyarrow.Table) -> None:
        if self._file is not None:
            self._file.write_table(table)

    def __enter__(self) -> _writer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._file is None:
            return
        self._file.close()
        if kind is None:
            os.replace(self._partial, self._path)
        else:
            self._partial.unlink()


def _check_path(folder: pathlib.Path, size: str, events: pathlib.Path) -> None:
    if events_path(folder, size) != events:
        raise UserError(f"{events_path(folder, size)} hides the generated {events}: remove the folder")
