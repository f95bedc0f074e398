"""Running statistics and the baseline against slow counts over the events of strictly smaller time; no leak."""

import math

import numpy as np
import pytest

from generative_recommenders.data.baseline import online_baseline
from generative_recommenders.data.cache import cache_from_events
from generative_recommenders.data.online_stats import BUCKETS, COUNTS, LEANS, LOG_BUCKETS, MEANS, online_columns
from generative_recommenders.ranking import auc

GROUPS = [(), *[tuple(g for g in "abc" if (i + ord(g)) % 3 != i % 2) for i in range(12)]]


def random_cache(seed, count=150):
    rng = np.random.default_rng(seed)
    time = rng.integers(0, 60, count) * 7 + 1000
    bits = rng.choice([1, 4], count)
    item = np.concatenate([np.arange(12), rng.integers(0, 12, count - 12)])
    return cache_from_events(rng.integers(0, 5, count), item, time, bits, min_history=0)


def columns_of(cache):
    return online_columns(cache, cache.bits == 1, GROUPS)


def slow_statistics(user, item, time, label, number):
    """The statistics of event ``number`` from their definitions, each earlier event looked at anew."""
    earlier = [k for k in range(len(time)) if time[k] < time[number]]
    shrunk = lambda values, prior, k: (sum(values) + k * prior) / (len(values) + k)
    prior_at = lambda t: shrunk([label[k] for k in range(len(time)) if time[k] < t] or [0.5], 0, 0)
    mean = lambda ids, who, t: shrunk(
        [label[k] for k in range(len(time)) if time[k] < t and ids[k] == who], prior_at(t), 5
    )
    lean = lambda k: label[k] - mean(item, item[k], time[k])
    prior = prior_at(time[number])
    of_user = sorted([k for k in earlier if user[k] == user[number]], key=lambda k: time[k])
    of_item = [k for k in earlier if item[k] == item[number]]
    groups = GROUPS[item[number]]
    sharing = [[lean(k) for k in of_user if group in GROUPS[item[k]]] for group in groups]
    user_lean = shrunk([lean(k) for k in of_user], 0, 5)
    share = max(1, len(groups))
    group_lean = (sum(map(sum, sharing)) / share + 5 * user_lean) / (sum(map(len, sharing)) / share + 5)
    return {
        "user_mean": mean(user, user[number], time[number]),
        "item_mean": mean(item, item[number], time[number]),
        "user_recent": shrunk([label[k] for k in of_user[-10:]], prior, 2),
        "user_lean": user_lean,
        "user_lean_3": shrunk([lean(k) for k in of_user[-3:]], 0, 2),
        "user_lean_30": shrunk([lean(k) for k in of_user[-30:]], 0, 5),
        "item_lean": shrunk([label[k] - mean(user, user[k], time[k]) for k in of_item], 0, 5),
        "user_group_lean": group_lean - user_lean,
        "user_count": len(of_user),
        "item_count": len(of_item),
        "user_gap": time[number] - time[of_user[-1]] if of_user else 0,
    }


def bucket(name, value):
    """1-based bucket of a value, by the written edges; None within rounding of an edge."""
    if name in COUNTS:
        place, top = 2 * math.log2(value + 1), LOG_BUCKETS
    else:
        place, top = (value + (0.5 if name in LEANS else 0)) * BUCKETS, BUCKETS
    if name not in COUNTS and abs(place - round(place)) < 1e-9:
        return None
    return 1 + min(max(math.floor(place), 0), top - 1)


@pytest.mark.parametrize("seed", range(3))
def test_equals_slow_counts(seed):
    cache = random_cache(seed)
    user, item = cache.user_of(np.arange(cache.num_events)).tolist(), cache.item.tolist()
    time, label = cache.time.tolist(), (cache.bits == 1).astype(int).tolist()
    columns, rows = columns_of(cache)
    assert set(columns) == set(MEANS + LEANS + COUNTS) == set(rows)
    for number in range(0, cache.num_events, 3):
        for name, value in slow_statistics(user, item, time, label, number).items():
            expected = bucket(name, value)
            assert expected is None or columns[name][number] == expected, (name, number)
            assert 1 <= columns[name][number] < rows[name]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_at_or_after_an_event_moves_its_statistics(seed):
    cache = random_cache(seed)
    before, _ = columns_of(cache)
    cut = int(np.median(cache.time))
    bits = np.where(cache.time >= cut, 5 - cache.bits, cache.bits)
    after, _ = online_columns(cache, bits == 1, GROUPS)
    same = cache.time <= cut
    for name, column in before.items():
        assert (column[same] == after[name][same]).all(), name
    assert any((before[name][~same] != after[name][~same]).any() for name in before)


@pytest.mark.parametrize("seed", range(5))
def test_baseline_equals_its_formula(seed):
    rng = np.random.default_rng(seed)
    user, item, label, time = (rng.integers(0, n, 80).tolist() for n in (4, 6, 2, 30))
    scores = online_baseline(user, item, label, time)
    for k in range(80):
        earlier = [j for j in range(80) if time[j] < time[k]]
        mean = np.mean([label[j] for j in earlier]) if earlier else 0.5
        expected = 0.0
        for ids in (user, item):
            seen = [label[j] for j in earlier if ids[j] == ids[k]]
            expected += (sum(seen) + 5 * mean) / (len(seen) + 5) - mean
        assert scores[k] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs(seed):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 2, 60), rng.integers(0, 12, 60) / 4
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(labels, scores) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_auc_of_one_class_is_not_a_number():
    assert math.isnan(auc([1, 1], [0.1, 0.2])) and math.isnan(auc([], []))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_ranked(bad):
    with pytest.raises(ValueError, match="cannot be ranked"):
        auc(np.array([1, 0, 1]), np.array([0.2, bad, 0.1]))
