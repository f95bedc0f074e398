"""Files that drift from day to day: unused columns do not matter, used ones are joined, contradictions name both."""

import datetime
import decimal
import random

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.events.files import EventColumns, events_source
from generative_recommenders.data.prepare import prepare, verify
from generative_recommenders.data.prepare.engine import utc_connection
from generative_recommenders.data.prepare.source import find_files
from generative_recommenders.data.prepare.tables import INTEGER_TYPES, open_table
from generative_recommenders.data.yambda.files import yambda_source
from generative_recommenders.errors import UserError
from tests.data.prepare_oracle import random_rows, write_yambda

COLUMNS = EventColumns(label="label")
ROWS = {"user": [1, 1, 2, 2], "item": [7, 8, 7, 9], "time": [10, 20, 30, 40], "label": [1, 0, 1, 1]}


def write(folder, name, suffix, **changes):
    """A day's file of ROWS with columns changed, added, or left out (None); parquet types as pyarrow has them."""
    folder.mkdir(exist_ok=True)
    columns = {k: v for k, v in {**ROWS, **changes}.items() if v is not None}
    table = pa.table({k: v if isinstance(v, pa.Array) else pa.array(v) for k, v in columns.items()})
    if suffix == "parquet":
        pq.write_table(table, folder / f"{name}.parquet")
        return
    lines = [",".join(table.column_names)]
    for row in table.to_pylist():
        lines.append(",".join("" if value is None else str(value).lower() for value in row.values()))
    (folder / f"{name}.{suffix}").write_text("\n".join(lines) + "\n")


def prepared(folder, columns=COLUMNS, **options):
    prepare(events_source(folder, columns, **options), folder.parent / "cache", min_history=0)
    verify(folder.parent / "cache")
    return EventCache.open(folder.parent / "cache")


def refused(folder, *words, columns=COLUMNS, **options):
    with pytest.raises(UserError) as caught:
        prepare(events_source(folder, columns, **options), folder.parent / "cache", min_history=0)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize(
    "unused",
    [
        [[1, 2, 3, 4], ["a", "b", "c", "d"]],  # changes its type
        [None, [1, 2, 3, 4]],  # in one file only
        [[1.5, 2.5, 3.5, 4.5], [None] * 4],  # empty one day
        [["2025-01-01"] * 4, [1, 2, 3, 4]],
    ],
)
def test_unused_columns_do_not_matter(tmp_path, suffix, unused):
    for order in (unused, unused[::-1]):
        for name, values in zip("ab", order, strict=True):
            write(tmp_path / "days", name, suffix, price=values)
        cache = prepared(tmp_path / "days")
        assert cache.num_events == 8 and cache.user_ids.tolist() == [1, 2]
        (tmp_path / "cache" / "COMPLETE").unlink()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("column", "one", "other", "want"),
    [
        ("item", [None] * 4, [7, 8, 7, 9], [0] * 4 + [1, 2, 1, 3]),
        ("item", [None] * 4, ["x", "y", "x", "z"], [0] * 4 + [1, 2, 1, 3]),
        ("item", [7, 8, 7, 9], [2**31, 8, 7, 2**31 + 1], [1, 2, 1, 3, 4, 2, 1, 5]),
        ("device", [None] * 4, ["x", "y", "x", "z"], [0] * 4 + [1, 2, 1, 3]),
    ],
)
def test_used_columns_are_joined(tmp_path, suffix, column, one, other, want, reverse):
    extra = {"time": [110, 120, 130, 140], "user": [3, 3, 4, 4]}
    names = "ba" if reverse else "ab"
    write(tmp_path / "days", names[0], suffix, **{column: one})
    write(tmp_path / "days", names[1], suffix, **extra, **{column: other})
    cache = prepared(tmp_path / "days", context=["device"] if column == "device" else [])
    found = cache.item if column == "item" else cache.context["device"]
    assert found.tolist() == want


@pytest.mark.parametrize("words", [["f", "t"], ["true", "false"], ["yes", "no"]])
def test_texts_that_look_like_truth_values_stay_texts(tmp_path, words):
    write(tmp_path / "days", "a", "csv", gender=[words[0]] * 4)
    write(tmp_path / "days", "b", "csv", gender=[words[0], words[1], "m", None], user=[3] * 4, time=[1, 2, 3, 4])
    cache = prepared(tmp_path / "days", context=["gender"])
    number = {word: index + 1 for index, word in enumerate(sorted([*words, "m"]))}
    assert cache.context["gender"].tolist() == [number[words[0]]] * 5 + [number[words[1]], number["m"], 0]


@pytest.mark.parametrize(
    ("types", "want"),
    [
        ([pa.int32(), pa.int64()], "BIGINT"),
        ([pa.int16(), pa.int8()], "SMALLINT"),
        ([pa.uint32(), pa.int32()], "BIGINT"),
        ([pa.uint8(), pa.uint32(), pa.uint16()], "UINTEGER"),
        ([pa.uint64(), pa.int8()], "BIGINT"),
        ([pa.null(), pa.int8(), pa.null()], "TINYINT"),
        ([pa.null(), pa.null()], "BIGINT"),
        ([pa.float32(), pa.int64()], "DOUBLE"),
        ([pa.float32(), pa.float64()], "DOUBLE"),
        ([pa.decimal128(5, 2), pa.decimal128(7, 3)], "DOUBLE"),
    ],
)
def test_the_type_holds_the_values_of_all_files(tmp_path, types, want):
    for turn in (types, types[::-1]):
        for number, kind in enumerate(turn):
            values = [None] * 2 if kind == pa.null() else [1, 2]
            values = [decimal.Decimal(value) for value in values] if pa.types.is_decimal(kind) else values
            array = pa.array(values, kind)
            pq.write_table(pa.table({"n": array}), tmp_path / f"{number}.parquet")
        allowed = (*INTEGER_TYPES, "DOUBLE", "FLOAT", "DECIMAL")
        with utc_connection() as connection:
            table = open_table(connection, find_files(tmp_path, "numbers"), "numbers", {"n": allowed})
            assert table.types == {"n": want}
            rows = connection.execute(f"SELECT n FROM {table.relation} WHERE n IS NOT NULL").fetchall()
        assert sorted(row[0] for row in rows) == sorted([1, 2] * sum(kind != pa.null() for kind in types))


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("column", "one", "other", "types"),
    [
        ("item", [7, 8, 7, 9], ["x", "y", "x", "z"], ("BIGINT", "VARCHAR")),
        ("user", ["x", "y", "x", "z"], [7, 8, 7, 9], ("BIGINT", "VARCHAR")),
        ("label", [True, False, True, True], [1, 0, 1, 0], ("BOOLEAN", "BIGINT")),
        ("time", ["2025-01-01"] * 4, [1, 2, 3, 4], ("VARCHAR", "BIGINT")),
    ],
)
def test_contradictions_name_both_files_and_types(tmp_path, suffix, column, one, other, types):
    write(tmp_path / "days", "monday", suffix, **{column: one})
    write(tmp_path / "days", "sunday", suffix, **{column: other})
    refused(tmp_path / "days", f"monday.{suffix}", f"sunday.{suffix}", repr(column), *types)


def test_a_timestamp_beside_a_number_is_a_contradiction(tmp_path):
    when = [datetime.datetime(2025, 1, 1)] * 4
    write(tmp_path / "days", "a", "parquet", time=pa.array(when))
    write(tmp_path / "days", "b", "parquet")
    refused(tmp_path / "days", "b.parquet", "BIGINT", "TIMESTAMP", "a.parquet")


def test_timestamps_of_several_types_are_the_same_seconds(tmp_path):
    when = [datetime.datetime(2025, 1, 1, 0, 0, second) for second in range(4)]
    kinds = [pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.timestamp("ms", "Europe/Berlin")]
    for number, kind in enumerate(kinds):
        write(tmp_path / "days", str(number), "parquet", time=pa.array(when).cast(kind), user=[number] * 4)
    write(tmp_path / "days", "date", "parquet", time=pa.array([when[0].date()] * 4), user=[9] * 4)
    write(tmp_path / "days", "nothing", "parquet", time=pa.nulls(0), user=[], item=[], label=[])
    cache = prepared(tmp_path / "days")
    new_year = 1735689600
    assert cache.time.tolist() == [new_year, new_year + 1, new_year + 2, new_year + 3] * 4 + [new_year] * 4


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_used_column_that_a_file_lacks_names_the_file(tmp_path, suffix):
    write(tmp_path / "days", "a", suffix)
    write(tmp_path / "days", "b", suffix, label=None)
    refused(tmp_path / "days", f"b.{suffix} has no column 'label'")
    write(tmp_path / "days", "c", suffix, user=["1"] * 4, label=None)
    refused(tmp_path / "days", f"b.{suffix} has no column 'label'")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_item_files_drift_too(tmp_path, suffix):
    for name in "ab":
        write(tmp_path / "days", name, suffix)
    none = {"user": None, "time": None, "label": None}
    write(tmp_path / "items", "a", suffix, **none, genre=["x", None, "x", "y"], extra=[1, 2, 3, 4])
    write(tmp_path / "items", "b", suffix, **none, item=[8, 8, 8, 8], genre=[None] * 4, extra=["x"] * 4)
    cache = prepared(tmp_path / "days", items=tmp_path / "items", attributes=["genre"])
    assert cache.attributes["genre"].tolist() == [0, 1, 0, 2]
    write(tmp_path / "items", "b", suffix, **none, genre=[1, 2, 3, 4])
    refused(
        tmp_path / "days", "items/a", "items/b", "VARCHAR", "BIGINT", items=tmp_path / "items", attributes=["genre"]
    )


def test_yambda_files_drift_too(tmp_path):
    rows, artists, albums = random_rows(random.Random(5), 2)
    write_yambda(tmp_path / "whole", rows, artists, albums)
    write_yambda(tmp_path / "split", rows, artists, albums, files=3)
    part = tmp_path / "split" / "flat" / "50m" / "multi_event" / "1.parquet"
    table = pq.read_table(part).drop_columns(["track_length_seconds"])
    for column, kind in (("uid", pa.int64()), ("is_organic", pa.int32()), ("event_type", pa.string())):
        table = table.set_column(table.schema.get_field_index(column), column, table[column].cast(kind))
    pq.write_table(table.select(table.column_names[::-1]), part)
    mapping = tmp_path / "split" / "album_item_mapping.parquet"
    pq.write_table(pq.read_table(mapping).append_column("extra", pa.nulls(pq.read_metadata(mapping).num_rows)), mapping)
    manifests = [
        prepare(yambda_source(tmp_path / name, "50m"), tmp_path / name / "cache", min_history=2)
        for name in ("whole", "split")
    ]
    assert manifests[0] == manifests[1]


def test_an_error_names_the_file_and_the_row(tmp_path):
    for suffix in ("parquet", "csv"):
        days = tmp_path / suffix
        write(days, "a", suffix)
        write(days, "b", suffix, user=[1, None, 3, 4])
        refused(days, f"events {days / 'b'}.{suffix}, row 2: column 'user' holds a null (1 of 8 rows)")
        write(days, "b", suffix, item=[1, 2, -5, -7])
        refused(days, f"events {days / 'b'}.{suffix}, row 4: column 'item' holds -7, outside", "2 of 8 rows")
        write(days, "b", suffix)
        write(days, "c", suffix, time=[1, 2, 3, None])
        refused(days, f"events {days / 'c'}.{suffix}, row 4: column 'time' holds a null")


@pytest.mark.parametrize("count", [3, 30_000])  # within what is looked at first, and behind it
def test_a_short_row_names_the_file_and_the_line(tmp_path, count):
    (tmp_path / "days").mkdir()
    lines = ["user,item,time,label"] + ["1,2,3,1"] * count
    for row, fields in (("1,2,3", 3), ("1,2,3,1,5", 5)):
        (tmp_path / "days" / "log.csv").write_text("\n".join([*lines, row, *lines[1:]]) + "\n")
        refused(tmp_path / "days", f"log.csv, line {count + 2}: {fields} fields, but the header has 4")


def test_a_header_decides_on_the_delimiter(tmp_path):
    for delimiter in ",;|\t":
        days = tmp_path / f"days{ord(delimiter)}"
        days.mkdir()
        text = 'user,item,time,label,"a;b,c|d"\n1,2,3,1,x\n1,2,4,0,\n'.replace(",", delimiter)
        (days / "log.csv").write_text(text, encoding="utf-8-sig", newline="\r\n")
        assert prepared(days).bits.tolist() == [1, 4]
        (tmp_path / "cache" / "COMPLETE").unlink()


def test_columns_that_stand_twice_are_refused_where_they_are_used(tmp_path):
    (tmp_path / "days").mkdir()
    log = tmp_path / "days" / "log.csv"
    log.write_text("user,item,time,label,x,x,,\n1,2,3,1,,,,\n")
    assert prepared(tmp_path / "days").num_events == 1
    log.write_text("user,item,time,label,User\n1,2,3,1,4\n")
    refused(tmp_path / "days", "log.csv", "column 'user' stands twice")
    log.write_bytes(b"user,item\xff,time,label\n1,2,3,1\n")
    refused(tmp_path / "days", "log.csv is no CSV file in UTF-8")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_events_without_any_outcome_are_said_to_have_none(tmp_path, suffix):
    for columns, changes in (
        (COLUMNS, {"label": [None] * 4}),
        (EventColumns(label="label", positive_at=4), {"label": [None] * 4}),
        (EventColumns(action="label"), {"label": [0, 2, 0, 2]}),
    ):
        write(tmp_path / "days", "a", suffix, **changes)
        refused(
            tmp_path / "days",
            "column 'label' gives none of the 4 events a positive or negative outcome",
            columns=columns,
        )


def test_a_context_column_named_item_does_not_count_unknown_items(tmp_path):
    table = pl.DataFrame({"user": [1, 1], "sku": [None, 5], "time": [1, 2], "label": [1, 1], "item": [None, None]})
    (tmp_path / "days").mkdir()
    table.write_parquet(tmp_path / "days" / "a.parquet")
    assert (
        prepared(tmp_path / "days", EventColumns(item="sku", label="label"), context=["item"]).counters["null_item"]
        == 1
    )


def test_a_line_that_cannot_be_taken_apart_is_named(tmp_path):
    (tmp_path / "days").mkdir()
    log = tmp_path / "days" / "log.csv"
    log.write_text('user,item,time,label\n1,2,3,1\n1,"2,3,1\n1,2,3,0\n')
    refused(tmp_path / "days", "log.csv, line 3: Value with unterminated quote found")
    lines = b"user,item,time,label\n" + b"a,2,3,1\n" * 40_000
    log.write_bytes(lines + b"\xe9x,2,3,1\n")
    refused(tmp_path / "days", "log.csv, line 40002")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2.csv.gz", "2.csv.gz would not be read: unpack it"),
        ("2.parquet.zst", "2.parquet.zst would not be read: unpack it"),
        ("2.CSV", "2.CSV would not be read: write its suffix .csv"),
        ("day=2/part.csv", "files in its sub-folder day=2 would not be read"),
    ],
)
def test_no_file_of_a_folder_is_passed_over_in_silence(tmp_path, name, words):
    write(tmp_path / "in", "1", "csv")
    (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "in" / name).write_bytes((tmp_path / "in" / "1.csv").read_bytes())
    refused(tmp_path / "in", words)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_file_under_two_names_does_not_count_twice(tmp_path, link):
    write(tmp_path / "in", "1", "csv")
    getattr(tmp_path / "in" / "2.csv", link)(tmp_path / "in" / "1.csv")
    refused(tmp_path / "in", "2.csv is 1.csv under another name")


def test_what_holds_no_events_may_lie_beside_them(tmp_path):
    write(tmp_path / "in", "1", "csv")
    for name in ("README.txt", "_SUCCESS", ".1.csv.crc", "1.csv.md5", "Makefile"):
        (tmp_path / "in" / name).write_text("x")
    (tmp_path / "in" / "_temporary").mkdir()
    (tmp_path / "in" / "_temporary" / "2.csv").write_text("x")
    assert [file.name for file in find_files(tmp_path / "in", "events")] == ["1.csv"]


@pytest.mark.parametrize("rows", ["", ",1\n,2\n"])
@pytest.mark.parametrize("ids", [[7, 8, 7, 9], ["a", "b", "a", "c"]])
def test_an_item_file_without_any_item_says_so(tmp_path, rows, ids):
    write(tmp_path / "in", "1", "csv", item=ids)
    (tmp_path / "items.csv").write_text("item,shelf\n" + rows)
    items = {"items": tmp_path / "items.csv", "attributes": ["shelf"]}
    refused(tmp_path / "in", "items.csv: column 'item' holds no item", **items)


def test_messages_show_spaces_of_column_names_and_no_query(tmp_path):
    write(tmp_path / "in", "1", "csv")
    (tmp_path / "in" / "1.csv").write_text(" user,item,time ,label\n1,2,3,1\n")
    refused(tmp_path / "in", "no column 'user': its columns are ' user', item, 'time ', label")
    (tmp_path / "in" / "1.csv").unlink()
    (tmp_path / "in" / "1.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(UserError) as caught:
        events_source(tmp_path / "in", COLUMNS)
    assert "1.parquet" in str(caught.value) and "SELECT" not in str(caught.value)
