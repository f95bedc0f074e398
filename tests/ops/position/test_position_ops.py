"""Position and time indices against whole-number arithmetic in Python, and the sum against its definition."""

import math

import pytest
import torch

from generative_recommenders.ops.position import (
    SequenceRows,
    add_timestamp_positional_embeddings,
    position_indices,
    time_indices,
)


def sequence_rows(lengths):
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)
    return SequenceRows.from_offsets(offsets, sum(lengths))


@pytest.mark.parametrize("num_contextual", [0, 3])
@pytest.mark.parametrize("buckets", [4, 64])
def test_position_counts_back_from_the_end_of_the_history(num_contextual, buckets):
    lengths, targets = [9, 4, 3, 12], [1, 1, 0, 5]
    want = []
    for length, candidates in zip(lengths, targets, strict=True):
        h = length - candidates
        for r in range(length):
            index = r if r < num_contextual else h - min(r, h) + num_contextual
            want.append(min(index, buckets - 1))
    got = position_indices(sequence_rows(lengths), torch.tensor(targets), num_contextual, buckets)
    assert got.tolist() == want


def test_time_buckets_at_every_edge():
    edges = [60 * k * k + d for k in range(2051) for d in (-1, 0, 1)]
    deltas = [d for d in edges if d >= 0] + [2**31, 2**40]
    query = 2**41
    stamps = torch.tensor([query - d for d in deltas] + [query])
    got = time_indices(sequence_rows([len(deltas) + 1]), stamps, 2048)
    assert got.tolist() == [min(math.isqrt(d // 60), 2048) for d in deltas] + [0]


def test_time_runs_to_the_last_row_of_the_own_sequence():
    stamps = torch.tensor([0, 40, 100, 400, 0, 160, 100])
    got = time_indices(sequence_rows([4, 0, 3]), stamps, 2048)
    assert got.tolist() == [2, 2, 2, 0, 1, 0, 0]  # 400-0, 360, 300, 0 s; then 100, -60 (later than the query), 0 s


def test_floating_timestamps_are_refused():
    with pytest.raises(TypeError, match="integer seconds"):
        time_indices(sequence_rows([2]), torch.zeros(2), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indices_do_not_depend_on_the_dtype_of_x(dtype):
    """bf16 has 8 bits of mantissa: an index computed in it would merge neighbouring rows past 256."""
    rows, length = sequence_rows([600]), 600
    position = torch.arange(1000.0)[:, None].expand(-1, 8)
    time = torch.arange(2049.0)[:, None].expand(-1, 8) * 1000
    stamps = torch.arange(length) * 60
    got = add_timestamp_positional_embeddings(
        torch.zeros(length, 8, dtype=dtype), rows, stamps, torch.tensor([1]), position, time
    )
    want = [(length - 1 - r) + 1000.0 * math.isqrt(length - 1 - r) for r in range(length)]
    assert got.dtype == torch.float32
    assert got[:, 0].tolist() == want


def test_sum_and_its_gradients():
    g = torch.Generator().manual_seed(0)
    lengths, targets = [5, 0, 3], torch.tensor([1, 0, 2])
    rows = sequence_rows(lengths)
    x, position, time = (torch.randn(n, 4, generator=g, dtype=torch.float64) for n in (8, 6, 5))
    stamps = torch.tensor([0, 10, 200, 700, 900, 0, 50, 50])
    for tensor in (x, position, time):
        tensor.requires_grad_()

    def encode(x, position, time):
        return add_timestamp_positional_embeddings(x, rows, stamps, targets, position, time, 1)

    i, j = position_indices(rows, targets, 1, 6), time_indices(rows, stamps, 4)
    want = torch.stack([x[r] * 2.0 + position[i[r]] + time[j[r]] for r in range(8)])
    torch.testing.assert_close(encode(x, position, time), want)
    torch.autograd.gradcheck(encode, (x, position, time))


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_no_rows_give_no_rows_and_zero_gradients(lengths):
    x, position, time = (torch.randn(n, 4, requires_grad=True) for n in (0, 6, 5))
    targets = torch.zeros(len(lengths), dtype=torch.int64)
    stamps = torch.zeros(0, dtype=torch.int64)
    out = add_timestamp_positional_embeddings(x, sequence_rows(lengths), stamps, targets, position, time)
    out.sum().backward()
    assert out.shape == (0, 4)
    for tensor in (x, position, time):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))
