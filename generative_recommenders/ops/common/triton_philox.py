"""Philox4x32-10 keep decisions inside Triton kernels, the same words as ``philox.py``.

What makes them cheap enough to hide behind memory traffic: the key schedule is one for all counters; a round is two
32 x 32 → 64 bit products and two three-input xors; all four words are used; and the first rounds are broadcast, since
round 1 works on the row and on the column alone, round 2 multiplies the column's half and the row's half apart, and
only from round 3 on does a counter need products of its own. That leaves 15 products per counter instead of 20, the
column's being loop invariant.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _products(c0, c2):
    """High and low halves of the two products of a round."""
    # 64-bit products of zero-extended words: one wide multiply each, where umulhi and a plain product are two.
    p0 = c0.to(tl.uint64) * 0xD2511F53
    p1 = c2.to(tl.uint64) * 0xCD9E8D57
    return (p0 >> 32).to(tl.uint32), p0.to(tl.uint32), (p1 >> 32).to(tl.uint32), p1.to(tl.uint32)


@triton.jit
def philox_words(key_low, key_high, row_low, row_high, column, SEGMENT: tl.constexpr):
    """Four words of counter (row_low, column, SEGMENT, row_high); rows ``[R, 1]``, column ``[1, C]`` or ``[R, C]``."""
    LOW: tl.constexpr = (0xCD9E8D57 * SEGMENT) & 0xFFFFFFFF
    HIGH: tl.constexpr = (0xCD9E8D57 * SEGMENT) >> 32
    # Round 1: the second product is of the segment, hence constant.
    p0 = row_low.to(tl.uint64) * 0xD2511F53
    c0 = column ^ (key_low ^ HIGH)
    c2 = (p0 >> 32).to(tl.uint32) ^ row_high ^ key_high
    c3 = p0.to(tl.uint32)
    key_low += 0x9E3779B9
    key_high += 0xBB67AE85
    # Round 2: one product of the column, one of the row.
    high0, low0, high1, low1 = _products(c0, c2)
    c0 = high1 ^ (key_low ^ LOW)
    c1 = low1
    c2 = high0 ^ (c3 ^ key_high)
    c3 = low0
    for _ in tl.static_range(8):
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
        high0, low0, high1, low1 = _products(c0, c2)
        c0 = high1 ^ c1 ^ key_low
        c1 = low1
        c2 = high0 ^ c3 ^ key_high
        c3 = low0
    return c0, c1, c2, c3


@triton.jit
def keep_bytes(key_low, key_high, row_low, row_high, column, threshold, SEGMENT: tl.constexpr):
    """Decisions of columns 4k .. 4k+3 as bit SEGMENT of the four bytes of one uint32 per counter, column 4k lowest."""
    w0, w1, w2, w3 = philox_words(key_low, key_high, row_low, row_high, column, SEGMENT)
    low = ((w0 >= threshold).to(tl.uint32) << SEGMENT) | ((w1 >= threshold).to(tl.uint32) << (8 + SEGMENT))
    high = ((w2 >= threshold).to(tl.uint32) << (16 + SEGMENT)) | ((w3 >= threshold).to(tl.uint32) << (24 + SEGMENT))
    return low | high


@triton.jit
def spread_bytes(packed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``[ROWS, COLUMNS / 4]`` of four bytes → ``[ROWS, COLUMNS]``: each value's low byte is its column's."""
    even = tl.join(packed, packed >> 16)
    odd = tl.join(packed >> 8, packed >> 24)
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))
