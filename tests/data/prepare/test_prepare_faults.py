"""Bad input, full disks and changed files: one clear line, and nothing half-written that counts as complete."""

import random
import shutil
import subprocess

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from generative_recommenders.data.cache import MARKER, EventCache
from generative_recommenders.data.prepare import Limits, columns, describe, prepare, verify
from generative_recommenders.data.prepare.engine import readable_errors
from generative_recommenders.data.prepare.job import Job
from generative_recommenders.data.yambda.files import yambda_source
from generative_recommenders.errors import UserError
from tests.data.prepare_oracle import random_rows, write_yambda


@pytest.fixture
def files(tmp_path):
    rows, artists, albums = random_rows(random.Random(3), 2)
    write_yambda(tmp_path / "files", rows, artists, albums)
    return tmp_path / "files"


def run(files, cache, **options):
    return prepare(yambda_source(files, "50m"), cache, min_history=2, **options)


def fails(files, cache, *words, **options):
    """The preparation fails with one line that has all the words, and leaves no cache."""
    with pytest.raises(UserError) as caught:
        run(files, cache, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message
    assert not (cache / MARKER).exists()
    with pytest.raises(UserError):
        EventCache.open(cache)


def rewrite(files, change):
    path = files / "flat" / "50m" / "multi_event.parquet"
    pq.write_table(change(pq.read_table(path)), path)


def with_value(column, value, type_=None):
    """The table with ``value`` in the column's second row."""

    def change(table):
        values = table[column].to_pylist()
        values[1] = value
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, pa.array(values, type_ or table.schema.field(column).type))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.drop_columns(["is_organic"]), ["no column 'is_organic'", "event_type"]),
        (lambda t: t.set_column(1, "timestamp", t["timestamp"].cast(pa.float64())), ["'timestamp'", "DOUBLE"]),
        (lambda t: t.set_column(2, "item_id", pc.cast(t["item_id"], pa.string())), ["'item_id'", "VARCHAR"]),
        (lambda t: t.slice(0, 0), ["no events"]),
        (with_value("timestamp", -5, pa.int64()), ["'timestamp'", "-5", "1 of"]),
        (with_value("timestamp", 1_700_000_000_000, pa.int64()), ["1700000000000", "milliseconds"]),
        (with_value("timestamp", None), ["'timestamp'", "null"]),
        (with_value("uid", None), ["'uid'", "null"]),
        (with_value("uid", 2**40, pa.int64()), ["'uid'", 2**40]),
        (with_value("item_id", 2**32, pa.uint64()), ["'item_id'", 2**32]),
        (with_value("item_id", -1, pa.int64()), ["'item_id'", "-1"]),
        (with_value("is_organic", 7), ["'is_organic'", "7"]),
        (with_value("is_organic", 2**40, pa.int64()), ["'is_organic'", 2**40]),
        (with_value("event_type", "purchase", pa.string()), ["'event_type'", "purchase", "listen"]),
        (with_value("played_ratio_pct", -3, pa.int32()), ["'played_ratio_pct'", "-3"]),
    ],
)
def test_bad_rows(files, tmp_path, change, words):
    rewrite(files, change)
    fails(files, tmp_path / "cache", "multi_event.parquet", *words)


def test_truncated_file(files, tmp_path):
    path = files / "flat" / "50m" / "multi_event.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    fails(files, tmp_path / "cache", "multi_event.parquet", "cannot be read")


def test_damaged_pages(files, tmp_path):
    """Damage that the footer does not show surfaces while reading, as an error or as other rows, never as a crash."""
    path = files / "flat" / "50m" / "multi_event.parquet"
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    fails(files, tmp_path / "cache", "preparing")


def test_empty_missing_and_uneven_files(files, tmp_path):
    path = files / "flat" / "50m" / "multi_event.parquet"
    mapping = files / "artist_item_mapping.parquet"
    kept = mapping.read_bytes()
    mapping.write_bytes(b"")
    fails(files, tmp_path / "cache", "artist_item_mapping.parquet", "empty")
    mapping.unlink()
    fails(
        files,
        tmp_path / "cache",
        "artist_item_mapping.parquet",
        "does not exist",
        fetch := "yambda download --size 50m",
    )
    mapping.write_bytes(kept)
    parts = files / "flat" / "50m" / "multi_event"
    parts.mkdir()
    table = pq.read_table(path)
    pq.write_table(table, parts / "0.parquet")
    pq.write_table(table.drop_columns(["uid"]), parts / "1.parquet")
    fails(files, tmp_path / "cache", "1.parquet", "no column 'uid'")
    fails(tmp_path / "nowhere", tmp_path / "cache", "nowhere", "does not exist", f"{fetch} --path {tmp_path}/nowhere")
    shutil.rmtree(files / "flat")
    fails(files, tmp_path / "cache", "multi_event.parquet does not exist", fetch)


def test_negative_id_in_a_mapping(files, tmp_path):
    table = pa.table({"item_id": pa.array([1, -2]), "album_id": pa.array([1, 2])})
    pq.write_table(table, files / "album_item_mapping.parquet")
    fails(files, tmp_path / "cache", "album_item_mapping", "-2")


def test_limits_are_checked():
    for memory, threads, word in (("10MB", 1, "576MiB"), ("4 elephants", 1, "4GiB"), (None, 0, "--threads 0")):
        with pytest.raises(UserError, match=word):
            Limits.parse(memory, threads)
    assert Limits.parse("1.5GiB", 2).memory == 3 * 2**29


def test_foreign_folder_and_other_settings_are_left_alone(files, tmp_path):
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "item.npy").write_text("mine")
    fails(files, other, "holds other files")
    assert (other / "item.npy").read_text() == "mine"
    (tmp_path / "a_file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        run(files, tmp_path / "a_file")
    run(files, tmp_path / "cache")
    with pytest.raises(UserError, match="--overwrite"):
        prepare(yambda_source(files, "50m"), tmp_path / "cache", min_history=3)
    verify(tmp_path / "cache")


def test_two_at_once_are_refused(files, tmp_path):
    with Job(tmp_path / "cache", "digest").opened():
        with pytest.raises(UserError, match="another process"):
            run(files, tmp_path / "cache")


def test_an_interruption_inside_the_engine_is_one():
    with pytest.raises(KeyboardInterrupt):
        with readable_errors("sorting"):
            raise RuntimeError("Query interrupted")
    with pytest.raises(RuntimeError, match="another"):
        with readable_errors("sorting"):
            raise RuntimeError("another")
    with pytest.raises(UserError, match="sorting: bad stream"):
        with readable_errors("sorting"):
            raise pa.ArrowInvalid("bad\nstream")


def test_input_that_changes_underway_is_noticed(files, tmp_path, monkeypatch):
    from generative_recommenders.data.prepare import pipeline

    whole = pipeline.write_anchors

    def touching(*arguments):
        rewrite(files, lambda table: table)
        return whole(*arguments)

    monkeypatch.setattr(pipeline, "write_anchors", touching)
    fails(files, tmp_path / "cache", "changed")
    monkeypatch.undo()
    run(files, tmp_path / "cache")
    verify(tmp_path / "cache")


@pytest.mark.parametrize("writes", [1, 4, 9, 14])
def test_full_disk_then_rerun(files, tmp_path, monkeypatch, writes):
    append, left = columns.ColumnWriter.append, [writes]

    def limited(self, values):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        append(self, values)

    monkeypatch.setattr(columns.ColumnWriter, "append", limited)
    fails(files, tmp_path / "cache", "disk", "full", "GB left", events_per_pass=60)
    monkeypatch.undo()
    run(files, tmp_path / "cache", events_per_pass=60)
    verify(tmp_path / "cache")


def test_small_tmpfs(files, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        fails(files, small / "cache", "needs up to 0.001 GB", "0.000 GB are free")
        fails(files, small / "cache", "full", check_space=False)
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_verify_and_open_notice_damage(files, tmp_path):
    cache = tmp_path / "cache"
    run(files, cache)
    for name in ("item.npy", "vocabulary_item_id.parquet", "attribute_artist_id.npy", "manifest.json"):
        kept = (cache / name).read_bytes()
        (cache / name).write_bytes(kept[:-2] + bytes([kept[-2] ^ 8]) + kept[-1:])
        with pytest.raises(UserError, match=name.split(".")[0]):
            verify(cache)
        (cache / name).write_bytes(kept)
    (cache / "time.npy").write_bytes((cache / "time.npy").read_bytes()[:-4])
    with pytest.raises(UserError, match="time.npy has"):
        EventCache.open(cache)
    (cache / MARKER).unlink()
    with pytest.raises(UserError, match="not complete"):
        EventCache.open(cache)


def test_the_largest_ratio_of_its_type_is_no_fault(files, tmp_path):
    rewrite(files, with_value("played_ratio_pct", 65_535))
    run(files, tmp_path / "cache")
    verify(tmp_path / "cache")


def test_numbers_without_sense_are_refused(files, tmp_path):
    with pytest.raises(UserError, match="--threads 100000: expected 1 to"):
        Limits.parse(None, 100_000)
    with pytest.raises(UserError, match="min_history is 1000000000000"):
        prepare(yambda_source(files, "50m"), tmp_path / "cache", min_history=10**12)


def test_input_inside_the_cache_folder_survives(files, tmp_path):
    cache = tmp_path / "cache"
    run(files, cache)
    mine = files / "flat" / "50m" / "multi_event.parquet"
    (cache / "multi_event.parquet").write_bytes(mine.read_bytes())
    mine.unlink()
    mine.symlink_to(cache / "multi_event.parquet")
    with pytest.raises(UserError, match="lies in the cache folder"):
        run(files, cache, overwrite=True)
    assert (cache / "multi_event.parquet").exists() and verify(cache)


def test_without_its_marker_a_cache_is_prepared_again(files, tmp_path):
    cache = tmp_path / "cache"
    before = run(files, cache)
    (cache / MARKER).unlink()
    assert run(files, cache) == before == verify(cache)


@pytest.mark.parametrize("text", [b"[]", b"null", b"\xff\xfe", b'{"schema_version": 1}'])
def test_a_damaged_manifest_is_named(files, tmp_path, text):
    run(files, tmp_path / "cache")
    (tmp_path / "cache" / "manifest.json").write_bytes(text)
    for use in (EventCache.open, describe, verify):
        with pytest.raises(UserError, match="manifest.json"):
            use(tmp_path / "cache")


def test_no_flipped_bit_of_a_header_is_read_as_other_data(files, tmp_path):
    run(files, tmp_path / "cache")
    file, want = tmp_path / "cache" / "item.npy", EventCache.open(tmp_path / "cache").item.copy()
    kept = file.read_bytes()
    for bit in range(128 * 8):
        damaged = bytearray(kept)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            item = EventCache.open(tmp_path / "cache").item
        except UserError:
            continue
        assert item.dtype == want.dtype and (item == want).all()
