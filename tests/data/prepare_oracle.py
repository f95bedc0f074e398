"""Slow reference for preparation: rows to order, cache columns and anchors in plain Python; and random files."""

from __future__ import annotations

import pathlib
import random

import pyarrow as pa
import pyarrow.parquet as pq

TYPES = ["listen", "like", "dislike", "unlike", "undislike"]
FIELDS = {
    "uid": pa.uint32(),
    "timestamp": pa.uint32(),
    "item_id": pa.uint32(),
    "is_organic": pa.uint8(),
    "played_ratio_pct": pa.uint16(),
    "track_length_seconds": pa.uint32(),
    "event_type": pa.dictionary(pa.int8(), pa.string()),
}


def random_rows(rng: random.Random, min_history: int, crowded: bool = True) -> tuple[list[dict], dict, dict]:
    """Rows of users with few and many events, many ties; artist and album pairs with holes and several per item."""
    items = [rng.randrange(1, 5000) for _ in range(rng.randrange(3, 25))]
    span = rng.choice([10, 60]) if crowded else 4000
    base = rng.choice([0, 86_000, 25_000_000])
    rows = []
    users = rng.sample(range(1, 10_000), 9)
    counts = [1, 2, max(min_history - 1, 1), max(min_history, 1), min_history + 1, 40, 55, rng.randrange(1, 90), 3]
    for uid, count in zip(users, counts, strict=True):
        for _ in range(count):
            kind = rng.choices(TYPES, [60, 20, 7, 7, 6])[0]
            listen = kind == "listen"
            rows.append(
                {
                    "uid": uid,
                    "timestamp": base + 5 * rng.randrange(span),
                    "item_id": rng.choice(items) if rng.random() > 0.03 else None,
                    "is_organic": rng.choice([0, 1]) if rng.random() > 0.02 else None,
                    "played_ratio_pct": rng.choice([0, 49, 50, 51, 100, None]) if listen else None,
                    "track_length_seconds": rng.randrange(60, 300) if listen else None,
                    "event_type": kind,
                }
            )
    rows += [dict(rng.choice(rows)) for _ in range(5)]  # exact duplicates are both kept
    rng.shuffle(rows)
    return rows, _random_pairs(rng, items), _random_pairs(rng, items)


def _random_pairs(rng: random.Random, items: list[int]) -> list[tuple]:
    pairs = [(item, rng.randrange(1, 9)) for item in items if rng.random() < 0.8]
    pairs += [(rng.choice(items), rng.randrange(1, 20)) for _ in range(5)] + [(777_777, 3), (items[0], None)]
    rng.shuffle(pairs)
    return pairs


def write_yambda(folder: pathlib.Path, rows: list[dict], artists: list, albums: list, files: int = 1, group: int = 50):
    """Write the rows as Yambda's files: one file, or ``files`` parts in a folder; row groups of ``group`` rows."""
    target = folder / "flat" / "50m"
    target.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(list(FIELDS.items()))
    table = pa.Table.from_pylist([row | {"event_type": None} for row in rows], pa.schema(list(FIELDS.items())[:-1]))
    kinds = pa.array([row["event_type"] for row in rows]).dictionary_encode().cast(FIELDS["event_type"])
    table = table.append_column("event_type", kinds).cast(schema)
    if files == 1:
        pq.write_table(table, target / "multi_event.parquet", row_group_size=group)
    else:
        (target / "multi_event").mkdir()
        step = -(-len(rows) // files)
        for part in range(files):
            pq.write_table(
                table.slice(part * step, step), target / "multi_event" / f"{part}.parquet", row_group_size=group
            )
    for name, pairs in (("artist", artists), ("album", albums)):
        columns = {"item_id": pa.array([p[0] for p in pairs], pa.uint32())}
        columns[f"{name}_id"] = pa.array([p[1] for p in pairs], pa.uint32())
        pq.write_table(pa.table(columns), folder / f"{name}_item_mapping.parquet")


def bits_of(row: dict) -> int:
    if row["event_type"] == "like":
        return 2
    if row["event_type"] != "listen" or row["played_ratio_pct"] is None:
        return 0
    return 1 if row["played_ratio_pct"] >= 50 else 4


def content_key(row: dict) -> tuple:
    ratio = row["played_ratio_pct"]
    return (
        row["timestamp"],
        -1 if row["item_id"] is None else row["item_id"],
        TYPES.index(row["event_type"]),
        row["is_organic"] or 0,
        -1 if ratio is None else ratio,
    )


def numbered(found, known: list) -> list:
    """The ids in dense order: those of an earlier cache as they were, then the new ones in their order."""
    return [*known, *sorted(set(found) - set(known))]


def expected_cache(
    rows: list[dict], artists: list, albums: list, min_history: int, known: dict[str, list] | None = None
) -> dict:
    """Every column of the cache as lists, the vocabularies (original ids in dense order) and some counters.

    ``known``: the vocabularies, ``uid`` among them, of an earlier cache that is extended.
    """
    known = known or {"uid": [], "item_id": [], "artist_id": [], "album_id": []}
    by_user: dict[int, list[dict]] = {}
    for row in rows:
        by_user.setdefault(row["uid"], []).append(row)
    items = numbered((row["item_id"] for row in rows if row["item_id"] is not None), known["item_id"])
    number = {item: index + 1 for index, item in enumerate(items)} | {None: 0}
    out = {name: [] for name in ("item", "time", "bits", "organic")}
    out |= {"user_ids": numbered(by_user, known["uid"]), "user_offsets": [0]}
    anchors = []
    for user_number, uid in enumerate(out["user_ids"]):
        events = sorted(by_user.get(uid, []), key=content_key)
        for position, row in enumerate(events):
            out["item"].append(number[row["item_id"]])
            out["time"].append(row["timestamp"])
            out["bits"].append(bits_of(row))
            out["organic"].append(row["is_organic"] or 0)
            earlier = sum(1 for other in events if other["timestamp"] < row["timestamp"])
            if bits_of(row) in (1, 4) and earlier >= min_history:
                anchors.append((row["timestamp"], user_number, position, len(out["item"]) - 1))
        out["user_offsets"].append(len(out["item"]))
    out["anchors"] = [anchor[-1] for anchor in sorted(anchors)]
    out["item_count"] = [out["item"].count(index) for index in range(len(items) + 1)]
    out["vocabulary"] = {"item_id": items}
    for name, pairs in (("artist_id", artists), ("album_id", albums)):
        smallest = {}
        for item, value in pairs:
            if value is not None and item in number:
                smallest[item] = min(value, smallest.get(item, value))
        ids = numbered(smallest.values(), known[name])
        out["vocabulary"][name] = ids
        out[name] = [0] + [ids.index(smallest[item]) + 1 if item in smallest else 0 for item in items]
    out["nulls"] = {
        "null_item": sum(row["item_id"] is None for row in rows),
        "null_organic": sum(row["is_organic"] is None for row in rows),
        "listen_without_ratio": sum(bits_of(row) == 0 and row["event_type"] == "listen" for row in rows),
    }
    return out
