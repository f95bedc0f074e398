"""Identity of data: raw ids and contents decide, not paths, file bytes, types of columns or numbers of workers."""

import dataclasses
import hashlib
import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from generative_recommenders.data.cache import EventCache, cache_from_events
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.data.events import events
from generative_recommenders.data.events.files import EventColumns, events_source
from generative_recommenders.data.identity import CrossedIds, UnknownIds, Vocabulary, fingerprint_of
from generative_recommenders.data.movielens import Ratings, movielens_dataset
from generative_recommenders.data.prepare import Limits, prepare, verify
from generative_recommenders.data.reader import HistoryOptions
from generative_recommenders.data.schema import FeatureSchema
from generative_recommenders.data.synthetic import synthetic_yambda
from generative_recommenders.data.windows import split_last_fraction
from generative_recommenders.data.yambda import yambda
from generative_recommenders.errors import UserError

CROSS = "user_x_item"


def plain_fingerprint(ids):
    """The documented formula in plain Python."""
    kind = "" if not ids else "int" if isinstance(ids[0], int) else "text"
    lengths, values = b"", b""
    for each in ids:
        data = each.to_bytes(8, "little", signed=True) if isinstance(each, int) else each.encode()
        values += data
        lengths += len(data).to_bytes(8, "little") if kind == "text" else b""
    digests = [hashlib.sha256(part).hexdigest() for part in (lengths, values)]
    return hashlib.sha256(json.dumps(["vocabulary", kind, len(ids), *digests]).encode()).hexdigest()


@pytest.mark.parametrize("ids", [[], [7], [-1, 2**40, 3], ["é", "", "b", "été"], [""]])
def test_a_fingerprint_is_the_documented_formula(ids):
    assert Vocabulary.of(ids).fingerprint == plain_fingerprint(ids)
    assert Vocabulary.of(ids).originals().to_pylist() == ids


def test_a_fingerprint_does_not_depend_on_pieces_and_types():
    ids, texts = list(range(5, 300)), [f"t{n}" * (n % 4) for n in range(295)]
    for values, types in ((ids, [pa.uint32(), pa.int16(), pa.int64()]), (texts, [pa.string(), pa.large_string()])):
        for kind in types:
            array = pa.array(values, kind)
            for cut in (1, 100, 294):
                assert fingerprint_of([array[:cut], array[cut:cut], array[cut:]], 295) == plain_fingerprint(values)


def test_fingerprints_tell_kinds_orders_and_borders_apart():
    lists = [[1, 2], [2, 1], ["1", "2"], ["12"], ["1", "", "2"], ["", "12"], ["12", ""], [1], []]
    assert len({Vocabulary.of(ids).fingerprint for ids in lists}) == len(lists)


def test_a_vocabulary_knows_what_it_begins_with():
    whole = Vocabulary.of(["b", "c", "a"])
    for ids, wanted in ((["b", "c", "a"], True), (["b", "c"], True), ([], True), (["b", "a"], False), (["a"], False)):
        other = Vocabulary.of(ids)
        assert whole.begins_with(other.rows, other.fingerprint) is wanted, ids
    longer = Vocabulary.of(["b", "c", "a", "d"])
    assert not whole.begins_with(longer.rows, longer.fingerprint)
    assert whole == Vocabulary.of(pa.array(["b", "c", "a"])) and whole != longer


ITEMS = [f"b{n:03d}" for n in range(40)]


def visits(seed=0, count=900, items=ITEMS, users=30):
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "user": rng.permutation(np.arange(count) % users),
            "item": [items[n] for n in rng.permutation(np.arange(count) % len(items))],
            "time": np.sort(rng.choice(100_000, count, replace=False)),
            "action": rng.choice([1, 4], count),
            "device": rng.choice(["phone", "tv"], count),
        }
    )


def prepared(folder, table, *, files=1, extend=None, **options):
    """The folder of a cache of the table."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    step = -(-len(table) // files)
    for number in range(files):
        table.slice(number * step, step).write_parquet(folder / "in" / f"{number}.parquet")
    source = events_source(folder / "in", EventColumns(action="action"), context=["device"])
    prepare(source, folder / "cache", min_history=2, extend=extend, **options)
    return folder / "cache"


def opened(cache, **options):
    features = ["uid", "device", CROSS, "user_x_device", "device_x_hour"]
    return events(str(cache), **{"contextual_features": features, "history_length": 10, **options})


def test_how_and_where_a_cache_was_made_leaves_its_identity(tmp_path):
    table = visits()
    first = opened(prepared(tmp_path / "one", table)).identity
    shuffled = table.sample(fraction=1.0, shuffle=True, seed=3)
    cache = prepared(tmp_path / "two", shuffled, files=3, limits=Limits(2**30, 1), events_per_pass=100)
    assert opened(cache, num_workers=2).identity == first
    narrow = prepared(tmp_path / "three", table.with_columns(pl.col("user").cast(pl.UInt8)))
    assert {n: i.fingerprint for n, i in opened(narrow).identity.tables.items()} == {
        n: i.fingerprint for n, i in first.tables.items()
    }


def test_rows_stand_for_the_raw_ids_that_the_events_have(tmp_path):
    table = visits()
    data = opened(prepared(tmp_path, table))
    tables = data.identity.tables
    assert list(tables) == list(data.schema.table_rows)
    raw = {name: [None, *tables[name].originals().to_pylist()] for name in ("uid", "item_id", "device")}
    assert {name: len(ids) for name, ids in raw.items()} == {name: tables[name].rows for name in raw}
    at = {(row["user"], row["time"]): row for row in table.iter_rows(named=True)}
    seen = 0
    for batch in data.batches([*data.windows, data.holdout], 64):
        items, times = (batch.candidates[k].values().tolist() for k in ("item_candidate_id", "item_query_time"))
        uids, devices = batch.uih["uid"].values().tolist(), batch.uih["device"].values().tolist()
        for uid, item, time, device in zip(uids, items, times, devices, strict=True):
            row = at[raw["uid"][uid], time]
            assert (row["item"], row["device"]) == (raw["item_id"][item], raw["device"][device])
            seen += 1
    assert seen > 500


@pytest.mark.parametrize("change", ["one item more", "one gone, one new"])
def test_a_renumbered_cache_is_another_one(tmp_path, change):
    """Tables of a given size look alike although every row but one stands for another item."""
    table = visits()
    if change == "one item more":
        late = {"user": 0, "item": "a-new", "time": 100_001, "action": 1, "device": "tv"}
        other = pl.concat([table, pl.DataFrame([late], schema=table.schema)])
    else:
        other = table.with_columns(pl.col("item").replace("b039", "a-new"))
    sizes = {"item_id": 100, "uid": 200, CROSS: 3000}
    old = opened(prepared(tmp_path / "old", table), table_rows=sizes)
    new = opened(prepared(tmp_path / "new", other), table_rows=sizes)
    assert dict(old.schema.table_rows) == dict(new.schema.table_rows)
    old, new = old.identity, new.identity
    assert old.content != new.content
    for name in ("item_id", CROSS):
        assert old.tables[name].fingerprint != new.tables[name].fingerprint
    assert not new.tables[CROSS].same_rows(old.tables[CROSS].describe())
    for name in ("uid", "device", "user_x_device", "device_x_hour"):
        assert old.tables[name] == new.tables[name]


def crossed_rows(data):
    """(user, item) in raw ids → the row of their cross, over all samples."""
    ids = data.identity.tables
    raw = {name: [None, *ids[name].originals().to_pylist()] for name in ("uid", "item_id")}
    rows = {}
    for batch in data.batches([*data.windows, data.holdout], 64):
        columns = [batch.uih["uid"], batch.candidates["item_candidate_id"], batch.uih[CROSS]]
        for uid, item, row in zip(*(column.values().tolist() for column in columns), strict=True):
            rows[raw["uid"][uid], raw["item_id"][item]] = row
    return rows


def test_crosses_are_the_same_rows_exactly_after_an_extension(tmp_path):
    base = prepared(tmp_path / "base", visits())
    grown = visits(1, items=["a-new", *ITEMS[5:]], users=40)
    caches = {
        "extended": prepared(tmp_path / "a", grown, extend=base),
        "twice": prepared(tmp_path / "c", visits(2, users=50), extend=prepared(tmp_path / "b", grown, extend=base)),
        "prepared anew": prepared(tmp_path / "d", grown),
        "more users": prepared(tmp_path / "e", visits(1, users=40)),
    }
    then, known = opened(base).identity.tables, crossed_rows(opened(base))
    for name, cache in caches.items():
        data = opened(cache)
        now, rows = data.identity.tables, crossed_rows(data)
        shared = [pair for pair in rows if pair in known]
        assert len(shared) > 100 and name
        same = all(rows[pair] == known[pair] for pair in shared)
        earlier = json.loads(json.dumps(then[CROSS].describe()))
        assert now[CROSS].same_rows(earlier) is same is (name in ("extended", "twice")), name
        assert now[CROSS].fingerprint != then[CROSS].fingerprint
        begins = now["item_id"].begins_with(then["item_id"].rows, then["item_id"].fingerprint)
        assert begins is (name != "prepared anew"), name
        if same:  # and not the other way around: the base does not know all of the extension's ids
            assert not then[CROSS].same_rows(now[CROSS].describe())
    assert now["device_x_hour"].vocabularies == {"device": now["device"]}


def test_content_is_that_of_the_events(tmp_path):
    """Prepared again in the same place with fewer events, or with other ones of equal number."""
    table = visits()
    other = table.with_columns(pl.when(pl.col("time") == table["time"][7]).then(5 - pl.col("action"))
                               .otherwise(pl.col("action")).alias("action"))  # fmt: skip
    contents = []
    for each in (table, table.head(700), other, table):
        contents.append(opened(prepared(tmp_path, each, overwrite=True)).identity.content)
    assert contents[0] == contents[3] and len(set(contents)) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"history_length": 9}, {"history_strategy": "interleaved"}, {"history_ties": "order"}, {"scan_limit": 9},
        {"holdout_fraction": 0.2}, {"window_seconds": 7_200}, {"contextual_features": ["uid"]},
        {"table_rows": {"item_id": 99}}, {"table_rows_limit": 9},
    ],
)  # fmt: skip
def test_content_is_that_of_samples_and_features_too(tmp_path, options):
    cache = prepared(tmp_path, visits())
    assert opened(cache, **options).identity.content != opened(cache).identity.content
    features = {"item_features": ["item_id", "device"], "contextual_features": ["uid"]}
    assert opened(cache, **features).identity != opened(cache, contextual_features=["uid"]).identity
    assert opened(cache, num_workers=3).identity.content == opened(cache).identity.content


def test_min_history_is_part_of_the_content(tmp_path):
    visits().write_parquet(tmp_path / "visits.parquet")
    source = events_source(tmp_path / "visits.parquet", EventColumns(action="action"))
    for least in (0, 1):
        prepare(source, tmp_path / str(least), min_history=least)
    contents = {EventCache.open(tmp_path / str(least)).content for least in (0, 1)}
    assert len(contents) == 2


def without_fingerprints(cache):
    """A cache as it was prepared before manifests had fingerprints."""
    manifest = json.loads((cache / "manifest.json").read_text())
    del manifest["fingerprints"]
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    (cache / "manifest.json").write_text(text)
    (cache / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def test_an_older_cache_has_the_same_identity_and_can_be_extended(tmp_path):
    cache = prepared(tmp_path / "one", visits())
    wanted = opened(cache).identity
    digest = prepared(tmp_path / "two", visits(1, users=40), extend=cache)
    expected = opened(digest).identity
    without_fingerprints(cache)
    assert opened(cache).identity == wanted
    assert verify(cache)
    assert opened(prepared(tmp_path / "three", visits(1, users=40), extend=cache)).identity == expected


def test_identity_reads_neither_columns_nor_raw_ids(tmp_path):
    cache = prepared(tmp_path, visits())
    data = opened(cache)
    wanted = opened(cache).identity
    for file in cache.glob("*.npy"):
        size = file.stat().st_size
        with open(file, "r+b") as handle:  # what is mapped changes with it
            handle.seek(128)
            handle.write(bytes(size - 128))
    for file in cache.glob("vocabulary_*.parquet"):
        file.unlink()
    assert data.identity == wanted
    with pytest.raises(UserError, match=r"vocabulary_item_id.parquet cannot be read"):
        data.identity.tables["item_id"].originals()


def test_every_data_set_knows_its_ids(tmp_path):
    generated = synthetic_yambda(str(tmp_path), users=10, events_median=100, events_mean=120)
    sets = [
        generated,
        yambda(str(generated.cache.path.parents[1]), min_history=10, train_days=10),
        movielens_dataset(
            "movielens", small_ratings(), contextual_features=("uid", "gender", "user_mean_x_item_mean"),
            item_features=("item_id", "genres", "item_mean"), min_history=0,
        ),
        in_memory(),
    ]  # fmt: skip
    for data in sets:
        tables = data.identity.tables
        assert set(tables) == set(data.schema.table_rows), data.name
        for name, ids in tables.items():
            assert isinstance(ids, CrossedIds if "_x_" in name else Vocabulary), name
            if isinstance(ids, Vocabulary):
                found = ids.originals().to_pylist()
                assert len(found) == len(set(found)) == data.cache.vocab[name] - 1
                assert ids.fingerprint == plain_fingerprint(found)
    assert sets[2].identity.tables["gender"].originals().to_pylist() == ["f", "m"]
    assert sets[2].identity.tables["genres"].originals().to_pylist() == ["Drama", "Noir"]


def small_ratings(genders=("m", "f")):
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 6, 200), rng.integers(0, 9, 200)
    return Ratings(
        user, item, rng.integers(1, 6, 200).astype(float), np.arange(200) * 86_400,
        {"genres": {n: ["Drama", "Noir"][n % 2] for n in range(9)}, "year": {n: 1990 + n for n in range(9)}},
        {"gender": {n: genders[n % 2] for n in range(6)}},
        {n: [["Drama", "Noir"][n % 2]] for n in range(9)},
    )  # fmt: skip


def test_attributes_of_movielens_go_by_their_text():
    """m is gender 2 beside f, and gender 1 beside x: numbers alone look the same."""
    build = lambda *genders: (
        movielens_dataset(  # noqa: E731
            "movielens", small_ratings(genders), contextual_features=("uid", "gender"), min_history=0
        ).identity
    )
    one, other = build("m", "f"), build("x", "m")
    assert one.tables["gender"] != other.tables["gender"] and one.content != other.content
    assert one.tables["uid"] == other.tables["uid"]


def in_memory(**change):
    rng = np.random.default_rng(0)
    columns = dict(
        user=rng.integers(1, 9, 300),
        item=rng.integers(1, 30, 300),
        time=np.arange(300) * 60,
        bits=rng.choice([1, 4], 300),
    )
    cache = cache_from_events(**{**columns, **change}, min_history=1, context={"mood": columns["item"] % 3 + 7})
    schema = FeatureSchema(("item_id",), ("uid", "mood", CROSS), {**cache.vocab, CROSS: 50})
    return RankingDataset("memory", cache, schema, split_last_fraction(cache, 0.1), HistoryOptions(5, "last_n"))


def test_caches_in_memory_are_compared_by_content():
    first = in_memory()
    assert first.identity == in_memory().identity
    assert first.identity.tables["mood"].originals().to_pylist() == [7, 8, 9]
    bits = first.cache.bits[::-1].copy()
    assert in_memory(bits=bits).identity.content != first.identity.content
    shifted = in_memory(item=np.random.default_rng(0).integers(1, 30, 300) + 1)
    assert shifted.identity.tables["item_id"] != first.identity.tables["item_id"]


def test_a_space_without_raw_ids_says_so():
    data = in_memory()
    known = {name: ids for name, ids in data.cache.ids.items() if name != "mood"}
    cache = dataclasses.replace(data.cache, ids=known)
    split = split_last_fraction(cache, 0.1)
    anonymous = RankingDataset("memory", cache, data.schema, split, data.reader.history)
    ids = anonymous.identity.tables["mood"]
    assert isinstance(ids, UnknownIds) and ids.rows == 4
    with pytest.raises(UserError, match="no raw ids of 'mood'"):
        ids.originals()
    other = dataclasses.replace(cache, bits=np.roll(cache.bits, 1))
    assert other.ids_of("mood").fingerprint != ids.fingerprint  # the same numbers of other data may mean anything
    assert dataclasses.replace(cache).ids_of("mood") == ids
