"""Philox4x32-10 and the keep decisions drawn from it."""

import pytest
import torch

from generative_recommenders.ops.common import philox

# The known-answer vectors published with Random123 (kat_vectors, philox4x32 10): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_in_integers(counter, key):
    """The generator in unbounded Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@pytest.mark.parametrize("counter,key,words", KNOWN)
def test_known_answers(counter, key, words):
    tensors = lambda values: tuple(torch.tensor([v]) for v in values)  # noqa: E731
    assert tuple(int(w) for w in philox.philox4x32(tensors(counter), tensors(key))) == words
    assert philox_in_integers(counter, key) == words


@pytest.mark.parametrize("seed", [0, 17, -1, -(2**63), 2**63 - 1, 0x1234_5678_9ABC_DEF0])
def test_counter_and_key_layout(seed):
    rows = [0, 1, 5, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 3]
    unsigned = seed & (2**64 - 1)
    for segment in range(3):
        kept = philox.keep_decisions(torch.tensor(rows), 16, seed, segment, 0.3)
        for i, row in enumerate(rows):
            for quad in range(4):
                counter = (row & 0xFFFFFFFF, quad, segment, row >> 32)
                words = philox_in_integers(counter, (unsigned & 0xFFFFFFFF, unsigned >> 32))
                right = [w >= philox.keep_threshold(0.3) for w in words]
                assert kept[i, 4 * quad : 4 * quad + 4].tolist() == right


def test_seed_tensor_equals_integer():
    rows = torch.arange(9)
    for seed in (3, -5, 2**40 + 1):
        number = philox.keep_decisions(rows, 32, seed, 1, 0.5)
        assert torch.equal(number, philox.keep_decisions(rows, 32, torch.tensor([seed]), 1, 0.5))


def test_threshold():
    assert philox.keep_threshold(0.1) == 429_496_752
    for ratio in (1e-12, 1e-6, 0.1, 0.25, 0.5, 0.9, 0.999999):
        word = philox.keep_threshold(ratio)
        uniform = lambda w: torch.tensor(w, dtype=torch.int64).to(torch.float32) * 2.0**-32  # noqa: E731
        assert uniform(word) > torch.tensor(ratio, dtype=torch.float32) >= uniform(word - 1)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan"), float("inf"), 1 - 1e-9])
def test_refused_ratios(ratio):
    with pytest.raises(ValueError, match="dropout_ratio"):
        philox.keep_threshold(ratio)


def test_seed_out_of_range():
    with pytest.raises(ValueError, match="64-bit"):
        philox.keep_decisions(torch.arange(2), 8, 2**63, 0, 0.5)


def sections(rows, columns, ratio=0.5, seed=2024):
    """float32 [3, N, D] keep decisions."""
    return torch.stack([philox.keep_decisions(rows, columns, seed, s, ratio) for s in range(3)]).float()


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def distinct_masks(kept):
    """Whether no two (section, row) masks are equal."""
    flat = kept.reshape(-1, kept.shape[-1]).to(torch.uint8)
    return torch.unique(flat, dim=0).shape[0] == flat.shape[0]


def test_sections_and_rows_are_independent():
    kept = sections(torch.arange(4096), 512)
    for section in kept:
        assert abs(float(section.mean()) - 0.5) < 0.002
        assert abs(correlation(section[1:], section[:-1])) < 0.005
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs(correlation(kept[i], kept[j])) < 0.005
        for shift in (1, 2):
            assert abs(correlation(kept[i][shift:], kept[j][:-shift])) < 0.005
            assert abs(correlation(kept[j][shift:], kept[i][:-shift])) < 0.005
    assert distinct_masks(kept)


def test_tall_inputs_do_not_wrap():
    """Row 2,796,203 is where a 32-bit counter of three sections of 512 shows row 0's next section."""
    rows = torch.cat([torch.arange(8), 1_398_102 + torch.arange(-4, 4), 2_796_203 + torch.arange(-4, 7)])
    rows = torch.cat([rows, 2**31 + torch.arange(-2, 2), 2**32 + torch.arange(-2, 4), 2**33 + torch.arange(3)])
    assert distinct_masks(sections(rows, 512))


@pytest.mark.parametrize("count", [1, 5])
def test_few_rows_are_the_first_of_many(count):
    assert torch.equal(sections(torch.arange(count), 64), sections(torch.arange(64), 64)[:, :count])


def test_chunks_do_not_show(monkeypatch):
    whole = philox.keep_decisions(torch.arange(100), 64, 3, 0, 0.1)
    monkeypatch.setattr(philox, "_COUNTERS_PER_CHUNK", 7 * 16)
    assert torch.equal(whole, philox.keep_decisions(torch.arange(100), 64, 3, 0, 0.1))
