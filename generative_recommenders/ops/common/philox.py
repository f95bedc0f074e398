"""Philox4x32-10 and the keep decisions of LMSD dropout, in plain PyTorch: every backend reproduces them bit for bit.

A decision is a pure function of (seed, row number, column, segment): key = (low, high 32 bits of the seed), counter =
(low 32 bits of the row number, column div 4, segment, high 32 bits of the row number); output word j serves column
4 k + j. Generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import functools
import math

import numpy
import torch

SEGMENT_Y, SEGMENT_X, SEGMENT_U = 0, 1, 2  # of the LMSD op
SEGMENT_INPUT = 3  # the stack's input
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF
_COUNTERS_PER_CHUNK = 1 << 21  # bounds the reference's temporaries: some ten int64 tensors of this many elements


@functools.lru_cache(maxsize=64)
def keep_threshold(dropout_ratio: float) -> int:
    """The smallest word that is kept: the first uint32 ``w`` with ``float32(w) * 2**-32 > float32(dropout_ratio)``.

    429,496,752 at 0.1: words are compared as the uniform float32 they round to, so this is not ``floor(p * 2**32)``.

    Raises:
        ValueError: the ratio is not a number in [0, 1), or rounds to 1 in float32.
    """
    check_dropout_ratio(dropout_ratio)
    ratio = numpy.float32(dropout_ratio)
    low, high = 0, _LOW  # float32(2**32 - 1) * 2**-32 is 1, so the largest word always exceeds a ratio below 1
    while low < high:
        middle = (low + high) // 2
        if numpy.float32(middle) * numpy.float32(2.0**-32) > ratio:
            high = middle
        else:
            low = middle + 1
    return low


def check_dropout_ratio(dropout_ratio: float) -> None:
    """Refuse a ratio outside [0, 1) or so near to 1 that no float32 tells it from dropping everything."""
    if not math.isfinite(dropout_ratio) or dropout_ratio < 0 or numpy.float32(dropout_ratio) >= 1:
        raise ValueError(f"dropout_ratio={dropout_ratio!r} must be in [0, 1) and below 1 when rounded to float32")


def philox4x32(counter: tuple, key: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words (int64 tensors holding uint32 values) of counter words and key words of the same kind, broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2**64, which leaves both 32-bit halves right.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & _LOW, (k1 + KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def keep_decisions(
    rows: torch.Tensor, num_columns: int, seed: int | torch.Tensor, segment: int, dropout_ratio: float
) -> torch.Tensor:
    """Keep decisions of one segment.

    Args:
        rows: int64 ``[N]``, the row numbers that are drawn for (not negative).
        num_columns: D, a multiple of 4.
        seed: signed 64-bit integer, or an int64 tensor of one element (the host never reads it).
        segment: 0 for the LMSD result, 1 for x, 2 for the activated u.

    Returns:
        bool ``[N, D]``, true where the element is kept.
    """
    if not isinstance(seed, torch.Tensor):
        seed = torch.tensor(signed_seed(seed), dtype=torch.int64, device=rows.device)
    seed = seed.reshape(())
    key = (seed & _LOW, (seed >> 32) & _LOW)
    columns = torch.arange(num_columns // 4, device=rows.device)
    threshold = keep_threshold(dropout_ratio)
    kept = torch.empty(rows.numel(), num_columns, dtype=torch.bool, device=rows.device)
    step = max(1, _COUNTERS_PER_CHUNK // max(1, num_columns // 4))
    for start in range(0, rows.numel(), step):
        row = rows[start : start + step, None]
        segments = torch.full_like(row, segment)
        words = philox4x32((row & _LOW, columns, segments, (row >> 32) & _LOW), key)
        stacked = torch.stack([word >= threshold for word in words], dim=-1)
        kept[start : start + step] = stacked.reshape(-1, num_columns)
    return kept


def signed_seed(seed: int) -> int:
    """The seed as a signed 64-bit integer. Raises ``ValueError`` outside that range."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed} does not fit a signed 64-bit integer")
    return int(seed)


def signed32(word: int) -> int:
    """A uint32 word as the signed integer of the same bits, as launches hand it over."""
    return word - (1 << 32) if word >= 1 << 31 else word
