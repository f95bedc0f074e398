"""First values of tables: the published generator, any block the same as the whole, the right distribution."""

import math

import pytest
import torch

from generative_recommenders.modules.table_init import CHUNK_ELEMENTS, fill_table_rows_, table_seed, uniform_at


def splitmix64(seed, count):
    """The generator as published, in Python's whole numbers."""
    mask = (1 << 64) - 1
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_published_vector():
    assert list(splitmix64(1234567, 3)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1234567, (1 << 64) - 1])
def test_values_follow_the_generator(seed):
    want = [(word >> 40) * 2.0**-23 - 1.0 for word in splitmix64(seed, 200)]
    assert uniform_at(seed, torch.arange(200)).tolist() == want


def test_any_block_equals_the_whole_table():
    whole = fill_table_rows_(torch.empty(100, 12), 3, "uid", 100)
    for first_row, rows, first_column, columns in ((0, 100, 4, 4), (17, 1, 0, 12), (60, 40, 8, 4), (5, 0, 0, 12)):
        block = torch.empty(rows, columns)
        fill_table_rows_(block, 3, "uid", 100, 12, first_row, first_column)
        assert torch.equal(block, whole[first_row : first_row + rows, first_column : first_column + columns])


def test_chunks_do_not_show():
    rows = CHUNK_ELEMENTS // 512 + 3
    whole = fill_table_rows_(torch.empty(rows, 512), 0, "t", rows)
    assert torch.equal(fill_table_rows_(torch.empty(4, 512), 0, "t", rows, first_row=rows - 4), whole[-4:])


def test_row_numbers_past_32_bits():
    """100 M rows of width 512 are 5·10¹⁰ elements; the index must not wrap at 2³²."""
    rows = 100_000_000
    far = fill_table_rows_(torch.empty(2, 512), 0, "user_x_artist", rows, first_row=rows - 2)
    near = fill_table_rows_(torch.empty(2, 512), 0, "user_x_artist", rows, first_row=(rows - 2) % (2**32 // 512))
    assert not torch.equal(far, near)
    assert far.abs().max() <= 1 / math.sqrt(rows)


def test_distribution_and_independence():
    a = fill_table_rows_(torch.empty(400, 64), 0, "a", 400).double() * 20
    b = fill_table_rows_(torch.empty(400, 64), 0, "b", 400).double() * 20
    other_seed = fill_table_rows_(torch.empty(400, 64), 1, "a", 400).double() * 20
    assert a.min() >= -1 and a.max() < 1
    assert abs(a.mean()) < 0.015 and abs(a.var() - 1 / 3) < 0.01
    for x, y in ((a, b), (a, other_seed), (a[:, :-1], a[:, 1:]), (a[:-1], a[1:])):
        assert abs(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]) < 0.03
    assert len(torch.unique(a, dim=0)) == 400


def test_seeds_are_stable_between_processes():
    assert table_seed(0, "item_id") == 4229006638771440313
    assert table_seed(0, "item_id") != table_seed(1, "item_id")


@pytest.mark.parametrize("first_row,first_column", [(95, 0), (-1, 0), (0, 9)])
def test_a_block_outside_the_table_is_refused(first_row, first_column):
    with pytest.raises(ValueError, match="table 'uid' is 100 x 12"):
        fill_table_rows_(torch.empty(10, 4), 0, "uid", 100, 12, first_row, first_column)


@pytest.mark.gpu
def test_gpu_and_cpu_agree_to_the_bit():
    cpu = fill_table_rows_(torch.empty(1000, 64), 0, "uid", 1000)
    gpu = fill_table_rows_(torch.empty(1000, 64, device="cuda"), 0, "uid", 1000)
    assert torch.equal(cpu, gpu.cpu())
