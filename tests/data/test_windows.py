import numpy as np
import pytest

from generative_recommenders.data.cache import cache_from_events
from generative_recommenders.data.windows import DAY, Window, split_last_day, split_last_fraction, time_windows
from generative_recommenders.errors import UserError


def cache_at(times, min_history=0):
    """One listen a time, each of a user of its own."""
    times = np.array(times)
    return cache_from_events(np.arange(len(times)), times * 0 + 1, times, times * 0 + 1, min_history=min_history)


def test_windows_are_half_open():
    cache = cache_at([100, 199, 200, 200, 299, 300])
    assert time_windows(cache, 100, 300, 100) == [Window(0, 100, 200, 2), Window(1, 200, 300, 3)]
    assert time_windows(cache, 100, 301, 100)[-1] == Window(2, 300, 301, 1)


def test_empty_windows_are_left_out_however_many():
    cache = cache_at([5, 4_000_000_000])
    assert time_windows(cache, 0, 4_000_000_001, 10) == [
        Window(0, 0, 10, 1),
        Window(1, 4_000_000_000, 4_000_000_001, 1),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_windows_cover_every_sample_once(seed):
    rng = np.random.default_rng(seed)
    times = rng.choice([7, 50, 51, 120, 121, 499, 500, 900], 30)
    start, end, seconds = int(rng.integers(0, 100)), int(rng.integers(100, 1000)), int(rng.integers(1, 300))
    windows = time_windows(cache_at(times), start, end, seconds)
    assert sum(w.num_samples for w in windows) == ((times >= start) & (times < end)).sum()
    for window in windows:
        assert window.num_samples == ((times >= window.start) & (times < window.end)).sum() > 0
        assert (window.start - start) % seconds == 0 and window.end <= end
    assert [w.index for w in windows] == list(range(len(windows)))


def test_only_the_newest_days_before_the_hold_out_train():
    times = [DAY * day + 10 for day in range(10)]
    split = split_last_fraction(cache_at(times), 0.2, train_days=3.0)
    assert [window.num_samples for window in split.train] == [1, 1, 1]
    assert split.train[0].start == 5 * DAY + 10 and split.train[-1].end == split.holdout.start == 8 * DAY + 10
    assert split_last_fraction(cache_at(times), 0.2, train_days=1e4) == split_last_fraction(cache_at(times), 0.2)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="train_days .* is out of range"):
            split_last_fraction(cache_at(times), 0.2, train_days=wrong)


def test_a_cut_keeps_equal_times_on_one_side():
    times = [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
    split = split_last_fraction(cache_at(times), 0.1, 100)
    assert split.holdout == Window(1, 8, 9, 3)
    assert split.train == [Window(0, 1, 8, 7)]


def test_last_day_split():
    end = 302 * DAY
    times = [
        10,
        end - 301 * DAY - 1801,
        end - 301 * DAY - 1800,
        end - DAY - 1801,
        end - DAY - 1800,
        end - DAY - 1,
        end - DAY,
    ]
    cache = cache_at([*times, end - 1])
    split = split_last_day(cache)
    assert (split.holdout.start, split.holdout.end, split.holdout.num_samples) == (end - DAY, end, 2)
    assert sum(w.num_samples for w in split.train) == 2
    assert split.train[0].start == end - 301 * DAY - 1800 and split.train[-1].end == end - DAY - 1800


def test_last_day_split_of_shorter_data_takes_all_of_it():
    end = 5 * DAY
    cache = cache_at([*range(0, end, 3600), end - 1])
    split = split_last_day(cache)
    assert sum(w.num_samples for w in split.train) == sum(t < end - DAY - 1800 for t in range(0, end, 3600))
    assert split.train[-1].end - split.train[-1].start == DAY


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split_last_fraction(cache_at([1, 2, 3]), 1.0), "holdout_fraction 1.0"),
        (lambda: split_last_fraction(cache_at([5, 5, 5])), "no training sample"),
        (lambda: split_last_day(cache_at([5, 6, 7])), "no training sample"),
        (lambda: split_last_day(cache_at([0, 10 * DAY]), gap_seconds=-1), "gap_seconds -1"),
        (lambda: split_last_day(cache_at([0, 10 * DAY]), train_days=0), "train_days 0"),
        (lambda: split_last_day(cache_at([0, 10 * DAY]), end=20 * DAY), "no hold-out sample"),
        (lambda: split_last_fraction(cache_at([1, 2], min_history=3)), "no sample"),
        (lambda: time_windows(cache_at([1]), 0, 5, 0), "window_seconds 0"),
    ],
)
def test_impossible_splits_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
