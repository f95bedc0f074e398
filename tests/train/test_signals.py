"""Stopping while a rank is frozen: the others end by themselves, in a stated time, and say so."""

import json
import signal
import time

import pytest

from generative_recommenders.train import signals

LONG = {"train.epochs": "100000", "train.log_every": "1", "train.mode": "'train'", "checkpoint.at_end": "True"}
SLACK = 30.0  # for a machine that has other things to do


@pytest.fixture
def training(ranks_by_hand, small_config, tmp_path):
    """Two ranks in the middle of a long run."""

    def start(**environment):
        ranks = ranks_by_hand(["--config", small_config(LONG), "--run-name", "x"], [environment, environment])
        metrics, patience = tmp_path / "runs/x/metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert time.monotonic() < patience and not any(rank.poll() for rank in ranks)
            time.sleep(0.2)
        return ranks

    return start


def freeze(process):
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)  # the other one is in the exchange now


def test_a_second_signal_ends_a_rank_whose_peer_is_frozen(training, tmp_path):
    alive, frozen = training(HSTU_STOP_SECONDS="3600")
    freeze(frozen)
    alive.send_signal(signal.SIGTERM)
    alive.send_signal(signal.SIGINT)  # an echo: it changes nothing
    time.sleep(signals.ECHO_SECONDS + 0.5)
    assert alive.poll() is None
    alive.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, error = alive.communicate(timeout=signals.LAST_SECONDS + SLACK)
    assert alive.returncode == 1
    assert time.monotonic() - began > signals.LAST_SECONDS - signals.WORDS_SECONDS - 1  # it had its time
    result = json.loads((tmp_path / "runs/x/result.json").read_text())
    assert result["status"] == "failed" and result["samples"] > 0
    assert result["reason"].startswith("stopped by a second signal, SIGTERM") and "frozen" in result["reason"]
    assert error == f"error: rank 0: {result['reason']}\n"


def test_a_first_signal_is_bounded_too_and_other_ranks_speak_for_themselves(training, tmp_path):
    frozen, alive = training(HSTU_STOP_SECONDS="3")
    freeze(frozen)
    alive.send_signal(signal.SIGTERM)
    _, error = alive.communicate(timeout=3 + SLACK)
    assert alive.returncode == 1
    assert error.startswith("error: rank 1: stopped by SIGTERM, and not at an end within 3 s (HSTU_STOP_SECONDS)")
    assert error.count("\n") == 1
    result = json.loads((tmp_path / "runs/x/result.json").read_text())
    assert result["reason"] == "the run did not finish"  # rank 0's to write


@pytest.fixture
def watchdog(monkeypatch):
    """A watchdog that only notes when it would end the process: (watchdog, [seconds since the start])."""
    ends, began = [], time.monotonic()
    monkeypatch.setenv("HSTU_STOP_SECONDS", "1")
    monkeypatch.setattr(signals.Watchdog, "_end", lambda self: ends.append(time.monotonic() - began))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    dog = signals.Watchdog(print)
    yield dog, ends
    dog.close()
    signal.signal(signal.SIGTERM, before)


def test_a_checkpoint_that_is_being_written_may_take_longer_than_a_stop(watchdog):
    dog, ends = watchdog
    with dog.patient():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert not ends
    time.sleep(0.2)
    assert not ends  # the time starts anew
    time.sleep(1.5)
    assert len(ends) == 1


def test_a_stop_that_is_on_its_way_gets_its_time_anew(watchdog):
    dog, ends = watchdog
    signal.raise_signal(signal.SIGTERM)
    for _ in range(6):
        time.sleep(0.25)
        dog.relent()
    assert not ends


def test_a_second_signal_counts_in_the_middle_of_a_checkpoint_too(watchdog, monkeypatch):
    dog, ends = watchdog
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.2)
    monkeypatch.setattr(signals, "LAST_SECONDS", signals.WORDS_SECONDS + 0.3)
    with dog.patient():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.4)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert len(ends) == 1


def test_nothing_is_left_of_a_watch(watchdog):
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with signals.StopSignals(print):
        pass
    assert signal.set_wakeup_fd(before) == before
