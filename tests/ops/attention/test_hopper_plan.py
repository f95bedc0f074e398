"""The chunks in which the Hopper backward goes through a batch: each sequence's scratch tiles are its own."""

import pytest
import torch

from generative_recommenders.ops.attention import hopper_launch
from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.attention.hopper_launch import SlopePlan


def plan_of(lengths: list[int], heads: int, longest: int) -> SlopePlan:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return SlopePlan.of(AttentionCall(offsets, longest, 1.0, 1.0), sum(lengths), heads)


def check(lengths: list[int], heads: int, longest: int) -> SlopePlan:
    """Chunks cover the sequences in order; inside one, no two sequences share a tile and none leaves the buffer."""
    plan = plan_of(lengths, heads, longest)
    bounds, starts = plan.first_sequence.tolist(), plan.first_tile.tolist()
    assert plan.first_sequence.dtype == plan.first_tile.dtype == torch.int32
    assert len(bounds) == plan.chunks + 1 and bounds[0] == 0 and bounds[-1] == len(lengths)
    assert bounds == sorted(bounds)
    for begin, end in zip(bounds, bounds[1:], strict=False):
        at = 0
        for sequence in range(begin, end):
            blocks = -(-lengths[sequence] // 64)
            assert starts[sequence] >= at
            at = starts[sequence] + heads * sum(range(blocks + 1))
        assert at <= plan.tiles
    return plan


@pytest.mark.parametrize("scratch", [1, 500, 2**18])
@pytest.mark.parametrize("seed", range(5))
def test_random_lengths(monkeypatch, scratch, seed):
    monkeypatch.setattr(hopper_launch, "SCRATCH_TILES", scratch)
    generator = torch.Generator().manual_seed(seed)
    longest = [64, 65, 200, 1000, 2663][seed]
    lengths = torch.randint(0, longest + 1, (200,), generator=generator).tolist()
    check(lengths, 1 + seed, longest)


@pytest.mark.parametrize("lengths", [[0], [1], [64], [65], [0, 0, 0], [2663] * 64, [1] * 300, [300, 0, 1]], ids=str)
@pytest.mark.parametrize("scratch", [1, 3000, 2**18])
def test_edges(monkeypatch, lengths, scratch):
    monkeypatch.setattr(hopper_launch, "SCRATCH_TILES", scratch)
    check(lengths, 4, max(max(lengths), 1))
    check(lengths, 4, 4096)


@pytest.mark.parametrize("length", [65, 16385, 100033])
def test_lengths_that_waste_most_of_a_block(monkeypatch, length):
    """One row past a multiple of 64, where the host's bound of the tiles is tightest."""
    monkeypatch.setattr(hopper_launch, "SCRATCH_TILES", 1)
    check([length] * 40, 1, length)
    check([length] * 39 + [1], 3, length)


def test_the_buffer_is_bounded_and_no_larger_than_the_batch_needs():
    large = check([2663] * 1024, 4, 2663)
    assert large.tiles * 64 * 64 * 2 == 2**31
    assert large.chunks == 15  # 1024 * 4 * 903 tiles of 8 KiB through 2 GiB
    assert plan_of([64], 4, 64).tiles == 4
