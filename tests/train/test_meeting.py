"""Ranks that were not started alike end at once, all of them, and rank 0 says why in one line."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from generative_recommenders.train import meeting

REPO = pathlib.Path(__file__).parents[2]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def as_two_ranks(folder, runs):
    """``runs``: for each run, (arguments, environment) of rank 0 and of rank 1, or ``None``. Outcomes likewise."""
    ports, waiting = free_ports(len(runs)), []
    for rank in (0, 1):
        mine = []
        for port, run in zip(ports, runs, strict=True):
            launcher = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            arguments, environment = run[rank] or ([], {})
            said = {"arguments": arguments, "environment": {**launcher, **environment}}
            mine.append(None if run[rank] is None else said)
        command = [sys.executable, str(pathlib.Path(__file__).with_name("two_mains.py")), json.dumps(mine)]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        waiting.append(subprocess.Popen(command, cwd=folder, env=environment, **pipes))
    try:
        done = [process.communicate(timeout=240) for process in waiting]
    finally:
        for process in waiting:
            process.kill()
    return list(zip(*(json.loads((out or err).splitlines()[-1]) for out, err in done), strict=True))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Runs of two ranks, each unlike in one thing: name → (rank 0, rank 1). In one pair of processes: they are slow."""
    import runpy

    folder = tmp_path_factory.mktemp("meeting")
    tiny = runpy.run_path(str(pathlib.Path(__file__).with_name("launch_tiny.py")))
    (folder / "small.gin").write_text(tiny["small_gin"]())
    runs, short = {}, {"HSTU_JOIN_SECONDS": "2"}

    def unlike(name, *bindings, more=(), environment=None, both=()):
        base = ["--config", "small.gin", "--run-name", name.replace(" ", "-")]
        first = [*base, *both]
        second = [*first, *(word for binding in bindings for word in ("--bind", binding)), *more]
        runs[name] = (first, {}), (second, environment or {})

    unlike("learning rate", "optimizer.dense_lr=0.01")
    unlike("seed", "train.seed=2")
    unlike("batch size", "train.batch_size=8")
    unlike("data option", "tiny.history_length=4")
    unlike("resume", more=["--resume"])
    unlike("variable", environment={"HSTU_LMSD_BACKEND": "PYTORCH"})
    unlike("option by variable", environment={"TRITON_HSTU_TARGETS_ONLY_EVAL": "0"})
    unlike("world size", environment={"WORLD_SIZE": "3"})
    unlike("bad option", "train.sed=1")
    unlike("bad command", more=["--no-such-thing"])
    unlike("bad variable", environment={"HSTU_BACKEND": "NONE"})
    unlike("both bad", both=["--bind", "train.sed=1"])
    unlike("both bad commands", both=["--no-such-thing"])
    unlike("rank 0 is bad", both=["--no-such-thing"])
    runs["rank 0 is bad"] = runs["rank 0 is bad"][0], (["--config", "small.gin"], {})
    alone = ["--config", "small.gin", "--run-name", "alone"]
    runs["rank 1 never comes"] = (alone, short), None
    runs["rank 0 never comes"] = None, (alone, short)
    found = dict(zip(runs, as_two_ranks(folder, list(runs.values())), strict=True))
    return found, {path.parent.name for path in (folder / "runs").glob("*/config.gin")}


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("learning rate", "optimizer.dense_lr = 0.001 on rank 0, 0.01 on rank 1"),
        ("seed", "train.seed = 1 on rank 0, 2 on rank 1"),
        ("batch size", "train.batch_size = 16 on rank 0, 8 on rank 1"),
        ("data option", "tiny.history_length = 8 on rank 0, 4 on rank 1"),
        ("resume", "--resume = 'no' on rank 0, 'yes' on rank 1"),
        ("variable", "environment variable HSTU_LMSD_BACKEND = None on rank 0, 'PYTORCH' on rank 1"),
        ("option by variable", "model.targets_only_eval = True on rank 0, False on rank 1"),
        ("world size", "WORLD_SIZE = 2 on rank 0, 3 on rank 1"),
        ("bad option", "rank 1: --bind 'train.sed=1': unknown option train.sed"),
        ("bad command", "rank 1: unrecognized arguments: --no-such-thing; see --help"),
        ("bad variable", "rank 1: environment variable HSTU_BACKEND='NONE': expected one of"),
        ("both bad", "error: --bind 'train.sed=1': unknown option train.sed"),
        ("both bad commands", "error: unrecognized arguments: --no-such-thing; see --help"),
        ("rank 0 is bad", "rank 0: unrecognized arguments: --no-such-thing"),
    ],
)
def test_ranks_that_differ_all_end_at_once_and_rank_0_says_why(outcomes, name, wanted):
    first, second = outcomes[0][name]
    assert (first["status"], second["status"]) == (2, 2)
    assert wanted in first["error"] and first["error"].count("\n") == 1
    assert second["error"] == ""
    assert max(first["seconds"], second["seconds"]) < 60


def test_nothing_was_begun(outcomes):
    assert outcomes[1] == set()


def test_a_rank_that_never_comes_is_waited_for_a_stated_time(outcomes):
    first, _ = outcomes[0]["rank 1 never comes"]
    assert first["status"] == 2 and first["seconds"] < 60
    assert "rank 1 of 2 did not come within 2 s (HSTU_JOIN_SECONDS)" in first["error"]
    _, second = outcomes[0]["rank 0 never comes"]
    assert second["status"] == 2 and second["seconds"] < 60
    assert "rank 1 of 2: did not meet rank 0 at 127.0.0.1:" in second["error"] and second["error"].count("\n") == 1


def test_what_an_earlier_attempt_left_in_the_store_is_no_news():
    """An elastic launcher starts the processes again and keeps the store, with the last attempt's verdict in it."""
    store = dist.HashStore()

    def attempt(seed, rank_1_first):
        own = [{"size": 2, "problem": None, "said": {"seed": seed[rank]}, "nonce": f"{rank}{seed}"} for rank in (0, 1)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            follow = lambda: pool.submit(meeting._follow, store, 1, own[1], 30.0)
            lead = lambda: pool.submit(meeting._lead, store, own[0], 30.0)
            first = (follow if rank_1_first else lead)()
            time.sleep(0.3)
            second = (lead if rank_1_first else follow)()
            outcomes = {first.result(timeout=30), second.result(timeout=30)}
        (outcome,) = outcomes  # both ranks have the same
        return outcome

    tokens = []
    for seed, rank_1_first, begins in [
        ("11", False, True),
        ("12", True, False),
        ("22", True, True),
        ("11", False, True),
    ]:
        token, verdict = attempt(seed, rank_1_first)
        tokens.append(token)
        assert (verdict is None) == begins
    assert len(set(tokens)) == 4  # so that no group finds another's addresses
