"""A checkpoint knows which ids its rows stand for: other ids are refused or matched, never guessed."""

import functools
import json
import pathlib
import runpy
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from generative_recommenders.data.identity import CrossedIds, DataIdentity, UnknownIds, Vocabulary
from generative_recommenders.errors import UserError
from generative_recommenders.train import checkpoint_ids, datasets
from generative_recommenders.train.__main__ import main

tiny_module = runpy.run_path(str(pathlib.Path(__file__).with_name("launch_tiny.py")))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of three steps, "x", with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "small.gin"
    path.write_text(tiny_module["small_gin"](**{"checkpoint.every_steps": "1", "train.max_steps": "3"}))
    assert main(["--config", str(path), "--runs-dir", str(folder / "runs"), "--run-name", "x"]) == 0
    return folder


@pytest.fixture
def train(saved, tmp_path, capfd):
    """``train(name, *bindings, resume=…)`` → status and output, beside a copy of the saved run."""
    shutil.copytree(saved / "runs", tmp_path / "runs")

    def run(name, *bindings, resume=False):
        arguments = ["--config", str(saved / "small.gin"), "--runs-dir", str(tmp_path / "runs"), "--run-name", name]
        for binding in bindings:
            arguments += ["--bind", binding]
        capfd.readouterr()
        return main([*arguments, *["--resume"] * resume]), capfd.readouterr()

    run.load = f"checkpoint.load={tmp_path / 'runs/x'}"
    run.newest = tmp_path / "runs/x/checkpoints/step_00000003"
    return run


def other_data(monkeypatch, **options):
    """From now on the data set has other content, under the same options."""
    real = tiny_module["tiny"]

    @functools.wraps(real)
    def make(**given):
        return real(**given | options)

    monkeypatch.setitem(datasets.FACTORIES, "tiny", make)


@pytest.mark.parametrize("mode", ["eval", "train-eval"])
def test_loading_onto_other_ids_is_refused_and_says_which(train, mode):
    status, output = train("y", train.load, "tiny.shift=5", f"train.mode={mode}")
    assert status == 2 and output.err.count("\n") == 1
    stored = json.loads((train.newest / "meta.json").read_text())["data"]["tables"]["item_id"]
    for said in (
        "table item_id",
        f"{stored['fingerprint'][:12]} of 17 rows there",
        "row 1 is 0 there and 5 here",
        "11 ids known, 5 new, 5 gone",
        "checkpoint.match_ids=True",
        "data that the checkpoint was trained on",
    ):
        assert said in output.err


def test_matching_ids_says_what_came_of_every_table(train):
    status, output = train("y", train.load, "tiny.shift=5", "checkpoint.match_ids=True")
    assert status == 0
    assert "table item_id: rows carried over by id: 11 ids known, 5 new, 5 gone" in " ".join(output.out.split())
    assert "table uid" not in output.out


def test_a_table_of_another_size_for_the_same_ids(train):
    status, output = train("y", train.load, "tiny.item_rows=30")
    assert status == 2 and "17 rows there and 30 here" in output.err and "checkpoint.match_ids=True" in output.err
    status, output = train("z", train.load, "tiny.item_rows=30", "checkpoint.match_ids=True")
    assert status == 0 and "16 ids carried over, from 17 rows into 30" in " ".join(output.out.split())


def test_no_id_in_common_is_warned_of(train):
    status, output = train("y", train.load, "tiny.shift=100", "checkpoint.match_ids=True")
    assert status == 0 and "no id is known" in " ".join(output.out.split())


@pytest.mark.parametrize("option", ["match_ids", "load_optimizer", "partial"])
def test_options_of_loading_need_a_checkpoint_to_load(train, option):
    status, output = train("y", f"checkpoint.{option}=True")
    assert status == 2 and f"checkpoint.{option} = True: needs checkpoint.load" in output.err


def test_changed_data_is_not_resumed(train, tmp_path, monkeypatch):
    before = (tmp_path / "runs/x/result.json").read_text()
    other_data(monkeypatch, seed=1)
    status, output = train("x", "train.max_steps=4", resume=True)
    assert status == 2 and output.err.count("\n") == 1
    for said in ("the data changed", "step_00000003", "checkpoint.load", "checkpoint.match_ids=True"):
        assert said in output.err
    status, output = train("x", "train.mode=eval", resume=True)
    assert status == 2 and "the data changed" in output.err
    assert (tmp_path / "runs/x/result.json").read_text() == before
    assert train("y", train.load, "train.mode=eval")[0] == 0  # the same ids: that is the way


def test_data_that_moved_is_resumed(train):
    status, output = train("x", "tiny.path='elsewhere'", "train.max_steps=4", resume=True)
    assert status == 0 and "(step 3)" in output.out


def test_the_same_ids_and_other_samples_are_loaded(train, monkeypatch):
    other_data(monkeypatch, seed=1)
    status, output = train("y", train.load)
    assert status == 0 and "warning" not in output.out


@pytest.fixture
def old_format(train):
    """The checkpoint as it was written before ids were kept."""
    shutil.rmtree(train.newest / "vocabularies")
    file = train.newest / "meta.json"
    meta = json.loads(file.read_text())
    meta["format"] = 1
    del meta["data"]
    for name in ("match_ids", "load_optimizer", "partial"):
        del meta["config"][f"checkpoint.{name}"]
    del meta["config"]["model.recompute_y"]  # an option that did not exist yet
    file.write_text(json.dumps(meta))


def test_a_checkpoint_from_before_loads_and_resumes_with_a_warning(train, old_format):
    status, output = train("y", train.load, "tiny.shift=5")
    assert (
        status == 0 and "warning: " in output.out and "before checkpoints kept the ids" in " ".join(output.out.split())
    )
    status, output = train("z", train.load, "checkpoint.match_ids=True")
    assert status == 2 and "before checkpoints kept the ids" in output.err and "--resume" in output.err
    status, output = train("x", "tiny.path='elsewhere'", "train.max_steps=4", resume=True)
    assert status == 2 and "tiny.path" in output.err  # nothing else is known of its data
    status, output = train("x", "model.recompute_y=False", "train.max_steps=4", resume=True)
    assert status == 2 and "model.recompute_y = True, this run has False" in output.err
    status, output = train("x", "train.max_steps=4", resume=True)
    assert status == 0 and "before checkpoints kept the ids" in " ".join(output.out.split())
    meta = json.loads((train.newest.with_name("step_00000004") / "meta.json").read_text())
    assert meta["format"] == 2 and meta["data"]["tables"]["item_id"]["rows"] == 17


def test_the_ids_are_in_every_checkpoint_and_once_on_the_disk(train):
    assert train("x", "train.max_steps=4", resume=True)[0] == 0
    files = [train.newest.with_name(f"step_0000000{step}") / "vocabularies/item_id.parquet" for step in (3, 4)]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    shutil.rmtree(files[0].parent.parent)
    assert pq.read_table(files[1])["id"].to_pylist() == list(range(16))


def test_a_disk_without_hard_links_gets_copies(train, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoint_ids.os, "link", refuse)
    assert train("x", "train.max_steps=4", resume=True)[0] == 0
    file = train.newest.with_name("step_00000004") / "vocabularies/item_id.parquet"
    assert pq.read_table(file)["id"].to_pylist() == list(range(16)) and file.stat().st_nlink == 1


@pytest.mark.parametrize("how", ["gone", "cut off", "shorter", "others"])
def test_damaged_ids_stop_a_load_that_needs_them_only(train, how):
    file = train.newest / "vocabularies/item_id.parquet"
    if how in ("shorter", "others"):
        ids = pq.read_table(file)["id"]
        file.unlink()
        pq.write_table(pa.table({"id": ids[:-1] if how == "shorter" else pa.array(ids.to_pylist()[::-1])}), file)
    else:
        text = file.read_bytes()
        file.unlink()
        if how == "cut off":
            file.write_bytes(text[:-20])
    status, output = train("y", train.load, "tiny.shift=5", "checkpoint.match_ids=True")
    assert status == 2 and output.err.count("\n") == 1
    assert "item_id.parquet" in output.err and "missing or damaged" in output.err
    assert train("z", train.load)[0] == 0


def test_a_failed_save_leaves_the_checkpoint_before(train, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_ids, "save", full)
    status, output = train("x", "train.max_steps=4", resume=True)
    assert status == 1
    assert sorted(path.name for path in train.newest.parent.iterdir()) == ["step_00000002", "step_00000003"]


def described(content="same", **tables):
    """What a checkpoint says of these tables, by way of JSON, and the identity itself."""
    identity = DataIdentity(content, tables)
    return json.loads(json.dumps(checkpoint_ids.describe(identity))), identity


def matched(folder, before, now, match_ids, **sizes):
    """Save the ids of ``before``, compare them with ``now``; ``sizes`` are tables' rows, by default as many as ids."""
    data, identity = described(**before)
    checkpoint_ids.save(folder, identity, None, None)
    rows = {name: sizes.get(name, (before[name].rows, now[name].rows)) for name in now}
    return checkpoint_ids.match(folder, data, described(**now)[1], rows, match_ids)


@pytest.mark.parametrize("match_ids", [False, True])
def test_ids_that_come_after_all_others_fit_into_a_larger_table(tmp_path, match_ids):
    before, now = {"item_id": Vocabulary.of(["a", "b"])}, {"item_id": Vocabulary.of(["a", "b", "c"])}
    carry = matched(tmp_path, before, now, match_ids, item_id=(10, 10))
    assert "2 ids known, 1 new, 0 gone" in carry.notes[0]
    wanted = {"item_id": [0, 1, 2, -1]} if match_ids else {}
    assert {table: rows.tolist() for table, rows in carry.old_rows.items()} == wanted


@pytest.mark.parametrize(
    "now, sizes", [(["a", "b", "c"], (10, 12)), (["a"], (10, 10)), (["a", "c"], (10, 10)), (["b", "a"], (10, 10))]
)
def test_anything_else_needs_matching(tmp_path, now, sizes):
    """A grown table; ids that are gone, whose rows others would take over; other ids; another order."""
    before, now = {"item_id": Vocabulary.of(["a", "b"])}, {"item_id": Vocabulary.of(now)}
    with pytest.raises(UserError, match="checkpoint.match_ids=True"):
        matched(tmp_path, before, now, False, item_id=sizes)
    rows = matched(tmp_path / "again", before, now, True, item_id=sizes).old_rows["item_id"].tolist()
    assert rows == [0, *({"a": 1, "b": 2}.get(name, -1) for name in now["item_id"].originals().to_pylist())]


def test_numbers_do_not_match_texts(tmp_path):
    with pytest.raises(UserError, match="item_id stands for ids of another type, int64 there and large_string here"):
        matched(tmp_path, {"item_id": Vocabulary.of([1, 2])}, {"item_id": Vocabulary.of(["1", "2"])}, True)


def test_a_vocabulary_without_ids_matches_anything(tmp_path):
    carry = matched(tmp_path, {"genre": Vocabulary.of([])}, {"genre": Vocabulary.of(["x"])}, True)
    assert carry.old_rows["genre"].tolist() == [0, -1]


def cross(users, rows=100):
    return CrossedIds(rows, ("user", "hour"), {"uid": Vocabulary.of(users)})


@pytest.mark.parametrize("match_ids", [False, True])
def test_a_cross_is_carried_whole_where_known_ids_kept_their_numbers(tmp_path, match_ids):
    uid = {"uid": Vocabulary.of([7, 8])}
    carry = matched(tmp_path, uid | {"user_x_hour": cross([7, 8])}, uid | {"user_x_hour": cross([7, 8])}, match_ids)
    assert not carry.old_rows and not carry.notes
    grown = {"uid": Vocabulary.of([7, 8, 1]), "user_x_hour": cross([7, 8, 1])}
    carry = matched(tmp_path / "again", uid | {"user_x_hour": cross([7, 8])}, grown, match_ids, uid=(9, 9))
    assert set(carry.old_rows) == ({"uid"} if match_ids else set())
    assert any("user_x_hour" in note for note in carry.notes)


@pytest.mark.parametrize("match_ids", [False, True])
@pytest.mark.parametrize(
    "now, why",
    [(cross([1, 7, 8]), r"other ids than there \(uid\)"), (cross([7, 8], 150), "100 rows there and 150 here")],
)
def test_a_renumbered_or_resized_cross_is_refused_also_with_match_ids(tmp_path, match_ids, now, why):
    before = {"uid": Vocabulary.of([7, 8]), "user_x_hour": cross([7, 8])}
    with pytest.raises(
        UserError, match=rf"user_x_hour .*is a cross.*{why}.*--extend OLD_CACHE.*train anew without the cross"
    ):
        matched(tmp_path, before, {"uid": Vocabulary.of([1, 7, 8]), "user_x_hour": now}, match_ids)


def test_a_cache_that_knows_no_raw_ids_fits_itself_only(tmp_path):
    ids = lambda content: {"genre": UnknownIds(5, content, "the cache has no raw ids of genre")}
    assert not matched(tmp_path, ids("a"), ids("a"), False).old_rows
    with pytest.raises(UserError, match="table genre .*no raw ids of genre"):
        matched(tmp_path / "b", ids("a"), ids("b"), True)
    with pytest.raises(
        UserError, match="table genre stood for ids that the cache does not know and stands for raw ids"
    ):
        matched(tmp_path / "c", ids("a"), {"genre": Vocabulary.of([1, 2, 3, 4])}, True)


def test_several_tables_are_named(tmp_path):
    before = {name: Vocabulary.of([1, 2]) for name in ("uid", "item_id", "genre")}
    with pytest.raises(UserError, match=r"table uid \(and 2 more tables: item_id, genre\) stands for other ids"):
        matched(tmp_path, before, {name: Vocabulary.of([2, 3]) for name in before}, False)


def test_names_of_features_become_names_of_files(tmp_path):
    before, now = {"geo.country": Vocabulary.of([1])}, {"geo.country": Vocabulary.of([0, 1])}
    assert matched(tmp_path, before, now, True).old_rows["geo.country"].tolist() == [0, -1, 1]


def test_a_table_refused_for_another_reason_is_not_called_a_cross(tmp_path):
    before = {"user_x_hour": cross([7, 8]), "uid": Vocabulary.of([7, 8])}
    now = {"user_x_hour": cross([1, 7]), "uid": Vocabulary.of([1, 7])}
    with pytest.raises(UserError, match=r"table user_x_hour is a cross.*; 1 more table: uid do not fit for other") as e:
        matched(tmp_path, before, now, False)
    assert "more table" not in str(e.value).split(" is a cross")[0]
