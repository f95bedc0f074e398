"""The plain-PyTorch attention against a formula written out row by row."""

import pytest
import torch

from generative_recommenders.ops.attention import (
    AttentionCall,
    Projection,
    UvqkParameters,
    hstu_mha,
    hstu_preprocess_attention,
    reference,
)
from tests.ops.attention.oracle import MASKS, attention_by_rows, make_case


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
@pytest.mark.parametrize("lengths", [[7, 0, 13, 1], [3], [16, 17]])
def test_forward_and_gradients(mask, lengths):
    case = make_case(lengths, heads=2, d_qk=5, d_v=3, dtype=torch.float64, mask=mask)
    out = hstu_mha(case.q, case.k, case.v, case.offsets, 40, 0.3, 11.0, backend="PYTORCH", **case.mask_arguments())
    want = attention_by_rows(case, alpha=0.3, norm=11.0)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out, (case.q, case.k, case.v), case.dout)
    expected = torch.autograd.grad(want, (case.q, case.k, case.v), case.dout)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_chunks_change_nothing(monkeypatch):
    case = make_case([9, 4, 0, 21, 2, 2], heads=2, d_qk=4, d_v=4, dtype=torch.float64, mask=MASKS[1])
    run = lambda: hstu_mha(case.q, case.k, case.v, case.offsets, 21, 0.5, 21.0, case.num_targets)  # noqa: E731
    whole = run()
    monkeypatch.setattr(reference.chunks_of, "__defaults__", (200,))
    torch.testing.assert_close(run(), whole)


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0, 0]])
def test_empty_batches_have_zero_gradients(offsets):
    offsets = torch.tensor(offsets)
    weight = torch.randn(8, 2 * 2 * (3 + 4), requires_grad=True)
    bias = torch.zeros(28, requires_grad=True)
    norm = [torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)]
    x = torch.zeros(0, 8, requires_grad=True)
    parameters, call = UvqkParameters(*norm, weight, bias), AttentionCall(offsets, 0, 0.5, 1.0)
    u, y = hstu_preprocess_attention(x, parameters, Projection(2, 4, 3), call)
    assert u.shape == y.shape == (0, 6)
    (u.sum() + y.sum()).backward()
    for parameter in (weight, bias, *norm):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seq_offsets=torch.tensor([0, 3])), "rise from 0"),
        (dict(max_seq_len=4), "max_seq_len=4"),
        (dict(num_targets=torch.ones(2, dtype=torch.int64)), "num_targets"),
        (dict(v=torch.zeros(4, 2, 8)), "v must be"),
        (dict(q=torch.zeros(5, 2, 4, dtype=torch.float64)), "dtype"),
        (dict(max_attn_len=-1), "max_attn_len=-1"),
        (dict(max_attn_len=2.5), "max_attn_len=2.5 must be a whole number"),
        (dict(max_seq_len="5"), "max_seq_len='5' must be a whole number"),
        (dict(num_targets=torch.ones(1)), "num_targets must be int64"),
        (dict(attn_norm=0.0), "attn_norm=0.0"),
        (dict(attn_norm=torch.ones(2)), "attn_norm must be one number"),
        (dict(alpha=float("nan")), "alpha=nan"),
        (dict(q=torch.zeros(5, 2, 4).int(), k=torch.zeros(5, 2, 4).int(), v=torch.zeros(5, 2, 8).int()), "floating"),
        (dict(backend="CUDNN"), "CUDNN"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = dict(
        q=torch.zeros(5, 2, 4),
        k=torch.zeros(5, 2, 4),
        v=torch.zeros(5, 2, 8),
        seq_offsets=torch.tensor([0, 5]),
        max_seq_len=5,
        alpha=1.0,
        attn_norm=1.0,
    )
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        hstu_mha(**arguments)
