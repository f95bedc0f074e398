"""Training day after day on own events: yesterday's weights on today's data, whose ids have other numbers."""

import csv
import json
import pathlib
import random
import runpy

import pytest

from generative_recommenders.data.events.__main__ import main as events
from generative_recommenders.train.__main__ import main

tiny_module = runpy.run_path(str(pathlib.Path(__file__).with_name("launch_tiny.py")))
ITEMS = [f"b{number:03}" for number in range(40)]


def day_1():
    """Rows of 60 users: items of an even number are liked by nine in ten."""
    draw = random.Random(0)
    rows = []
    for user in range(60):
        for step in range(40):
            item = draw.randrange(40)
            rows.append(
                [
                    user,
                    ITEMS[item],
                    1_700_000_000 + 9_000 * step + 7 * user,
                    int((item % 2 == 0) != (draw.random() < 0.1)),
                ]
            )
    return rows


def prepare(folder, name, rows, *more):
    path = folder / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["user", "item", "time", "label"], *rows])
    arguments = ["prepare", "--events", str(path), "--cache", str(folder / name), "--columns", "label=label"]
    assert events([*arguments, *more]) == 0


def bindings(cache):
    small = {**tiny_module["SMALL"], "data.dataset": "'events'", "events.cache": f"'{cache}'"}
    small |= {"train.epochs": "3", "optimizer.sparse_lr": "0.1", "optimizer.dense_lr": "0.01"}
    small |= {"events.history_length": "8", "train.batch_size": "64"}
    return [f"{name}={value}" for name, value in small.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of day 1 with a checkpoint, in tables larger than the vocabularies ("roomy") and as large ("tight")."""
    folder = tmp_path_factory.mktemp("days")
    prepare(folder, "day1", day_1())
    for name, more in (("roomy", [ROOMY]), ("tight", [])):
        status, result = run(folder, name, folder / "day1", *more, "checkpoint.at_end=True")
        assert status == 0 and result["auc"]["listen_plus"] > 0.8
    return folder


ROOMY = 'events.table_rows={"item_id": 100, "uid": 200}'


def run(folder, name, cache, *more):
    path = folder / "empty.gin"
    path.write_text("")
    arguments = ["--config", str(path), "--runs-dir", str(folder / "runs"), "--run-name", name]
    for binding in [*bindings(cache), *more]:
        arguments += ["--bind", binding]
    status = main(arguments)
    return status, json.loads((folder / "runs" / name / "result.json").read_text())


def auc(folder, name):
    return json.loads((folder / "runs" / name / "result.json").read_text())["auc"]["listen_plus"]


def test_a_new_item_in_front_of_all(trained, capfd):
    """One event without an outcome, the newest of its user: the samples and their histories are those of day 1."""
    prepare(trained, "day2", [*day_1(), [3, "a-new", 1_800_000_000, ""]])
    evaluate = (ROOMY, "train.mode=eval", f"checkpoint.load={trained / 'runs/roomy'}")
    capfd.readouterr()
    status, _ = run(trained, "refused", trained / "day2", *evaluate)
    error = capfd.readouterr().err
    assert status == 2 and error.count("\n") == 1
    for said in ("table item_id", "row 1 is 'b000' there and 'a-new' here", "40 ids known, 1 new, 0 gone"):
        assert said in error
    status, result = run(trained, "matched", trained / "day2", *evaluate, "checkpoint.match_ids=True")
    assert status == 0
    assert result["auc"]["listen_plus"] == pytest.approx(auc(trained, "roomy"), abs=1e-6)


def test_one_item_retires_and_one_appears(trained, capfd):
    """The tables keep their sizes, so nothing but the ids themselves can tell."""
    rows = [[user, "a-new" if item == "b039" else item, time, label] for user, item, time, label in day_1()]
    prepare(trained, "changed", rows)
    evaluate = ("train.mode=eval", f"checkpoint.load={trained / 'runs/tight'}")
    capfd.readouterr()
    status, _ = run(trained, "refused2", trained / "changed", *evaluate)
    error = capfd.readouterr().err
    assert status == 2 and "39 ids known, 1 new, 1 gone" in error
    status, result = run(trained, "matched2", trained / "changed", *evaluate, "checkpoint.match_ids=True")
    assert status == 0
    assert result["auc"]["listen_plus"] == pytest.approx(auc(trained, "tight"), abs=0.03)


def test_training_goes_on_in_a_grown_vocabulary(trained, capfd):
    later = [[user, item, time + 3_000_000, label] for user, item, time, label in day_1() if user < 20]
    later += [[60, "a-new", 1_703_000_000 + 60 * step, step % 2] for step in range(20)]
    prepare(trained, "grown", [*day_1(), *later])
    load = [f"checkpoint.load={trained / 'runs/tight'}", "checkpoint.match_ids=True", "checkpoint.load_optimizer=True"]
    capfd.readouterr()
    status, result = run(trained, "on", trained / "grown", *load, "train.epochs=1", "checkpoint.at_end=True")
    assert status == 0 and result["auc"]["listen_plus"] > 0.8
    said = " ".join(capfd.readouterr().out.split())
    assert "table item_id: rows carried over by id: 40 ids known, 1 new, 0 gone" in said
    assert "table uid: rows carried over by id: 60 ids known, 1 new, 0 gone" in said
    (written,) = (trained / "runs/on/checkpoints").iterdir()
    assert json.loads((written / "meta.json").read_text())["data"]["tables"]["item_id"]["rows"] == 42


def test_the_same_events_again_are_resumed_and_others_are_not(trained, capfd):
    """By content: a cache prepared anew in the same place is the same data or it is not, whatever its path."""
    prepare(trained, "kept", day_1())
    assert run(trained, "x", trained / "kept", "train.epochs=1", "checkpoint.at_end=True")[0] == 0
    resume = lambda cache: main(
        ["--config", str(trained / "empty.gin"), "--runs-dir", str(trained / "runs"), "--run-name", "x", "--resume"]
        + [part for binding in [*bindings(cache), "train.epochs=2"] for part in ("--bind", binding)]
    )
    prepare(trained, "kept", day_1()[:-300], "--overwrite")
    capfd.readouterr()
    assert resume(trained / "kept") == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "the data changed" in error and "checkpoint.match_ids=True" in error
    prepare(trained, "moved", day_1())
    assert resume(trained / "moved") == 0


CROSSED = 'events.contextual_features=["uid", "user_x_item"]'


def test_crosses_go_on_in_an_extended_cache_alone(trained, capfd):
    """New ids in front of all that is known: extended, every known id and pair of ids scores as it did."""
    status, _ = run(trained, "crossed", trained / "day1", CROSSED, "checkpoint.at_end=True")
    assert status == 0
    rows = [*day_1(), [3, "a-new", 1_800_000_000, ""], [61, "a-new", 1_800_000_000, ""]]
    prepare(trained, "anew", rows)
    prepare(trained, "extended", rows, "--extend", str(trained / "day1"))
    load = (CROSSED, "train.mode=eval", f"checkpoint.load={trained / 'runs/crossed'}", "checkpoint.match_ids=True")
    capfd.readouterr()
    status, _ = run(trained, "refused4", trained / "anew", *load)
    error = capfd.readouterr().err
    assert status == 2 and "user_x_item" in error and "--extend" in error
    status, result = run(trained, "carried", trained / "extended", *load)
    assert status == 0
    assert result["auc"]["listen_plus"] == pytest.approx(auc(trained, "crossed"), abs=1e-6)
