"""Samples the slow way: plain Python lists and dictionaries, straight from the rules, with no code of the package."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import xxhash


@dataclasses.dataclass(frozen=True)
class Event:
    user: int
    item: int
    time: int
    bits: int
    organic: int
    mood: int = 0


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a data set is asked to do; ``rows`` holds the rows of each cross's table."""

    length: int
    strategy: str
    ties: str
    scan_limit: int
    min_history: int
    rows: dict[str, int]


def random_events(seed: int, count: int = 400, users: int = 12, items: int = 40, seconds: int = 3000) -> list[Event]:
    """Events with many ties, a user with one event, a user with two, and every kind of action."""
    rng = np.random.default_rng(seed)
    events = [
        Event(
            user=int(rng.integers(users)) * 3 + 7,
            item=int(rng.integers(items)) * 2 + 1,
            time=int(rng.integers(seconds)) // 5 * 5 + 86_000,
            bits=int(rng.choice([0, 1, 2, 4], p=[0.1, 0.45, 0.15, 0.3])),
            organic=int(rng.integers(2)),
            mood=int(rng.integers(4)) + 10,
        )
        for _ in range(count)
    ]
    events += [Event(1000, 1, 87_000, 1, 0, 10), Event(1001, 3, 87_000, 4, 1, 11), Event(1001, 3, 87_005, 1, 1, 12)]
    return [events[i] for i in rng.permutation(len(events))]


def random_attributes(seed: int, items: int = 40) -> dict[str, dict[int, int]]:
    """Artist and album ids of most items."""
    rng = np.random.default_rng(seed)
    every = [2 * i + 1 for i in range(items)]
    return {
        "artist_id": {i: int(rng.integers(9)) + 100 for i in every if rng.random() < 0.8},
        "album_id": {i: int(rng.integers(15)) + 500 for i in every if rng.random() < 0.8},
    }


def in_order(events: list[Event]) -> list[Event]:
    """The events of one user by content."""
    return sorted(events, key=lambda e: (e.time, e.item, e.bits, e.organic, e.mood))


def dense(values: set[int]) -> dict[int, int]:
    """Original id → dense id from 1 on."""
    return {value: number + 1 for number, value in enumerate(sorted(values))}


def history_of(earlier: list[Event], anchor: Event, rules: Rules) -> list[Event]:
    """The history of an anchor; ``earlier``: the events of its user that stand before it in the order."""
    if rules.ties == "exclude":
        earlier = [e for e in earlier if e.time < anchor.time]
    newest_first = list(reversed(earlier))[: rules.scan_limit]
    taken = []
    if rules.strategy == "last_n":
        taken = [e for e in newest_first if e.bits][: rules.length]
    else:
        room = {1: rules.length // 3, 2: rules.length // 3, 4: rules.length // 3}
        for event in newest_first:
            if room.get(event.bits):
                room[event.bits] -= 1
                taken.append(event)
    return list(reversed(taken))


def cross(rows: int, *keys: int) -> int:
    """Crossed id of the keys."""
    return xxhash.xxh64(b"".join(struct.pack("<q", key) for key in keys), seed=0).intdigest() % rows


def samples(events: list[Event], attributes: dict[str, dict[int, int]], rules: Rules) -> list[dict]:
    """Every sample in the order of the anchors: time, user, place in the user's order."""
    uid = dense({e.user for e in events})
    item = dense({e.item for e in events})
    mood = dense({e.mood for e in events})
    artist = dense({a for i, a in attributes["artist_id"].items() if i in item})
    album = dense({a for i, a in attributes["album_id"].items() if i in item})
    artist_of = lambda e: artist.get(attributes["artist_id"].get(e.item), 0)
    album_of = lambda e: album.get(attributes["album_id"].get(e.item), 0)
    found = []
    for user in uid:
        mine = in_order([e for e in events if e.user == user])
        for place, anchor in enumerate(mine):
            older = sum(e.time < anchor.time for e in mine)
            if anchor.bits not in (1, 4) or older < rules.min_history:
                continue
            history = history_of(mine[:place], anchor, rules)
            u, i, ar, al = uid[user], item[anchor.item], artist_of(anchor), album_of(anchor)
            hour = anchor.time // 3600 % 24
            crosses = {
                "user_x_artist": (u, ar),
                "user_x_album": (u, al),
                "user_x_hour": (u, hour),
                "item_x_hour": (i, hour),
                "artist_x_hour": (ar, hour),
                "user_x_is_organic": (u, anchor.organic),
                "user_x_artist_x_hour": (u, ar, hour),
            }
            values = {name: [cross(rules.rows[name], *keys)] for name, keys in crosses.items()}
            values |= {
                "uid": [u],
                "mood": [mood[anchor.mood]],
                "item_id": [item[e.item] for e in history],
                "artist_id": [artist_of(e) for e in history],
                "album_id": [album_of(e) for e in history],
                "action_weight": [e.bits for e in history],
                "action_timestamp": [e.time for e in history],
                "item_candidate_id": [i],
                "item_candidate_artist_id": [ar],
                "item_candidate_album_id": [al],
                "item_query_time": [anchor.time],
                "item_action_weight": [anchor.bits],
            }
            found.append({"user": user, "key": (anchor.time, user, place), "values": values})
    return sorted(found, key=lambda s: s["key"])
