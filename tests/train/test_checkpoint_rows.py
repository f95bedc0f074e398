"""Rows carried over by raw id: every known id keeps its numbers, whatever row it has, on any number of ranks.

The oracle reads both checkpoints with torch's own converter and joins them by raw id in plain Python.
"""

import json
import pathlib
import runpy

import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from generative_recommenders.modules.table_init import fill_table_rows_
from generative_recommenders.train import randomness

here = pathlib.Path(__file__)
script = here.with_name("load_and_save.py")
helper = runpy.run_path(str(script))


@pytest.fixture
def config(small_config):
    return small_config({"model.embedding_dim": "256", "train.seed": "3"})


def read(folder, scratch):
    """Raw id → (weight, sums) of each row of the item table, and rows 0 and beyond the ids by their number."""
    (path,) = folder.iterdir()
    dcp_to_torch_save(path, scratch)
    tensors = torch.load(scratch, weights_only=True)
    weight = tensors["model.embedding_collection.embeddings.item_id.weight"]
    (sums,) = (t for name, t in tensors.items() if name.startswith("sparse") and ".item_id." in name)
    sums = sums.view(-1, len(weight)).T
    ids = pq.read_table(path / "vocabularies/item_id.parquet")["id"].to_pylist()
    names = ["unknown", *ids, *(f"spare {row}" for row in range(len(ids) + 1, len(weight)))]
    assert len(names) == len(weight) == len(sums)
    return {name: (weight[row], sums[row], row) for row, name in enumerate(names)}, tensors


def check(before, after, carried_sums):
    """The tables of two checkpoints agree as they should; ids 0 … 15 there, 5 … 20 here."""
    old, _ = before
    new, tensors = after
    initial = torch.empty(len(new), 256)
    fill_table_rows_(initial, randomness.stream_seed(3, "weights"), "item_id", len(new))
    for name, (weight, sums, row) in new.items():
        if name in old and not str(name).startswith("spare"):
            assert torch.equal(weight, old[name][0]), name
            assert torch.equal(sums, old[name][1] if carried_sums else torch.zeros_like(sums)), name
        else:
            assert torch.equal(weight, initial[row]) and not sums.any(), name
    known = [name for name in new if isinstance(name, int)]
    assert sorted(known) == list(range(5, 21))


DAY_2 = ["tiny.shift=5", "checkpoint.match_ids=True"]
LAYOUTS = {
    name: f'sharding.tables={{"item_id": "{name}", "uid": "row_wise"}}'
    for name in ("row_wise", "table_wise", "column_wise")
}


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_ids_keep_their_rows_and_sums(config, world, tmp_path, layout, rows):
    run, bind = helper["load_and_save"], [LAYOUTS[layout]]
    run(tmp_path / "one", config, bind, world, touch=True)
    bind += [*DAY_2, f"tiny.item_rows={rows}", f"checkpoint.load={tmp_path / 'one'}", "checkpoint.load_optimizer=True"]
    said = run(tmp_path / "two", config, bind, world)
    before, after = (read(tmp_path / name, tmp_path / "all.pt") for name in ("one", "two"))
    check(before, after, carried_sums=True)
    assert "table item_id: rows carried over by id: 11 ids known, 5 new, 5 gone" in said.notes
    for name, tensor in before[1].items():  # Adam's moments, other tables and their sums: as they were
        if ".item_id." not in name:
            assert torch.equal(tensor, after[1][name]), name


def test_sums_begin_anew_unless_asked_for(config, world, tmp_path):
    run, bind = helper["load_and_save"], [LAYOUTS["row_wise"]]
    run(tmp_path / "one", config, bind, world, touch=True)
    run(tmp_path / "two", config, [*bind, *DAY_2, f"checkpoint.load={tmp_path / 'one'}"], world)
    after = read(tmp_path / "two", tmp_path / "all.pt")
    check(read(tmp_path / "one", tmp_path / "all.pt"), after, carried_sums=False)
    moments = [tensor for name, tensor in after[1].items() if name.startswith("dense_optimizer")]
    assert moments and not any(tensor.any() for tensor in moments)


def test_weights_carried_by_row_load_into_another_layout(config, world, tmp_path):
    run = helper["load_and_save"]
    run(tmp_path / "one", config, [LAYOUTS["column_wise"]], world, touch=True)
    bind = [LAYOUTS["row_wise"], *DAY_2, f"checkpoint.load={tmp_path / 'one'}"]
    run(tmp_path / "two", config, bind, world)
    old, new = (read(tmp_path / name, tmp_path / "all.pt")[0] for name in ("one", "two"))
    assert all(torch.equal(old[name][0], new[name][0]) for name in range(5, 16))


@pytest.mark.parametrize(
    "ranks", [(0, 2), pytest.param((2, 0), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)]
)
def test_ranks_before_and_after_make_no_difference(trainer_process, config, tmp_path, ranks):
    there_and_back(trainer_process, config, tmp_path, ranks)


@pytest.mark.gpu
def test_rows_are_carried_over_on_a_gpu(trainer_process, config, tmp_path):
    there_and_back(trainer_process, config, tmp_path, (0, 0), "--device", "cuda")


def there_and_back(trainer_process, config, tmp_path, ranks, *more):
    """Save on some ranks, load on others in processes of their own, and compare."""
    layout = 'sharding.tables={"item_id": "row_wise", "uid": "table_wise"}'
    arguments = ["--config", config, "--bind", layout, *more]
    trainer_process("one", *arguments, "--touch", script=script, ranks=ranks[0], check=0)
    for binding in (*DAY_2, "checkpoint.load=one", "checkpoint.load_optimizer=True"):
        arguments += ["--bind", binding]
    trainer_process("two", *arguments, script=script, ranks=ranks[1], check=0)
    for name, size in zip(("one", "two"), ranks, strict=True):
        (path,) = (tmp_path / name).iterdir()
        assert json.loads((path / "meta.json").read_text())["world_size"] == max(size, 1)
    check(*(read(tmp_path / name, tmp_path / "all.pt") for name in ("one", "two")), carried_sums=True)
