"""Columns of any name that preparation admits train, are saved and resumed; the others are refused by one rule."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from generative_recommenders.data.events import events
from generative_recommenders.data.events.files import EventColumns, events_source
from generative_recommenders.data.prepare import prepare
from generative_recommenders.train.__main__ import main

ATTRIBUTES = ["type", "geo.country", "keys", "a.b.c", "weight", "%2E", " lead", "Ärger ☕", "forward", "rate%"]
CONTEXT = [
    "items", "values", "pop", "training", "geo.city", "module", "embeddings", "state_dict", "class", "user", "item",
    "hour", "with space", "trailing ", "semi;colon", 'quo"te', "it's", "a[1]", "*", "%74ype", "momentum_1", "x" * 200,
    "_modules", "__class__", "0", ".", "..", "a@b", "index", "naïve.feature", "{x}",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    count = 240
    columns = {"who": [n % 12 for n in range(count)], "what": [n % 7 for n in range(count)]}
    columns |= {"when": [3600 * n for n in range(count)], "bought": [n * n % 3 % 2 for n in range(count)]}
    columns |= {name: [f"v{(n + k) % 3}" for n in range(count)] for k, name in enumerate(CONTEXT)}
    pq.write_table(pa.table(columns), folder / "log.parquet")
    items = {"what": list(range(7))} | {name: [n % 3 for n in range(7)] for name in ATTRIBUTES}
    pq.write_table(pa.table(items), folder / "items.parquet")
    roles = EventColumns(user="who", item="what", time="when", label="bought")
    source = events_source(
        folder / "log.parquet", roles, items=folder / "items.parquet", attributes=ATTRIBUTES, context=CONTEXT
    )
    prepare(source, folder / "cache", min_history=2)
    return folder / "cache"


def test_nasty_names_train_and_resume(cache, small_config, tmp_path, capfd):
    tables = {"geo.country": "table_wise", "type": "row_wise"}
    config = small_config(
        {
            "data.dataset": "'events'",
            "events.cache": repr(str(cache)),
            "events.history_length": "8",
            "checkpoint.every_steps": "2",
            "train.max_steps": "4",
            "train.log_every": "1",
            "sharding.tables": repr(tables),
        }
    )
    run = lambda name, *more: main(["--config", config, "--runs-dir", str(tmp_path), "--run-name", name, *more])
    assert run("straight") == 0, capfd.readouterr().err
    assert run("halves", "--bind", "train.max_steps=2") == 0
    assert run("halves", "--resume") == 0, capfd.readouterr().err
    straight, halves = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("straight", "halves"))
    assert straight["auc"] == halves["auc"] is not None
    assert run("loaded", "--bind", "train.mode=eval", "--bind", f"checkpoint.load={tmp_path / 'straight'}") == 0
    assert json.loads((tmp_path / "loaded" / "result.json").read_text())["auc"] == straight["auc"]


def test_features_of_a_batch_have_their_own_names(cache):
    data = events(str(cache))
    batch = next(data.batches(data.windows, 4))
    assert set(CONTEXT) | set(ATTRIBUTES) <= set(batch.uih.keys())
