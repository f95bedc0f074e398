"""Jagged operators against per-sequence loops: ragged, with empty sequences, empty batches and width 0."""

import pytest
import torch

from generative_recommenders.ops import jagged
from generative_recommenders.ops.jagged import reference

LENGTHS = {
    "ragged": ([3, 1, 4], [1, 2, 1]),
    "some empty": ([0, 7, 0, 1], [0, 1, 0, 1]),
    "left empty": ([0, 0], [2, 1]),
    "all empty": ([0, 0, 0], [0, 0, 0]),
    "no sequences": ([], []),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)


def rows(count, dtype=torch.float32, width=4):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(dtype).requires_grad_()


def pieces(values, lengths):
    return list(values.split(lengths)) if lengths else []


@pytest.mark.parametrize("lengths", [left for left, _ in LENGTHS.values()], ids=list(LENGTHS))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_complete_cumsum(lengths, dtype):
    got = jagged.complete_cumsum(torch.tensor(lengths, dtype=dtype))
    assert got.dtype == torch.int64
    assert torch.equal(got, offsets_of(lengths))


@pytest.mark.parametrize("lengths", [left for left, _ in LENGTHS.values()], ids=list(LENGTHS))
def test_row_sequence_ids(lengths):
    want = [s for s, length in enumerate(lengths) for _ in range(length)]
    assert jagged.row_sequence_ids(offsets_of(lengths), sum(lengths)).tolist() == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left,right", LENGTHS.values(), ids=list(LENGTHS))
def test_concat_and_split(left, right, dtype):
    a, b = rows(sum(left), dtype), rows(sum(right), dtype)
    joined = jagged.concat_2d_jagged(a, b, offsets_of(left), offsets_of(right))
    parts = [p for pair in zip(pieces(a, left), pieces(b, right), strict=True) for p in pair]
    want = torch.cat(parts) if parts else a
    assert joined.dtype == dtype
    assert torch.equal(joined, want)

    weight = torch.arange(joined.numel(), dtype=dtype).view_as(joined)
    got = torch.autograd.grad((joined * weight).sum(), [a, b])
    expected = torch.autograd.grad((want * weight).sum(), [a, b], allow_unused=True)
    for g, e, source in zip(got, expected, (a, b), strict=True):
        assert torch.equal(g, torch.zeros_like(source) if e is None else e)

    back = jagged.split_2d_jagged(joined, offsets_of(left), offsets_of(right), (sum(left), sum(right)))
    assert torch.equal(back[0], a) and torch.equal(back[1], b)
    (grad,) = torch.autograd.grad(back[0].sum() + 2 * back[1].sum(), joined)
    marks = [p for x, y in zip(left, right, strict=True) for p in (torch.full((x,), 1.0), torch.full((y,), 2.0))]
    want_grad = torch.cat(marks) if marks else torch.zeros(0)
    assert torch.equal(grad, want_grad.to(dtype)[:, None].expand(-1, 4))


def test_split_reads_the_counts_itself():
    left, right = LENGTHS["ragged"]
    values = rows(12)
    a, b = jagged.split_2d_jagged(values, offsets_of(left), offsets_of(right))
    assert (a.shape[0], b.shape[0]) == (8, 4)


def test_split_of_one_part_only_gives_zero_to_the_other():
    values = rows(12)
    left, right = LENGTHS["ragged"]
    a, _ = jagged.split_2d_jagged(values, offsets_of(left), offsets_of(right))
    (grad,) = torch.autograd.grad(a.sum(), values)
    assert grad.sum() == 8 * 4 and set(grad.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("left,right", LENGTHS.values(), ids=list(LENGTHS))
def test_interleave_in_another_order(left, right):
    order = torch.randperm(len(left), generator=torch.Generator().manual_seed(0))
    a, b = rows(sum(left)), rows(sum(right))
    join = jagged.interleave([offsets_of(left), offsets_of(right)], [sum(left), sum(right)], order)
    in_left, in_right = pieces(a, left), pieces(b, right)
    parts = [piece for s in order.tolist() for piece in (in_left[s], in_right[s])]
    assert torch.equal(join.place([a, b]), torch.cat(parts) if parts else a)
    lengths = [left[s] + right[s] for s in order.tolist()]
    assert torch.equal(join.offsets, offsets_of(lengths))


def test_place_and_take_gradients_in_float64():
    join = jagged.interleave([offsets_of([2, 0, 3]), offsets_of([1, 2, 0])], [5, 3])
    a, b = rows(5, torch.float64), rows(3, torch.float64)
    torch.autograd.gradcheck(lambda x, y: join.place([x, y]).sin(), (a, b))
    torch.autograd.gradcheck(lambda x: tuple(p.sin() for p in join.split(x)), (rows(8, torch.float64),))
    torch.autograd.gradcheck(lambda x: jagged.take_rows(x, torch.tensor([6, 0, 3])).sin(), (rows(8, torch.float64),))


@pytest.mark.parametrize("max_len", [0, 2, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [left for left, _ in LENGTHS.values()], ids=list(LENGTHS))
def test_padded_dense_round_trip(lengths, dtype, max_len):
    values, offsets = rows(sum(lengths), dtype), offsets_of(lengths)
    dense = jagged.jagged_to_padded_dense(values, offsets, max_len)
    want = torch.zeros(len(lengths), max_len, 4, dtype=dtype)
    for s, piece in enumerate(pieces(values.detach(), lengths)):
        want[s, : min(len(piece), max_len)] = piece[:max_len]
    assert dense.dtype == dtype
    assert torch.equal(dense, want)

    back = jagged.dense_to_jagged(dense, offsets, sum(lengths))
    kept = torch.tensor([r < max_len for length in lengths for r in range(length)]).bool()[:, None]
    assert torch.equal(back, values * kept)
    (grad,) = torch.autograd.grad(back.sum(), values)
    assert torch.equal(grad, kept.to(dtype).expand_as(values))


def test_fbgemm_path_equals_plain_indexing():
    values, offsets = rows(12), offsets_of([5, 0, 7])
    got = jagged.jagged_to_padded_dense(values, offsets, 6, padding_value=-1.0)
    assert torch.equal(got, reference.jagged_to_padded_dense(values, offsets, 6, -1.0))
    assert torch.equal(jagged.dense_to_jagged(got, offsets, 12), reference.dense_to_jagged(got.detach(), offsets, 12))


def test_neighbours_of_empty_sequences_are_untouched():
    values = rows(8)
    with_empty = jagged.jagged_to_padded_dense(values, offsets_of([0, 7, 0, 1]), 7)
    without = jagged.jagged_to_padded_dense(values, offsets_of([7, 1]), 7)
    assert torch.equal(with_empty[[1, 3]], without)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: jagged.complete_cumsum(torch.zeros(2, 2)), "one dimension"),
        (lambda: jagged.jagged_to_padded_dense(torch.zeros(3), offsets_of([3]), 3), r"rows \[T, D\]"),
        (lambda: jagged.jagged_to_padded_dense(torch.zeros(3, 1), offsets_of([3]), -1), "max_len"),
        (lambda: jagged.jagged_to_padded_dense(torch.zeros(0, 1), torch.zeros(0), 1), "offsets"),
        (lambda: jagged.dense_to_jagged(torch.zeros(2, 3, 1), offsets_of([3]), 3), r"\[B=1, L, D\]"),
        (lambda: jagged.interleave([offsets_of([1]), offsets_of([1, 1])], [1, 2]), "same number of sequences"),
        (lambda: jagged.split_2d_jagged(torch.zeros(4, 1), offsets_of([1]), offsets_of([1])), "do not add up"),
        (lambda: jagged.place_rows(3, [torch.arange(2)], [torch.zeros(2, 1)]), "2 rows together"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_parts_of_two_dtypes_are_refused():
    parts = [torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.float64)]
    with pytest.raises(TypeError, match="share one dtype"):
        jagged.place_rows(2, [torch.tensor([0]), torch.tensor([1])], parts)


def test_row_numbers_in_int32_move_rows_forward_and_backward():
    values = torch.randn(5, 3, requires_grad=True)
    narrow = torch.tensor([4, 1], dtype=torch.int32)
    taken = jagged.take_rows(values, narrow)
    assert torch.equal(taken, values[[4, 1]])
    (grad,) = torch.autograd.grad(taken.sum(), values)
    assert grad[:, 0].tolist() == [0, 1, 0, 0, 1]
    parts = [values[:2], values[2:]]
    rows = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([3, 0], [1, 2, 4])]
    placed = jagged.place_rows(5, rows, parts)
    assert torch.equal(placed, values[[1, 2, 3, 0, 4]])
    offsets = [torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)]
    order = torch.tensor([1, 0], dtype=torch.int32)
    join = jagged.interleave(offsets, [5, 3], order)
    assert [rows.tolist() for rows in join.rows] == [[5, 6, 0, 1, 2], [7, 3, 4]]


def test_parts_of_other_widths_and_counts_for_other_parts_are_refused():
    rows = [torch.tensor([0, 1]), torch.tensor([2])]
    with pytest.raises(ValueError, match="parts must share the shape of a row"):
        jagged.place_rows(3, rows, [torch.randn(2, 3), torch.randn(1, 2)])
    with pytest.raises(ValueError, match="part_rows has 1 counts for 2 parts"):
        jagged.interleave([torch.tensor([0, 1]), torch.tensor([0, 2])], [1])
