"""Batches whose features do not fit one another or their tables are refused, by feature, sample and id."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch
from torchrec import KeyedJaggedTensor

from generative_recommenders.modules.dlrm_hstu import TaskConfig

TASKS = (TaskConfig("listen_plus"), TaskConfig("watch", "regression", label_feature="item_watch_time"))
HISTORIES, CANDIDATES = [9, 9], [1, 1]
PARTS = {"uih": 0, "candidates": 1}


@dataclasses.dataclass
class Parts:
    """A keyed jagged tensor taken apart: key → values and lengths, so that one key can be changed."""

    values: dict
    lengths: dict

    @staticmethod
    def of(features):
        parts = features.to_dict()
        values = {key: part.values().clone() for key, part in parts.items()}
        return Parts(values, {key: part.lengths().clone() for key, part in parts.items()})

    def join(self, **changes):
        values, lengths = list(self.values.values()), list(self.lengths.values())
        return KeyedJaggedTensor(list(self.values), torch.cat(values), lengths=torch.cat(lengths), **changes)


def changed_batch(toy, where, change, candidates=CANDIDATES):
    """The batch after ``change(parts)`` of its uih or its candidates."""
    batch = list(toy.batch(toy.samples(HISTORIES, candidates)))
    parts = Parts.of(batch[PARTS[where]])
    change(parts)
    batch[PARTS[where]] = parts.join()
    return batch


# ---- Lengths per sample ----

HISTORY_FEATURES = ("item_id", "artist_id", "album_id", "action_weight", "action_timestamp")
CANDIDATE_FEATURES = (
    "item_candidate_id",
    "item_candidate_artist_id",
    "item_candidate_album_id",
    "item_query_time",
    "item_action_weight",
    "item_watch_time",
)


@pytest.mark.parametrize("feature", HISTORY_FEATURES)
def test_history_features_have_the_same_lengths_in_every_sample(toy, feature):
    batch = changed_batch(toy, "uih", lambda parts: parts.lengths.update({feature: torch.tensor([8, 10])}))
    with pytest.raises(ValueError, match=r"uih feature '\w+' has \d+ values in sample 0 but 'item_id' has \d+"):
        toy.model(tasks=TASKS)(*batch)


@pytest.mark.parametrize("feature", CANDIDATE_FEATURES)
def test_candidate_features_have_the_same_lengths_in_every_sample(toy, feature):
    batch = changed_batch(toy, "candidates", lambda parts: parts.lengths.update({feature: torch.tensor([2, 0])}))
    with pytest.raises(ValueError, match=r"candidates feature '\w+' has \d values in sample 0"):
        toy.model(tasks=TASKS)(*batch)


@pytest.mark.parametrize("feature", CANDIDATE_FEATURES[3:])
def test_candidate_features_have_the_same_number_of_values(toy, feature):
    def change(parts):
        parts.values[feature], parts.lengths[feature] = parts.values[feature][:1], torch.tensor([1, 0])

    with pytest.raises(ValueError, match=f"candidates feature '{feature}' has 1 values"):
        toy.model(tasks=TASKS)(*changed_batch(toy, "candidates", change))


def test_values_and_lengths_are_of_each_other(toy):
    batch = list(toy.batch(toy.samples(HISTORIES)))
    uih = Parts.of(batch[0])
    total = sum(value.numel() for value in uih.values.values())
    uih.values["action_timestamp"] = torch.cat([uih.values["action_timestamp"], torch.tensor([1, 2])])
    with pytest.raises(ValueError, match=f"uih has {total + 2} values but its lengths add up to {total}"):
        toy.model()(uih.join(), batch[1])
    uih = Parts.of(batch[0])
    uih.lengths["uid"] = torch.tensor([2, 0])  # as many values, of the first sample alone: legal, of several one counts
    toy.model()(uih.join(), batch[1])
    counts = [value.numel() for value in uih.values.values()]
    uih.lengths["uid"], uih.lengths["user_x_hour"] = torch.tensor([1, 0]), torch.tensor([1, 2])
    told = uih.join(length_per_key=counts, offset_per_key=[0, *itertools.accumulate(counts)])
    with pytest.raises(ValueError, match=r"uih feature 'uid' has 2 values but lengths \[1, 0\]"):
        toy.model()(told, batch[1])
    uih.lengths |= {"uid": torch.tensor([3, -1]), "user_x_hour": torch.tensor([1, 1])}
    with pytest.raises(ValueError, match=r"uih feature 'uid' has 2 values but lengths \[3, -1\]"):
        toy.model()(uih.join(length_per_key=counts, offset_per_key=told.offset_per_key()), batch[1])


def test_features_are_whole_numbers(toy):
    batch = list(toy.batch(toy.samples(HISTORIES)))
    uih = Parts.of(batch[0]).join()
    uih = KeyedJaggedTensor(uih.keys(), uih.values().float(), lengths=uih.lengths())
    with pytest.raises(ValueError, match="uih feature 'item_id' must be int64: got torch.float32"):
        toy.model()(uih, batch[1])


# ---- Ids ----


@pytest.mark.parametrize("bad", [-1, None, 2**40], ids=["-1", "one past the end", "far past the end"])
@pytest.mark.parametrize(
    "where,feature,table",
    [
        ("uih", "item_id", "item_id"),
        ("uih", "artist_id", "artist_id"),
        ("uih", "uid", "uid"),
        ("candidates", "item_candidate_id", "item_id"),
        ("candidates", "item_candidate_album_id", "album_id"),
    ],
)
def test_an_id_outside_its_table_is_named(toy, where, feature, table, bad):
    rows = toy.table_rows[table]
    bad = rows if bad is None else bad
    batch = changed_batch(toy, where, lambda parts: parts.values[feature].__setitem__(-1, bad))
    message = f"{where} feature '{feature}' has the id {bad}: table '{table}' has {rows} rows, 0 to {rows - 1}"
    with pytest.raises(ValueError, match=message):
        toy.model()(*batch)


def test_the_first_and_last_row_of_a_table_are_ids(toy):
    for value in (0, toy.table_rows["item_id"] - 1):
        batch = changed_batch(toy, "uih", lambda parts, v=value: parts.values["item_id"].fill_(v))
        assert toy.model()(*batch).loss.isfinite()


# ---- The contextual prefix ----


@pytest.mark.parametrize("length,context", [(10, 2), (1, 2), (2, 0), (8, 2)])
def test_a_prefix_of_other_than_the_contextual_rows_is_refused(toy, length, context):
    names = toy.contextual_features[:context]
    with pytest.raises(ValueError, match=f"contextual_seq_len={length}.*contextual features, {context}"):
        toy.config(contextual_seq_len=length, contextual_feature_names=names)
    toy.config(contextual_seq_len=context, contextual_feature_names=names)
    toy.config(contextual_seq_len=0, contextual_feature_names=names)


def test_a_prefix_of_all_contextual_rows_sees_the_history(toy):
    """Both ways: a change of the newest event reaches a contextual row, which it does not without the prefix."""
    samples = toy.samples([5])
    newer = toy.changed(samples, lambda copy: copy[0]["history"][-1].update(item_id=7, action_weight=4))
    for length in (0, 2):
        model = toy.model(contextual_seq_len=length, return_full_embeddings=True).eval()
        before, after = (model(*toy.batch(s)).full_embeddings[:2] for s in (samples, newer))
        assert torch.equal(before, after) == (length == 0)


# ---- On a GPU ----

GPU_PROGRAM = """
import torch
from tests.modules.conftest import Toy
from tests.modules.test_batch_checks import changed_batch
toy = Toy()
where, feature, what, value = {change!r}
uih, candidates = changed_batch(toy, where, lambda parts: getattr(parts, what)[feature].copy_(torch.tensor(value)))
for part in (uih, candidates):
    part.sync()
model = toy.model(backend=None, hstu_attn_qk_dim=16, hstu_attn_linear_dim=16).cuda()
model(uih.to("cuda"), candidates.to("cuda"))
torch.cuda.synchronize()
print("believed")
"""
GPU_FAULTS = {
    "an id of -1": ("candidates", "item_candidate_id", "values", [-1, 3]),
    "an id past the end": ("candidates", "item_candidate_id", "values", [3, 50]),
    "history lengths": ("uih", "album_id", "lengths", [8, 10]),
    "query times": ("candidates", "item_query_time", "lengths", [2, 0]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", GPU_FAULTS.values(), ids=list(GPU_FAULTS))
def test_the_device_refuses(change):
    """A failed assertion ends the process's CUDA context, so each is a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", GPU_PROGRAM.format(change=change)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode and "believed" not in done.stdout
    assert "device-side assert" in done.stderr and "illegal memory access" not in done.stderr, done.stderr[-2000:]


@pytest.mark.gpu
def test_the_checks_wait_for_nothing(toy):
    model = toy.model(backend=None, hstu_attn_qk_dim=16, hstu_attn_linear_dim=16).cuda()
    batch = toy.batch(toy.samples([9, 0, 14], [1, 2, 1]))
    for part in batch:
        part.sync()  # what the host knows goes along with the copy
    batch = [part.to("cuda") for part in batch]
    model(*batch).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fault", [None, *GPU_FAULTS.values()], ids=["none", *GPU_FAULTS])
def test_the_device_would_assert_it(toy, fault, monkeypatch):
    """The device's own check, run on a CPU, where an assertion raises at once."""
    from generative_recommenders.modules import batch_checks

    class Device:
        """Stands for the device of a tensor."""

        type = "cuda"

    class OnDevice(torch.Tensor):
        device = Device()

    where, feature, what, value = fault or ("uih", "item_id", "lengths", [9, 9])
    change = lambda parts: getattr(parts, what)[feature].copy_(torch.tensor(value))  # noqa: E731
    uih, candidates = (part.to_dict() for part in changed_batch(toy, where, change))
    for part in [*uih.values(), *candidates.values()]:
        part._lengths, part._values = part.lengths().as_subclass(OnDevice), part.values().as_subclass(OnDevice)
    config = toy.config(tasks=TASKS)

    def check():
        batch_checks.check_batch(config, uih, candidates, ["item_action_weight", "item_watch_time"])
        batch_checks.assert_ids(torch.cat([candidates[name].values() for name in config.candidate_feature_names]))

    if fault is None or max(value) == 50:  # past the end: the table's own look-up refuses it there
        check()
        return
    with pytest.raises(RuntimeError, match="same lengths" if what == "lengths" else "negative id"):
        check()


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float64])
def test_negative_action_bits_are_refused_and_not_read_as_every_action(toy, model_dtype):
    batch = changed_batch(toy, "uih", lambda parts: parts.values["action_weight"].index_fill_(0, torch.tensor([3]), -1))
    with pytest.raises(ValueError, match=r"uih feature 'action_weight'\[3\] is -1"):
        toy.model().to(model_dtype)(*batch)
