"""Dates that are text: one reading for all files, refused where two are possible, settled by a time format."""

import calendar
import datetime
import random
import time

import polars as pl
import pytest

from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.events.__main__ import main
from generative_recommenders.data.events.files import EventColumns, events_source
from generative_recommenders.data.prepare import prepare
from generative_recommenders.errors import UserError

UTC = datetime.UTC


def write(folder, name, texts, suffix="csv"):
    folder.mkdir(exist_ok=True)
    table = pl.DataFrame({"user": 1, "item": 2, "label": 1, "when": pl.Series(texts, dtype=pl.String)})
    table.write_csv(folder / f"{name}.csv") if suffix == "csv" else table.write_parquet(folder / f"{name}.parquet")


def read(folder, time_format=None):
    """Seconds of all events, ascending."""
    source = events_source(folder, EventColumns(time="when", label="label", time_format=time_format))
    prepare(source, folder.parent / "cache", min_history=0, overwrite=True)
    return EventCache.open(folder.parent / "cache").time.tolist()


def refused(folder, *words, time_format=None):
    with pytest.raises(UserError) as caught:
        read(folder, time_format)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_years_of_two_digits_may_stand_in_front(tmp_path):
    write(tmp_path / "days", "a", ["01/04/25"])
    refused(tmp_path / "days", "2001-04-25 00:00:00 (year", "2025-04-01 00:00:00 (day", "2025-01-04 00:00:00 (month")
    write(tmp_path / "days", "b", ["32/04/13"])
    assert read(tmp_path / "days") == seconds(datetime.datetime(2001, 4, 25), datetime.datetime(2032, 4, 13))


def seconds(*moments):
    return sorted(calendar.timegm(moment.timetuple()) for moment in moments)


APRIL = [datetime.datetime(2025, 4, day, 10, day, 7) for day in range(1, 10)]
LATE = [datetime.datetime(2025, 4, day, 10, day, 7) for day in range(13, 20)]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    "pattern", ["%m/%d/%Y %H:%M:%S", "%d/%m/%Y %H:%M:%S", "%d.%m.%Y %H:%M:%S", "%m-%d-%Y", "%d/%m/%y %H:%M", "%y/%m/%d"]
)
def test_dates_with_two_readings_are_refused_until_a_format_settles_it(tmp_path, suffix, pattern):
    days = APRIL if "%y/" not in pattern else [day.replace(year=2001) for day in APRIL]
    texts = [day.strftime(pattern) for day in days]
    write(tmp_path / "days", "a", texts, suffix)
    file = tmp_path / "days" / f"a.{suffix}"
    refused(tmp_path / "days", f"{file}, row 1: column 'when' holds {texts[0]!r}", " or ", "--time-format")
    want = seconds(*(datetime.datetime.strptime(text, pattern) for text in texts))
    assert read(tmp_path / "days", pattern) == want


def test_both_readings_of_the_first_ambiguous_value_are_shown(tmp_path):
    write(tmp_path / "days", "a", ["01/01/2025 00:00", "04/01/2025 10:00"])
    refused(
        tmp_path / "days",
        f"{tmp_path / 'days' / 'a.csv'}, row 2: column 'when' holds '04/01/2025 10:00', which is "
        "2025-01-04 10:00:00 (day first) or 2025-04-01 10:00:00 (month first)",
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    "pattern", ["%m/%d/%Y %H:%M:%S", "%d.%m.%Y %H:%M:%S", "%d/%m/%y %H:%M:%S", "%m-%d-%YT%H:%M:%S"]
)
def test_one_file_settles_the_reading_of_all(tmp_path, suffix, pattern):
    write(tmp_path / "days", "a", [day.strftime(pattern) for day in APRIL], suffix)
    late = [day.strftime(pattern).replace("25 ", "99 ") if "%y" in pattern else day.strftime(pattern) for day in LATE]
    write(tmp_path / "days", "b", late, suffix)
    want = seconds(*(datetime.datetime.strptime(text, pattern) for text in late), *APRIL)
    assert read(tmp_path / "days") == want


def test_readings_that_never_differ_are_one(tmp_path):
    texts = [f"{n:02}/{n:02}/2025" for n in range(1, 10)]
    write(tmp_path / "days", "a", texts)
    assert read(tmp_path / "days") == seconds(*(datetime.datetime(2025, n, n) for n in range(1, 10)))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_iso_dates_and_their_offsets(tmp_path, suffix, zone, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    texts = [
        "2025-04-01", "2025-04-01 10:00", "2025-04-01T10:00:01", "2025-04-01 10:00:02.75", "2025-04-01T10:00:03Z",
        "2025-04-01T10:00:04+02:00", "2025-04-01 10:00:05-0530", "2025/04/01 10:00:06", "2025-04-01 10:00:07+02",
    ]  # fmt: skip
    hour = calendar.timegm((2025, 4, 1, 10, 0, 0))
    day = hour - 36_000
    write(tmp_path / "days", "a", texts[:4], suffix)
    write(tmp_path / "days", "b", texts[4:], suffix)
    wanted = [day, hour, hour + 1, hour + 2, hour + 3, hour - 7196, hour + 19_805, hour + 6, hour - 7193]
    try:
        assert read(tmp_path / "days") == sorted(wanted)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("form", ["{0} {1}+02:00", "{0} {1} +0200", "{0}T{1}.250+02:00", "{0} {1}Z", "{0} {1}"])
def test_offsets_of_other_orders(tmp_path, form):
    texts = [form.format(f"{day}/4/2025", f"{day % 12}:05:00") for day in range(10, 16)]
    write(tmp_path / "days", "a", texts + ["1/4/2025 7:30 PM", "2/4/2025 07:30"])
    shift = 7200 if "2" in form.replace("{0}", "") else 0
    want = [calendar.timegm((2025, 4, day, day % 12, 5, 0)) - shift for day in range(10, 16)]
    want += [calendar.timegm((2025, 4, 1, 19, 30, 0)), calendar.timegm((2025, 4, 2, 7, 30, 0))]
    assert read(tmp_path / "days") == sorted(want)


def test_random_dates_are_read_as_python_reads_them(tmp_path):
    rng = random.Random(1)
    pattern = "%d/%m/%Y %I:%M:%S %p"
    moments = [datetime.datetime.fromtimestamp(rng.randrange(2**32), UTC).replace(tzinfo=None) for _ in range(300)]
    write(tmp_path / "days", "a", [moment.strftime(pattern) for moment in moments])
    want = seconds(*moments)
    assert read(tmp_path / "days") == want == read(tmp_path / "days", pattern)


def test_dates_of_no_one_reading_name_a_value_of_each(tmp_path):
    write(tmp_path / "days", "a", ["04/13/2025", "04/01/2025"])
    write(tmp_path / "days", "b", ["13/04/2025"])
    refused(tmp_path / "days", "a.csv, row 1", "'04/13/2025'", "b.csv, row 1", "'13/04/2025'", "--time-format")
    write(tmp_path / "days", "b", ["2025-04-13"])
    refused(tmp_path / "days", "'04/01/2025'", "a.csv, row 2", "'2025-04-13'", "b.csv, row 1")
    write(tmp_path / "days", "b", ["2025-04-13", "yesterday"])
    refused(tmp_path / "days", "b.csv, row 2", "'yesterday'", "--time-format")


def test_what_looks_like_a_date_and_is_none(tmp_path):
    write(tmp_path / "days", "a", ["2025-04-01", "2025-02-30"])
    refused(tmp_path / "days", "a.csv, row 2", "'2025-02-30'", "1 of 2 rows")
    write(tmp_path / "days", "a", ["31/02/2025", "13/02/2025"])
    refused(tmp_path / "days", "a.csv, row 1", "'31/02/2025'")


def test_a_format_that_does_not_fit_names_file_value_and_format(tmp_path):
    write(tmp_path / "days", "a", ["01/04/2025"])
    write(tmp_path / "days", "b", ["01/04/2025", "04/13/2025"])
    refused(tmp_path / "days", "b.csv, row 2", "'04/13/2025'", "'%d/%m/%Y'", time_format="%d/%m/%Y")
    for wrong in ("", "%Q", "%d/%"):
        refused(tmp_path / "days", f"--time-format {wrong!r} is no time format", time_format=wrong)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_can_have_a_format(tmp_path, suffix):
    write(tmp_path / "days", "a", ["20250401", "20250402"], suffix)
    want = seconds(datetime.datetime(2025, 4, 1), datetime.datetime(2025, 4, 2))
    assert read(tmp_path / "days", "%Y%m%d") == want
    table = pl.DataFrame({"user": 1, "item": 2, "label": 1, "when": [20250401, 20250402]})
    (tmp_path / "days" / f"a.{suffix}").unlink()
    table.write_parquet(tmp_path / "days" / "a.parquet")
    assert read(tmp_path / "days", "%Y%m%d") == want


def test_dates_that_are_numbers_are_not_taken_for_seconds(tmp_path):
    write(tmp_path / "days", "a", ["20250401", "20250402"])
    refused(tmp_path / "days", "'when' runs from 20250401 to 20250402", "--time-format %Y%m%d")
    write(tmp_path / "days", "a", ["20250401", "20250432"])  # no such day: a clock that counts seconds from its start
    assert read(tmp_path / "days") == [20250401, 20250432]


def test_timestamps_need_no_format(tmp_path):
    (tmp_path / "days").mkdir()
    table = pl.DataFrame({"user": 1, "item": 2, "label": 1, "when": APRIL})
    table.write_parquet(tmp_path / "days" / "a.parquet")
    refused(tmp_path / "days", "a.parquet", "'when' has type TIMESTAMP", time_format="%Y-%m-%d")
    assert read(tmp_path / "days") == seconds(*APRIL)


def test_the_command_line_takes_a_format(tmp_path, capsys):
    write(tmp_path / "days", "a", [day.strftime("%m/%d/%Y %H:%M:%S") for day in APRIL])
    command = [
        "prepare",
        "--events",
        str(tmp_path / "days"),
        "--columns",
        "time=when,label=label",
        "--min-history",
        "0",
    ]
    assert main([*command, "--cache", str(tmp_path / "cache")]) == 2
    assert "--time-format" in capsys.readouterr().err
    assert main([*command, "--cache", str(tmp_path / "cache"), "--time-format", "%m/%d/%Y %H:%M:%S"]) == 0
    assert EventCache.open(tmp_path / "cache").time.tolist() == seconds(*APRIL)
