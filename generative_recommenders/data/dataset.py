"""A data set for ranking: windows of samples and the batches of any of them, in an order that depends on nothing else.

The global order of samples is a pure function of the windows and the shuffle seed. Ranks, batch size and workers only
cut it: global batch g holds samples [g · W · b, (g + 1) · W · b) of the order, and rank r takes the r-th slice of b of
them. So any set-up sees every sample exactly once, and a position in the order is all that a resume needs.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from generative_recommenders.data.batch import Batch
from generative_recommenders.data.cache import EventCache
from generative_recommenders.data.compiled import compiled
from generative_recommenders.data.crosses import cross_parts, is_cross
from generative_recommenders.data.identity import (
    SELF_EVIDENT,
    CrossedIds,
    DataIdentity,
    UnknownIds,
    Vocabulary,
    digest_of,
)
from generative_recommenders.data.reader import BatchReader, HistoryOptions
from generative_recommenders.data.schema import FeatureSchema
from generative_recommenders.data.windows import Split, Window
from generative_recommenders.errors import UserError

__all__ = ["RankingDataset", "Window"]

#: Batches that each worker prepares ahead of the consumer.
AHEAD = 2

#: More threads would not start anywhere.
MOST_WORKERS = 1024

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RankingDataset:
    """Samples of an event cache: training ``windows`` in time order and the ``holdout``, which lies after all of them.

    ``best_auc``: the best reachable hold-out AUC where a generator knows it. ``baseline_auc``: hold-out AUC of a simple
    reference that the data set comes with. Either is None where it is not known, and for nan (a hold-out of one class).
    ``notes``: lines for the run's log (counts, tables hashed down). ``num_workers``: threads that build batches ahead
    of the consumer (the loops release the interpreter lock); 0 builds them in the caller. The batches are the same for
    any number.
    """

    def __init__(
        self,
        name: str,
        cache: EventCache,
        schema: FeatureSchema,
        split: Split,
        history: HistoryOptions,
        *,
        num_workers: int = 0,
        best_auc: float | None = None,
        baseline_auc: float | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        if not 0 <= num_workers <= MOST_WORKERS:
            raise UserError(
                f"num_workers {num_workers} is out of range: give 0 (build batches in the trainer) to {MOST_WORKERS}"
            )
        self.name, self.cache, self.schema = name, cache, schema
        self.windows, self.holdout = list(split.train), split.holdout
        self.num_workers = num_workers
        self.best_auc, self.baseline_auc, self.notes = _defined(best_auc), _defined(baseline_auc), tuple(notes)
        self.reader = BatchReader(cache, schema, history)

    @functools.cached_property
    def identity(self) -> DataIdentity:
        """What the rows of the tables stand for, and a fingerprint of all that a run trains on (identity.py)."""
        cache, schema = self.cache, self.schema
        tables: dict[str, Vocabulary | UnknownIds | CrossedIds] = {}
        for name, rows in schema.table_rows.items():
            if is_cross(name):
                parts = cross_parts(name)
                spaces = [self.reader.key_source(name, part) for part in parts]
                tables[name] = CrossedIds(rows, parts, {s: cache.ids_of(s) for s in spaces if s not in SELF_EVIDENT})
            else:
                tables[name] = cache.ids_of(name)
        windows = [(window.start, window.end, window.num_samples) for window in [*self.windows, self.holdout]]
        sizes = sorted(schema.table_rows.items())
        features = [schema.item_features, schema.contextual_features, schema.label_features, sizes]
        history = dataclasses.astuple(self.reader.history)
        return DataIdentity(digest_of("data", cache.content, windows, history, features), tables)

    @property
    def history_length(self) -> int:
        """Most history rows of a sample."""
        return self.reader.history.slots

    def batches(
        self,
        windows: Sequence[Window],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
        start_sample: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Batches of this rank; every rank gets the same number of them, the last ones possibly smaller or empty.

        ``shuffle_seed`` shuffles inside each window (None: time order). ``start_sample`` samples of the global order
        are skipped: a run that has consumed k global batches resumes with k · world_size · batch_size.
        ``drop_last`` leaves out a global batch that is not full.
        """
        _check_batches(batch_size, rank, world_size, start_sample)
        order = SampleOrder(self.cache, windows, shuffle_seed)
        stride = batch_size * world_size
        left = max(0, order.num_samples - start_sample)
        steps = left // stride if drop_last else -(-left // stride)

        def chunks() -> Iterator[np.ndarray]:
            for step in range(steps):
                lo = start_sample + step * stride + rank * batch_size
                yield order.slice(lo, lo + batch_size)

        return _ordered(self.reader.read, chunks(), self.num_workers)


class SampleOrder:
    """The global order of the samples of some windows: window after window, inside a window by time or shuffled."""

    def __init__(self, cache: EventCache, windows: Sequence[Window], shuffle_seed: int | None) -> None:
        self._seed = shuffle_seed
        self._ranges = [cache.anchor_range(window.start, window.end) for window in windows]
        self._starts = [window.start for window in windows]
        self._ends = np.cumsum([hi - lo for lo, hi in self._ranges], dtype=np.int64)
        self._shuffled: tuple[int, np.ndarray] | None = None

    @property
    def num_samples(self) -> int:
        """Samples of all windows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def slice(self, lo: int, hi: int) -> np.ndarray:
        """int64 anchor numbers at positions [lo, hi) of the order, cut at its end."""
        parts = []
        hi = min(hi, self.num_samples)
        while lo < hi:
            window = int(np.searchsorted(self._ends, lo, side="right"))
            stop = min(hi, int(self._ends[window]))
            first, last = self._ranges[window]
            before = int(self._ends[window]) - (last - first)
            parts.append(self._window_slice(window, lo - before, stop - before))
            lo = stop
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _window_slice(self, window: int, lo: int, hi: int) -> np.ndarray:
        first, last = self._ranges[window]
        if self._seed is None:
            return np.arange(first + lo, first + hi, dtype=np.int64)
        if self._shuffled is None or self._shuffled[0] != window:
            # Seeded by the window's start, not its place in the list: a window has one order in every run.
            mixed = mix(np.uint64(self._seed % 2**64)) ^ (self._starts[window] % 2**64)
            seed = np.uint64(mix(np.uint64(mixed)))
            self._shuffled = (window, permutation(last - first, seed))
        return first + self._shuffled[1][lo:hi].astype(np.int64)


@compiled
def mix(x):
    """One splitmix64 step: uint64 → well mixed uint64 (Steele, Lea and Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def permutation(count, seed):
    """A seeded permutation of 0 … count - 1 (u32, Fisher-Yates): written out so that no library version changes it."""
    order = np.arange(count).astype(np.uint32)
    for i in range(count - 1, 0, -1):
        j = np.int64(mix(seed + np.uint64(i) * _GOLDEN) % np.uint64(i + 1))
        order[i], order[j] = order[j], order[i]
    return order


def _defined(auc: float | None) -> float | None:
    return None if auc is None or np.isnan(auc) else auc


def _check_batches(batch_size: int, rank: int, world_size: int, start_sample: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size {batch_size} is too small: give at least 1")
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} is not one of the {world_size} ranks 0 … {world_size - 1}")
    if start_sample < 0:
        raise UserError(f"start_sample {start_sample} is negative: give the number of samples consumed so far")


def _ordered(build: Callable[[np.ndarray], Batch], chunks: Iterator[np.ndarray], num_workers: int) -> Iterator[Batch]:
    """``build`` of every chunk, in their order, by ``num_workers`` threads that run AHEAD batches ahead each."""
    if not num_workers:
        for chunk in chunks:
            yield build(chunk)
        return
    pool = concurrent.futures.ThreadPoolExecutor(num_workers, thread_name_prefix="batches")
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(build, chunk))
            if len(waiting) > AHEAD * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
