"""The batches that the training step is timed on: new every time, and as distinct as they say."""

import pytest
import torch

from benchmarks.train_step import CONTEXT_TABLES, ITEM_TABLES, FreshBatches

ROWS = {**dict.fromkeys(CONTEXT_TABLES, 50), "item_id": 1_000, "artist_id": 30, "album_id": 40}
BATCH, LENGTH = 4, 20  # rows joined: 8 of context, 11 of history, the candidate


def items(batch):
    uih, candidates = batch
    return torch.cat([uih["item_id"].values(), candidates["item_candidate_id"].values()])


def test_distinct_items_never_repeat_before_the_vocabulary_is_through():
    batches = FreshBatches(BATCH, LENGTH, ROWS, 0.0, "cpu")
    seen = torch.cat([items(batches()) for _ in range(20)])  # 20 · 48 of 999 items
    assert seen.numel() == 960 and seen.unique().numel() == 960
    assert seen.min() >= 1 and seen.max() < 1_000


@pytest.mark.parametrize("returning", [0.25, 0.6])
def test_the_share_of_returning_rows_is_what_was_asked_for(returning):
    batches = FreshBatches(64, LENGTH, ROWS, returning, "cpu")
    history = batches()[0]["item_id"].values()
    assert history.unique().numel() == history.numel() - round(history.numel() * returning)


def test_attributes_follow_from_the_item():
    batches, known = FreshBatches(BATCH, LENGTH, ROWS, 0.6, "cpu"), {}
    for _ in range(30):
        uih, candidates = batches()
        for source, prefix in ((uih, ""), (candidates, "item_candidate_")):
            columns = [source["item_id" if not prefix else "item_candidate_id"].values().tolist()]
            columns += [source[prefix + name].values().tolist() for name in ITEM_TABLES if name != "item_id"]
            for item, *attributes in zip(*columns, strict=True):
                assert known.setdefault(item, attributes) == attributes


def test_every_key_has_the_rows_that_the_host_is_told():
    uih, candidates = FreshBatches(BATCH, LENGTH, ROWS, 0.0, "cpu")()
    for keyed in (uih, candidates):
        assert keyed.length_per_key() == [int(n.sum()) for n in keyed.lengths().view(-1, BATCH)]
    assert uih.length_per_key() == [BATCH] * 8 + [BATCH * 11] * 5
    assert set(candidates["item_action_weight"].values().tolist()) <= {1, 4}
