"""The meter of a run: the counts that were really there, the decision that was really taken."""

import pytest
import torch
from torchrec import KeyedJaggedTensor

from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig
from generative_recommenders.train import flops
from generative_recommenders.train.flop_meter import FlopMeter

HISTORY, SHAPE = torch.tensor([4, 0, 6, 2]), flops.StackShape(16, 2, 8, 8, 2, 12)


def ranker(**options):
    sizes = dict(hstu_embedding_dim=16, hstu_num_heads=2, hstu_attn_qk_dim=8, hstu_attn_linear_dim=8)
    small = dict(preprocessor_hidden_dim=8, item_tower_hidden_dim=8, head_hidden_dim=8, backend="PYTORCH")
    config = DlrmHSTUConfig(
        {"item_id": 9},
        ("item_id",),
        max_seq_len=12,
        hstu_num_layers=2,
        last_layer_targets_only=True,
        **sizes,
        **small,
        **options,
    )
    return DlrmHSTU(config)


def batch(counts):
    events, total = int(HISTORY.sum()), int(counts.sum())
    uih = KeyedJaggedTensor(
        ["item_id", "action_weight", "action_timestamp"], torch.ones(3 * events).long(), lengths=HISTORY.repeat(3)
    )
    candidates = KeyedJaggedTensor(
        ["item_candidate_id", "item_query_time", "item_action_weight"],
        torch.ones(3 * total).long(),
        lengths=counts.repeat(3),
    )
    return uih, candidates


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 0, 2, 1]], ids=str)
def test_real_counts_and_decisions_are_counted(world, counts, several):
    counts = torch.tensor(counts)
    model = ranker(targets_only_several_targets=several)
    meter = FlopMeter(model, world)
    output = model(*batch(counts))
    assert torch.equal(output.num_targets, counts)
    meter.add(output)
    engages = several or bool((counts == 1).all())
    wanted = flops.batch_flops(SHAPE, HISTORY + counts, counts, "absorbed" if engages else "full")
    figures = meter.drain(1.0)
    assert figures["fill"] == pytest.approx(float(wanted.fill)) and figures["exec"] == pytest.approx(float(wanted.exec))
    assert (figures["exec"] < figures["fill"]) == engages == bool(figures["last_layer_targets_only"])
    assert meter.drain(1.0) == {}
    said = "the candidates' alone (absorbed)" if engages else "all (not exactly one target"
    assert meter.decision.startswith(said)
