"""FLOPs: the formula's known answers, fill and exec, peaks."""

import pytest
import torch

from generative_recommenders.train import flops
from generative_recommenders.train.flops import StackShape, batch_flops, peak_tflops, utilisation

YAMBDA = StackShape(embedding_dim=512, num_heads=4, attention_dim=128, hidden_dim=128, num_layers=3, max_seq_len=4096)
SMALL = StackShape(embedding_dim=48, num_heads=3, attention_dim=8, hidden_dim=16, num_layers=2, max_seq_len=50)


def test_known_answers():
    """The public benchmark's step: 323.26 TFLOP, of which 184.72 attention, 79.16 UVQK and 59.37 output."""
    samples, rows = 1024, 4096
    layer = YAMBDA.layer(samples * rows, samples * rows**2 / 2)
    for part, want in ((layer.attention, 184.72), (layer.uvqk, 79.16), (layer.output, 59.37), (layer.total, 323.26)):
        assert round(3 * part / 1e12, 2) == want
    counted = batch_flops(YAMBDA, torch.full((samples,), rows))
    assert round(counted.dense / 1e12, 2) == 323.26
    assert round(counted.dense / samples / 1e9, 1) == 315.7
    assert counted.fill == counted.exec == 1


def test_unequal_head_widths():
    """At d_qk != d_v the backward's five products are two of d_qk for scores and dk, dq, and two of d_v."""
    forward = 2 * 100 * 3 * (8 + 16)
    backward = 2 * 100 * 3 * (8 + 16 + 8 + 8 + 16)  # scores again, da, dq, dk, dv
    assert SMALL.layer(10, 100).attention == forward + backward


@pytest.mark.parametrize("computation", ["absorbed", "materialised"])
def test_exec_is_below_fill_only_when_it_ran(computation):
    lengths, targets = torch.tensor([50, 7, 1, 30]), torch.ones(4, dtype=torch.int64)
    full = batch_flops(SMALL, lengths, targets)
    assert full.fill == full.exec
    ran = batch_flops(SMALL, lengths, targets, computation)
    assert ran.fill == full.fill
    assert ran.exec < ran.fill


def test_targets_only_counts_by_hand():
    """One sequence of 10 rows, 2 candidates, each of which sees 9 rows."""
    lengths, targets, size = torch.tensor([10]), torch.tensor([2]), 3 * (8 + 16)
    full = 3 * 2 * 10 * 48 * 2 * size + 2 * 50 * 3 * (4 * 8 + 3 * 16) + 3 * 2 * 10 * 3 * 3 * 16 * 48
    output = 3 * 2 * 2 * 3 * 3 * 16 * 48
    absorbed = 3 * 2 * 2 * 48 * 2 * size + 2 * 18 * 3 * 7 * 48 + output
    materialised = 3 * 2 * (10 + 2) * 48 * size + 2 * 18 * 3 * (4 * 8 + 3 * 16) + output
    for computation, last in (("absorbed", absorbed), ("materialised", materialised)):
        assert batch_flops(SMALL, lengths, targets, computation).executed == full + last


def test_empty_batch():
    counted = batch_flops(SMALL, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), "absorbed")
    assert counted.fill == 0 and counted.exec == 0


def test_refusals():
    with pytest.raises(ValueError, match="num_targets"):
        batch_flops(SMALL, torch.tensor([3]), computation="absorbed")
    with pytest.raises(ValueError, match="'folded'"):
        batch_flops(SMALL, torch.tensor([3]), torch.tensor([1]), "folded")


def test_peaks():
    assert peak_tflops("NVIDIA H200", torch.bfloat16) == (989.4, None)
    peak, reason = peak_tflops("NVIDIA H200 NVL", torch.bfloat16)
    assert peak is None and "'NVIDIA H200 NVL'" in reason and "no MFU or HFU" in reason
    peak, reason = peak_tflops("NVIDIA H200", torch.float64)
    assert peak is None and "float64" in reason


def test_utilisation():
    assert utilisation(989.4e12, seconds=0.5, devices=4, peak=989.4) == pytest.approx(0.5)
    assert "must not be read as better utilisation" in flops.MFU_NOTE
