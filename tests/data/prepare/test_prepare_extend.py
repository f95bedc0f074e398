"""Extending an earlier cache: known ids keep their numbers, whatever the new files hold, and crosses their sizes."""

import dataclasses
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from generative_recommenders.data.cache import EventCache, read_manifest
from generative_recommenders.data.events import events
from generative_recommenders.data.events.__main__ import main
from generative_recommenders.data.events.files import EventColumns, events_source
from generative_recommenders.data.prepare import Limits, describe, prepare, verify
from generative_recommenders.data.yambda.files import yambda_source
from generative_recommenders.errors import UserError
from tests.data.killing import COUNTED
from tests.data.prepare.test_prepare_oracle import assert_equals, cache_bytes
from tests.data.prepare_oracle import expected_cache, random_rows, write_yambda


def day(folder, number, min_history=2, **options):
    """Random files; some users and items of one day are those of another, as ids are drawn from a small range."""
    rng = random.Random(number)
    rows, artists, albums = random_rows(rng, min_history)
    items = {row["item_id"] for row in rows} - {None} | {item for item, _ in [*artists, *albums]}
    small = {item: rng.randrange(1, 60) for item in sorted(items)}
    for row in rows:
        row["uid"] = 1 + row["uid"] % 23
        row["item_id"] = small.get(row["item_id"])
    artists, albums = ([(small[item], value) for item, value in pairs] for pairs in (artists, albums))
    write_yambda(folder, rows, artists, albums, **options)
    return rows, artists, albums


def vocabularies(want):
    return {"uid": want["user_ids"], **want["vocabulary"]}


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_of_extensions_equals_the_slow_reference(tmp_path, seed):
    known, base, sizes = None, None, []
    for step in range(4):
        rows, artists, albums = day(tmp_path / f"files{step}", 10 * seed + step, files=1 + step % 3)
        cache = tmp_path / f"cache{step}"
        source = yambda_source(tmp_path / f"files{step}", "50m")
        prepare(source, cache, min_history=2, extend=base, events_per_pass=[10**6, 20, 1, 50][step])
        want = expected_cache(rows, artists, albums, 2, known)
        opened = EventCache.open(cache)
        assert_equals(opened, want)
        verify(cache)
        known, base = vocabularies(want), cache
        sizes.append(opened.num_users)
        assert opened.cross_users == sizes[0]
        assert opened.generations.get("uid", sizes) == sizes
    assert sizes[-1] > sizes[0] and (np.diff(opened.user_offsets) == 0).any()  # users came, users stayed away
    assert (np.diff(opened.user_ids) < 0).any()


@pytest.fixture
def base(tmp_path):
    day(tmp_path / "old", 1)
    prepare(yambda_source(tmp_path / "old", "50m"), tmp_path / "base", min_history=2)
    return tmp_path / "base"


def test_bytes_do_not_depend_on_how_it_was_made_or_where_the_base_lies(tmp_path, base):
    shutil.copytree(base, tmp_path / "elsewhere")
    rows, artists, albums = day(tmp_path / "unused", 2)
    variants = [
        dict(limits=Limits(threads=1), files=1, extend=base),
        dict(limits=Limits(threads=2, memory=Limits.least(2)), files=4, events_per_pass=15, extend=base),
        dict(limits=Limits(threads=8, memory=2**30), files=2, group=3, extend=tmp_path / "elsewhere"),
    ]
    made = []
    for number, variant in enumerate(variants):
        folder = tmp_path / str(number)
        write_yambda(folder, rows, artists, albums, files=variant.pop("files"), group=variant.pop("group", 50))
        prepare(yambda_source(folder, "50m"), folder / "cache", min_history=3, **variant)
        made.append(cache_bytes(folder / "cache"))
        random.Random(number).shuffle(rows)
        random.Random(number).shuffle(artists)
    assert made[0] == made[1] == made[2]


#: Extends in many small passes; with a count, kills itself just before that file operation.
CHILD = (
    COUNTED
    + """
import sys
from generative_recommenders.data.prepare import Limits, columns, prepare
from generative_recommenders.data.yambda.files import yambda_source

folder, base, cache, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
os.replace, os.fsync, os.unlink = counted(os.replace), counted(os.fsync), counted(os.unlink)
columns.ColumnWriter.append = counted(columns.ColumnWriter.append)
source = yambda_source(folder, "50m")
prepare(source, cache, min_history=2, limits=Limits(2**30, 1), extend=base, events_per_pass=60)
print(done)
"""
)


def test_a_killed_extension_goes_on_to_the_same_bytes(tmp_path, base):
    day(tmp_path / "new", 2)

    def child(cache, count):
        command = [sys.executable, "-c", CHILD, *map(str, (tmp_path / "new", base, tmp_path / cache, count))]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True)

    operations = int(child("whole", 0).stdout)
    for count in (operations // 4, operations // 3):
        assert child("killed", count).returncode == -signal.SIGKILL
    assert child("killed", 0).returncode == 0
    assert cache_bytes(tmp_path / "killed") == cache_bytes(tmp_path / "whole")


def test_the_base_is_part_of_what_a_cache_was_made_of(tmp_path, base, capsys):
    day(tmp_path / "new", 2)
    source = yambda_source(tmp_path / "new", "50m")
    first = prepare(source, tmp_path / "cache", min_history=2, extend=base)
    shutil.move(base, tmp_path / "moved")
    stamp = (tmp_path / "cache" / "item.npy").stat().st_mtime_ns
    assert prepare(source, tmp_path / "cache", min_history=2, extend=tmp_path / "moved") == first
    assert (tmp_path / "cache" / "item.npy").stat().st_mtime_ns == stamp
    day(tmp_path / "other", 3)
    prepare(yambda_source(tmp_path / "other", "50m"), tmp_path / "another", min_history=2)
    for options in ({}, {"extend": tmp_path / "another"}, {"cross_users": 7}):
        with pytest.raises(UserError, match="other input or settings"):
            prepare(source, tmp_path / "cache", min_history=2, **options)


def text_day(folder, name, items, users, seed, devices=("phone", "tv"), base=None, count=300, attributes=True, **more):
    """Own events with text ids and few times, so that item and device decide the order of many events."""
    rng = np.random.default_rng(seed)
    table = pl.DataFrame(
        {
            "user": rng.choice(users, count),
            "item": rng.choice(items, count),
            "time": rng.integers(0, 12, count) * 3600,
            "action": rng.choice([1, 4], count),
            "device": rng.choice(devices, count),
        }
    )
    table.write_parquet(folder / f"{name}.parquet")
    shelf = pl.DataFrame({"item": items, "shelf": [f"s{item[-1]}" for item in items]})
    shelf.write_parquet(folder / f"{name}_items.parquet")
    source = events_source(
        folder / f"{name}.parquet",
        EventColumns(action="action"),
        items=folder / f"{name}_items.parquet" if attributes else None,
        attributes=["shelf"] if attributes else [],
        context=more.pop("context", ["device"]),
    )
    prepare(source, folder / name, min_history=1, extend=base, **more)
    return table, EventCache.open(folder / name)


def originals(cache, space):
    return pq.read_table(cache.path / f"vocabulary_{space}.parquet")["original"].to_pylist()


def test_text_ids_context_and_ties_follow_the_originals(tmp_path):
    _, old = text_day(tmp_path, "one", ["b1", "b2", "b3"], ["u1", "u2"], 0)
    new_items = ["b0", "a9", "b2", "b4"]  # a9 and b0 sort before all that is known, and get the last numbers
    table, new = text_day(tmp_path, "two", new_items, ["u0", "u2"], 1, ("desk", "phone"), base=tmp_path / "one")
    assert originals(new, "item_id") == ["b1", "b2", "b3", "a9", "b0", "b4"]
    assert originals(new, "uid") == ["u1", "u2", "u0"] and np.diff(new.user_offsets)[0] == 0
    assert originals(new, "device") == ["phone", "tv", "desk"]
    assert originals(new, "shelf") == ["s1", "s2", "s3", "s0", "s4", "s9"]
    items, devices = [None, *originals(new, "item_id")], [None, *originals(new, "device")]
    for number, user in enumerate(["u1", "u2", "u0"]):
        rows = [row for row in table.iter_rows(named=True) if row["user"] == user]
        want = sorted((row["time"], row["item"], row["action"], row["device"]) for row in rows)
        piece = slice(int(new.user_offsets[number]), int(new.user_offsets[number + 1]))
        found = zip(new.time[piece], new.item[piece], new.bits[piece], new.context["device"][piece], strict=True)
        assert [(t, items[i], b, devices[d]) for t, i, b, d in found] == want
    shelves = [None, *originals(new, "shelf")]
    assert [shelves[n] for n in new.attributes["shelf"]] == [None, None, "s2", None, "s9", "s0", "s4"]
    verify(new.path)
    assert "2 uid and 1 new, 3 item_id and 3 new" in describe(new.path) and "crosses are sized for 2 users" in describe(
        new.path
    )


def test_a_day_without_any_value_in_a_column_keeps_its_ids(tmp_path):
    text_day(tmp_path, "one", ["b1", "b2"], ["u1", "u2"], 0)
    frame = pl.read_parquet(tmp_path / "one.parquet").with_columns(device=pl.lit(None, pl.Int64))
    frame.write_parquet(tmp_path / "empty.parquet")
    source = events_source(
        tmp_path / "empty.parquet", EventColumns(action="action"), context=["device"],
        items=tmp_path / "one_items.parquet", attributes=["shelf"],
    )  # fmt: skip
    prepare(source, tmp_path / "cache", min_history=1, extend=tmp_path / "one")
    cache = EventCache.open(tmp_path / "cache")
    assert originals(cache, "device") == ["phone", "tv"] and not cache.context["device"].any()


def test_crosses_are_sized_by_the_first_cache_of_the_chain(tmp_path):
    text_day(tmp_path, "one", ["b1", "b2"], ["u1", "u2"], 0, cross_users=9)
    text_day(tmp_path, "two", ["b1", "b3"], [f"u{n}" for n in range(20)], 1, base=tmp_path / "one")
    for name in ("one", "two"):
        data = events(tmp_path / name, contextual_features=["uid", "user_x_hour"], history_length=8)
        assert data.schema.table_rows["user_x_hour"] == 24 * 9, name
        assert read_manifest(tmp_path / name)["schema_version"] == 2
    assert data.schema.table_rows["uid"] == 21


def test_users_that_stay_away_have_no_samples_and_break_no_batch(tmp_path):
    text_day(tmp_path, "one", ["b1", "b2"], ["u1", "u2", "u9"], 0)
    _, cache = text_day(tmp_path, "two", ["b1", "b3"], ["u0", "u2"], 1, base=tmp_path / "one")
    data = events(tmp_path / "two", history_length=8)
    rows = {int(row) for batch in data.batches(data.windows, 64) for row in batch.uih["uid"].values()}
    assert rows == {2, 4} and cache.user_of(np.arange(cache.num_events)).max() == 3


def refused(tmp_path, match, **change):
    options = dict(name="two", items=["b1"], users=["u1"], seed=1, base=tmp_path / "one") | change
    with pytest.raises(UserError, match=match):
        text_day(tmp_path, options.pop("name"), options.pop("items"), options.pop("users"), **options)
    assert not (tmp_path / "two" / "COMPLETE").exists()


def test_refusals(tmp_path):
    text_day(tmp_path, "one", ["b1", "b2"], ["u1", "u2"], 0)
    before = cache_bytes(tmp_path / "one")
    refused(tmp_path, "is the folder of the new cache itself", name="one", overwrite=True)
    refused(tmp_path, "attributes shelf, named are none", attributes=False)
    refused(tmp_path, "context columns device, named are none", context=[])
    refused(tmp_path, "context columns device, named are device, time", context=["device", "time"])
    refused(tmp_path, 'ids of uid are text, those of column "user" are whole numbers', users=[1, 2])
    refused(tmp_path, 'ids of device are text, those of column "device" are whole numbers', devices=[1, 2])
    refused(tmp_path, "leave one out", cross_users=3)
    refused(tmp_path, "extend: event cache .*nowhere does not exist", base=tmp_path / "nowhere")
    assert cache_bytes(tmp_path / "one") == before
    (tmp_path / "one" / "COMPLETE").unlink()
    refused(tmp_path, "is not complete")
    with pytest.raises(UserError, match="cross_users is 0"):
        text_day(tmp_path, "three", ["b1"], ["u1"], 0, cross_users=0)


def test_validation_knows_the_generations(tmp_path, base):
    """Ids ascend within each preparation's share, none comes twice; no user of a first cache is without events."""
    day(tmp_path / "new", 2)
    prepare(yambda_source(tmp_path / "new", "50m"), tmp_path / "cache", min_history=2, extend=base)
    cache = EventCache.open(tmp_path / "cache").validate()
    known, ids = cache.generations["uid"][0], np.asarray(cache.user_ids)
    swapped, twice = ids.copy(), ids.copy()
    swapped[[known, known + 1]] = ids[[known + 1, known]]
    twice[-1] = ids[:known].max()
    assert (np.diff(twice[known:]) > 0).all()
    for wrong, fault in ((swapped, "user_ids do not ascend"), (twice, "hold a user twice")):
        with pytest.raises(UserError, match=fault):
            dataclasses.replace(cache, user_ids=wrong).validate()
    plain = {name: value for name, value in cache.manifest.items() if name != "generations"}
    with pytest.raises(UserError, match="user_offsets do not ascend"):
        dataclasses.replace(cache, manifest=plain).validate()


def test_verify_compares_fingerprints_with_the_raw_ids(tmp_path, base):
    manifest = read_manifest(base)
    manifest["fingerprints"]["album_id"] = manifest["fingerprints"]["item_id"]
    text = json.dumps(manifest)
    (base / "manifest.json").write_text(text)
    (base / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(UserError, match="raw ids of album_id do not fit their fingerprint"):
        verify(base)


def test_a_damaged_base_is_refused(tmp_path):
    _, old = text_day(tmp_path, "one", ["b1", "b2"], ["u1", "u2"], 0)
    file = tmp_path / "one" / "vocabulary_item_id.parquet"
    pq.write_table(pq.read_table(file).slice(0, 1), file)
    refused(tmp_path, "2 ids has 1")
    pq.write_table(pl.DataFrame({"original": ["b2", "b1"]}).to_arrow(), file)
    refused(tmp_path, "do not fit their checksum")


def test_from_the_command_line(tmp_path, capsys):
    def prepared(name, *options):
        pl.DataFrame({"user": [7, 7, 7, 3], "item": [5, 6, 5, 5], "time": [1, 2, 3, 4], "action": [1, 4, 1, 1]}).filter(
            pl.col("user") == 7 if name == "one" else pl.col("time") > 1
        ).write_csv(tmp_path / f"{name}.csv")
        return main(
            ["prepare", "--events", str(tmp_path / f"{name}.csv"), "--columns", "action=action", "--min-history", "0"]
            + ["--cache", str(tmp_path / name), *options]
        )

    assert prepared("one", "--cross-users", "5") == 0
    assert prepared("two", "--extend", str(tmp_path / "one")) == 0
    assert "1 uid and 1 new" in capsys.readouterr().out
    assert EventCache.open(tmp_path / "two").user_ids.tolist() == [7, 3]
    assert prepared("three", "--extend", str(tmp_path / "gone")) == 2
    assert "error: --extend: event cache" in capsys.readouterr().err


def test_code_of_before_extensions_does_not_read_them(tmp_path, base):
    """It would size crosses by all users: the version in the manifest stops it."""
    day(tmp_path / "new", 2)
    prepare(yambda_source(tmp_path / "new", "50m"), tmp_path / "cache", min_history=2, extend=base)
    assert json.loads((tmp_path / "cache" / "manifest.json").read_text())["schema_version"] == 2
    assert read_manifest(base)["schema_version"] == 1
