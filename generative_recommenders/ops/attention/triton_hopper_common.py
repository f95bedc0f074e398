"""What the Hopper attention kernels share (Gluon, Triton's explicit-layout dialect): tiles, SiLU, TMA loads.

Persistent programs, one per multiprocessor, take the tiles of all (sequence, head) pairs from a common counter. In
each, one producer warp copies tiles into shared memory with the bulk tensor engine and consumer warpgroups of 64 rows
each do the products; mbarriers hand the stages over ("full" ones from the producer, "empty" ones from the consumers).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# The bulk copies were renamed in Triton 3.8.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def tanh(x):
    # One instruction of the special-function unit. Marked impure so that it stays where it is between the products.
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def silu(scores, half_alpha):
    """SiLU(alpha * s) = t * tanh(t) + t with t = alpha * s / 2."""
    t = scores * half_alpha
    return t * tanh(t) + t


@gluon.jit
def silu_and_slope(scores, half_alpha):
    """p = SiLU(alpha * s), and e with 2 * SiLU'(alpha * s) = e + 1, so that 2 * ds = dp * e + dp."""
    t = scores * half_alpha
    th = tanh(t)
    e = (1.0 - th * th) * t + th
    return t * th + t, e


@gluon.jit
def tile_at(
    tile, Offsets, Targets, num_blocks, heads, BLOCK: gl.constexpr, REVERSED: gl.constexpr, HAS_TARGETS: gl.constexpr
):
    """Tile number → (row of the tile in its sequence, head, first row of the sequence, length, history rows).

    A lone candidate sees what a history row in its place would, so only two candidates or more shorten the history.
    """
    pair = tile // num_blocks
    block = tile % num_blocks
    if REVERSED:
        block = num_blocks - 1 - block
    sequence = pair // heads
    first = gl.load(Offsets + sequence).to(gl.int32)
    length = gl.load(Offsets + sequence + 1).to(gl.int32) - first
    history = length
    if HAS_TARGETS:
        targets = gl.load(Targets + sequence).to(gl.int32)
        history = gl.where(targets > 1, gl.maximum(length - targets, 0), length)
    return block * BLOCK, pair % heads, first, length, history


@gluon.jit
def claim_tile(Counter):
    """The next tile nobody has: programs start with their own number and draw further ones from a counter.

    Sequences differ in length and tiles in work, so a fixed share per program would leave some idle at the end. Which
    program computes a tile has no influence on its bits.
    """
    return gl.num_programs(0) + gl.atomic_add(Counter, 1, sem="relaxed")


@gluon.jit
def hand_out(tile, turn, tile_s, tile_full, tile_empty):
    """Producer side: tell the consumers which tile comes as their number ``turn``."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % 2
    mbarrier.wait(tile_empty.index(slot), ((turn // 2) & 1) ^ 1)
    tile_s.index(slot).store(gl.full([1], 0, gl.int32, SCALAR) + tile)
    mbarrier.arrive(tile_full.index(slot))


@gluon.jit
def take_tile(turn, tile_s, tile_full, tile_empty):
    """Consumer side: the tile of number ``turn``; a number past the last tile ends the walk."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = turn % 2
    mbarrier.wait(tile_full.index(slot), (turn // 2) & 1)
    tile = gl.max(tile_s.index(slot).load(SCALAR), axis=0)
    mbarrier.arrive(tile_empty.index(slot))
    return tile


@gluon.jit
def key_blocks(row, history, WARPGROUPS: gl.constexpr):
    """64-row key blocks that a tile of 64 * WARPGROUPS queries from ``row`` on needs: the history's, then its own."""
    return (gl.minimum(row, history) + 63) // 64 + WARPGROUPS


@gluon.jit
def key_block_row(index, row, history, WARPGROUPS: gl.constexpr):
    """First key row of block ``index`` of the walk: the tile's own blocks from the last down, then the history's."""
    own = row + (WARPGROUPS - 1 - index) * 64
    past = (key_blocks(row, history, WARPGROUPS) - 1 - index) * 64
    return gl.where(index < WARPGROUPS, own, past)


@gluon.jit
def masked_blocks_after_own(row, history, WG: gl.constexpr):
    """How many blocks after a warpgroup's own (diagonal) block hold candidates and need the mask too."""
    within = gl.minimum(gl.maximum(history - row, 0) // 64, WG)
    partial = gl.where((history < row) & (history % 64 != 0), 1, 0)
    return WG - within + partial


@gluon.jit
def barrier_pairs(COUNT: gl.constexpr, CONSUMERS: gl.constexpr, COPIES: gl.constexpr = 1):
    """``COUNT`` "full" barriers (``COPIES`` arrivals) and "empty" ones (an arrival per consumer warpgroup)."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(full.index(index), count=COPIES)
        mbarrier.init(empty.index(index), count=CONSUMERS)
    return full, empty
