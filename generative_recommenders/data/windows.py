"""Time windows of anchors and the splits made of them. Every interval is half-open: [start, end)."""

from __future__ import annotations

import dataclasses

from generative_recommenders.data.cache import EventCache
from generative_recommenders.errors import UserError

DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Window:
    """The samples whose anchor time (seconds) lies in [start, end); ``index`` counts the windows of a split from 0."""

    index: int
    start: int
    end: int
    num_samples: int


@dataclasses.dataclass(frozen=True)
class Split:
    """Training windows in time order and a hold-out that starts at or after the end of the last one."""

    train: list[Window]
    holdout: Window


def time_windows(cache: EventCache, start: int, end: int, seconds: int = DAY) -> list[Window]:
    """Windows of ``seconds`` from ``start`` on that hold at least one sample; the last one is cut at ``end``."""
    if seconds < 1:
        raise UserError(f"window_seconds {seconds} is too small: give at least 1")
    windows: list[Window] = []
    while start < end:
        stop = min(start + seconds, end)
        lo, hi = cache.anchor_range(start, stop)
        if hi > lo:
            windows.append(Window(len(windows), start, stop, hi - lo))
            start = stop
        elif stop == end or hi == cache.num_anchors:
            break
        else:  # skip whole empty windows up to the next anchor: sparse data may have years of them
            gap = int(cache.time[cache.anchors[hi]]) - start
            start += gap // seconds * seconds
    return windows


def split_last_fraction(
    cache: EventCache, fraction: float = 0.1, window_seconds: int = DAY, train_days: float | None = None
) -> Split:
    """The newest ``fraction`` of the samples as hold-out; samples of the cut's time are all in the hold-out.

    ``train_days``: only the samples of so many days before the hold-out train, None: all of them.
    """
    if not 0 < fraction < 1:
        raise UserError(f"holdout_fraction {fraction} is out of range: give a number between 0 and 1")
    if train_days is not None and not 0 < train_days < 2**32 / DAY:
        raise UserError(f"train_days {train_days} is out of range: give a number of days above 0, or None for all")
    first, last = cache.time_range()
    cut = int(cache.time[cache.anchors[min(int(cache.num_anchors * (1 - fraction)), cache.num_anchors - 1)]])
    if train_days is not None:
        first = max(first, cut - max(1, round(train_days * DAY)))
    return _split(cache, first, cut, cut, last + 1, window_seconds)


def split_last_day(
    cache: EventCache,
    train_days: int = 300,
    gap_seconds: int = 1800,
    test_seconds: int = DAY,
    window_seconds: int = DAY,
    end: int | None = None,
) -> Split:
    """Yambda's split: the last day is the hold-out, the 30 minutes before it are unused, 300 days before those train.

    ``end`` is the end of the data, by default one second after the newest anchor.
    """
    if gap_seconds < 0:  # training windows would reach into the hold-out
        raise UserError(f"gap_seconds {gap_seconds} is negative: give 0 or more")
    if train_days < 1 or test_seconds < 1 or window_seconds < 1:
        raise UserError(
            f"train_days {train_days}, hold-out of {test_seconds} s, window_seconds {window_seconds}: give 1 or more"
        )
    first, last = cache.time_range()
    end = last + 1 if end is None else end
    test = end - test_seconds
    stop = test - gap_seconds
    # Windows count back from the gap, so that the newest one is whole.
    start = max(stop - train_days * DAY, stop - -(-(stop - first) // window_seconds) * window_seconds)
    return _split(cache, start, stop, test, end, window_seconds)


def _split(cache: EventCache, start: int, stop: int, test: int, end: int, window_seconds: int) -> Split:
    train = time_windows(cache, start, stop, window_seconds)
    lo, hi = cache.anchor_range(test, end)
    if not train:
        raise UserError(f"{cache.name} has no training sample before second {stop}: the data is too short to split")
    if hi == lo:
        raise UserError(f"{cache.name} has no hold-out sample in seconds [{test}, {end})")
    return Split(train, Window(len(train), test, end, hi - lo))
