"""``~`` in every path that a command or an option takes, as a shell that is not asked leaves it there."""

import json
import pathlib

import polars as pl
import pytest

from generative_recommenders.data.events import events
from generative_recommenders.data.events.__main__ import main as events_main
from generative_recommenders.data.movielens import movielens_100k, movielens_small
from generative_recommenders.data.synthetic import synthetic_yambda
from generative_recommenders.data.synthetic.__main__ import main as synthetic_main
from generative_recommenders.data.yambda import yambda
from generative_recommenders.data.yambda.__main__ import main as yambda_main
from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path
from generative_recommenders.train.__main__ import main as train_main
from tests.train.launch_tiny import small_gin


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield tmp_path / "home"
    assert not list((tmp_path / "elsewhere").iterdir())  # no folder that is called ~


def test_own_events_and_training_on_them(home, capfd):
    rows = {"user": [n % 9 for n in range(200)], "item": [n % 5 for n in range(200)], "time": range(200)}
    pl.DataFrame(rows | {"label": [n % 3 % 2 for n in range(200)]}).write_csv(home / "log.csv")
    pl.DataFrame({"item": range(5), "genre": range(5)}).write_csv(home / "items.csv")
    command = ["prepare", "--events", "~/log.csv", "--items", "~/items.csv", "--attributes", "genre"]
    assert events_main([*command, "--columns", "label=label", "--min-history", "1", "--cache", "~/cache"]) == 0
    assert events_main(["verify", "--cache", "~/cache"]) == events_main(["info", "--cache", "~/cache"]) == 0
    assert events("~/cache").cache.num_events == 200
    small = {
        "data.dataset": "'events'",
        "events.cache": "'~/cache'",
        "train.max_steps": "1",
        "checkpoint.at_end": "True",
    }
    (home / "run.gin").write_text(small_gin(**small))
    run = ["--config", "~/run.gin", "--runs-dir", "~/runs", "--run-name"]
    assert train_main([*run, "x"]) == 0, capfd.readouterr().err
    load = ["--bind", "train.mode=eval", "--bind", "checkpoint.load=~/runs/x"]
    assert train_main([*run, "y", *load]) == 0, capfd.readouterr().err
    assert json.loads((home / "runs" / "y" / "result.json").read_text())["status"] == "ok"
    assert train_main(["--config", "~/run.gin", "--runs-dir", "~/more"]) == 0
    assert len(list((home / "more").iterdir())) == 1


def test_generated_and_public_data(home, capfd):
    assert synthetic_main(["--path", "~/y", "--events", "20000"]) == 0
    assert yambda_main(["prepare", "--path", "~/y", "--size", "50m", "--min-history", "5"]) == 0
    assert yambda_main(["verify", "--path", "~/y", "--size", "50m"]) == 0
    assert yambda_main(["prepare", "--path", "~/y", "--size", "50m", "--min-history", "5", "--cache", "~/own"]) == 0
    for options in ({}, {"cache": "~/own"}):
        assert yambda("~/y", min_history=5, train_days=9, **options).cache.path.is_relative_to(home)
    assert synthetic_yambda("~/s", users=40, items=30, days=4).cache.path.is_relative_to(home)
    for open_it in (movielens_100k, movielens_small):
        with pytest.raises(UserError, match=f"{home}/nowhere does not exist"):
            open_it("~/nowhere")


def test_a_home_that_is_not_there_is_one_line(capsys):
    assert user_path("a~b") == pathlib.Path("a~b")
    assert events_main(["info", "--cache", "~nobody-of-that-name/cache"]) == 2
    assert "~nobody-of-that-name/cache: there is no such home folder" in capsys.readouterr().err
