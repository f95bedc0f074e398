"""Attention forward on Hopper: 192 query rows per tile, three consumer warpgroups and a producer warp.

Per pair of blocks 2 * 64 * 64 * 2 * D FLOPs per warpgroup. Each warpgroup issues the score product of the next key
block before it waits for the previous block's product with V, so that the tensor cores work while SiLU is computed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from generative_recommenders.ops.attention.triton_hopper_common import (
    barrier_pairs,
    claim_tile,
    hand_out,
    key_block_row,
    key_blocks,
    masked_blocks_after_own,
    silu,
    take_tile,
    tile_at,
    tma_load,
)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, Offsets, Targets, Counter, tile_s, tile_full, tile_empty, q_s, k_s, v_s, q_full, q_empty,
    k_full, k_empty, v_full, v_empty,
    num_blocks, tiles, heads: gl.constexpr, D: gl.constexpr, WARPGROUPS: gl.constexpr, BUFFERS: gl.constexpr,
    STAGES: gl.constexpr, HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """The producer warp: every tile's queries, and its key blocks in the order the consumers walk them."""
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row, head, first, length, history = tile_at(
            tile, Offsets, Targets, num_blocks, heads, WARPGROUPS * 64, True, HAS_TARGETS
        )
        if row < length:
            hand_out(tile, turn, tile_s, tile_full, tile_empty)
            buffer = turn % BUFFERS
            mbarrier.wait(q_empty.index(buffer), ((turn // BUFFERS) & 1) ^ 1)
            mbarrier.expect(q_full.index(buffer), WARPGROUPS * 64 * D * 2)
            for w in gl.static_range(WARPGROUPS):
                tma_load(
                    q_desc, [first + row + w * 64, head * D], q_full.index(buffer), q_s.index(buffer * WARPGROUPS + w)
                )
            turn += 1
            for index in range(key_blocks(row, history, WARPGROUPS)):
                n = first + key_block_row(index, row, history, WARPGROUPS)
                slot = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(slot), phase)
                mbarrier.expect(k_full.index(slot), 64 * D * 2)
                tma_load(k_desc, [n, head * D], k_full.index(slot), k_s.index(slot))
                mbarrier.wait(v_empty.index(slot), phase)
                mbarrier.expect(v_full.index(slot), 64 * D * 2)
                tma_load(v_desc, [n, head * D], v_full.index(slot), v_s.index(slot))
                step += 1
        tile = claim_tile(Counter)
    hand_out(tile, turn, tile_s, tile_full, tile_empty)


@gluon.jit
def _masked_weights(scores, i, n, history, half_alpha, S_LAYOUT: gl.constexpr):
    """SiLU of the scores of query rows ``i`` and key rows n …, zero where the row does not see the key."""
    j = n + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
    seen = (j[None, :] < gl.minimum(i, history)[:, None]) | (j[None, :] == i[:, None])
    return gl.where(seen, silu(scores, half_alpha), 0.0)


@gluon.jit
def _consume(
    Out, Offsets, Targets, tile_s, tile_full, tile_empty, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
    v_empty,
    scale, half_alpha, num_blocks, tiles, heads: gl.constexpr, out_stride: gl.constexpr, out_head: gl.constexpr,
    D: gl.constexpr, WARPGROUPS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr,
    HAS_TARGETS: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WG: rows 64 * WG … of every tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    # The tile's own blocks past this warpgroup's diagonal: passed over.
    SKIPPED: gl.constexpr = WARPGROUPS - 1 - WG
    dtype: gl.constexpr = k_s.dtype
    turn = 0
    step = 0
    tile = take_tile(turn, tile_s, tile_full, tile_empty)
    while tile < tiles:
        row, head, first, length, history = tile_at(
            tile, Offsets, Targets, num_blocks, heads, WARPGROUPS * 64, True, HAS_TARGETS
        )
        blocks = key_blocks(row, history, WARPGROUPS)
        i = row + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros([64, D], gl.float32, O_LAYOUT)
        buffer = turn % BUFFERS
        q = q_s.index(buffer * WARPGROUPS + WG)
        mbarrier.wait(q_full.index(buffer), (turn // BUFFERS) & 1)
        for _ in gl.static_range(SKIPPED):
            mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(k_empty.index(step % STAGES))
            mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(v_empty.index(step % STAGES))
            step += 1
        masked = 0
        if HAS_TARGETS:
            # Blocks that hold several candidates, one at a time; none in most tiles.
            masked = masked_blocks_after_own(row, history, WG)
            for index in range(SKIPPED, SKIPPED + masked):
                slot = step % STAGES
                mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
                s = warpgroup_mma(
                    q, k_s.index(slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
                    use_acc=False, is_async=True,
                )  # fmt: skip
                s = warpgroup_mma_wait(0, [s])
                mbarrier.arrive(k_empty.index(slot))
                n = key_block_row(index, row, history, WARPGROUPS)
                p = _masked_weights(s, i, n, history, half_alpha, S_LAYOUT)
                mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
                acc = warpgroup_mma(gl.convert_layout(p.to(dtype), P_LAYOUT), v_s.index(slot), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_empty.index(slot))
                step += 1
        # The last masked block (the diagonal, where nothing but the causal mask applies) primes the pipeline.
        slot = step % STAGES
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
        s = warpgroup_mma(
            q, k_s.index(slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
            use_acc=False, is_async=True,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(slot))
        n = key_block_row(SKIPPED + masked, row, history, WARPGROUPS)
        p = _masked_weights(s, i, n, history, half_alpha, S_LAYOUT)
        mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
        weights = gl.convert_layout(p.to(dtype), P_LAYOUT)
        step += 1
        for _ in range(blocks - SKIPPED - masked - 1):
            slot = step % STAGES
            previous = (step - 1) % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            s = warpgroup_mma(
                q, k_s.index(slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
                use_acc=False, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma(weights, v_s.index(previous), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_empty.index(slot))
            p = silu(s, half_alpha)
            # This wait is a branch: it keeps the assembler from hoisting the next one above the SiLU.
            mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
            acc, p = warpgroup_mma_wait(0, [acc, p])
            mbarrier.arrive(v_empty.index(previous))
            weights = gl.convert_layout(p.to(dtype), P_LAYOUT)
            step += 1
        mbarrier.arrive(q_empty.index(buffer))
        previous = (step - 1) % STAGES
        acc = warpgroup_mma(weights, v_s.index(previous), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(previous))
        r = row + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
        c = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        base = Out + (first.to(gl.int64) + row) * out_stride + head * out_head
        rows = WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
        gl.store(base + (rows[:, None] * out_stride + c[None, :]), (acc * scale).to(dtype), mask=(r < length)[:, None])
        turn += 1
        tile = take_tile(turn, tile_s, tile_full, tile_empty)


@gluon.jit(do_not_specialize=("num_blocks", "tiles"))
def attention_hopper_forward_kernel(
    q_desc, k_desc, v_desc, Out, Offsets, Targets, Counter, norm, alpha, num_blocks, tiles,
    heads: gl.constexpr, out_stride: gl.constexpr, out_head: gl.constexpr,
    D: gl.constexpr, WARPGROUPS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr,
    NORM_IS_TENSOR: gl.constexpr, HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """Out = mask * SiLU(alpha * Q K^T) / norm * V, causal and target-aware; descriptors are [T, heads * D]."""
    q_s = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS * WARPGROUPS, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 64, D], v_desc.layout)
    q_full, q_empty = barrier_pairs(BUFFERS, WARPGROUPS)
    k_full, k_empty = barrier_pairs(STAGES, WARPGROUPS)
    v_full, v_empty = barrier_pairs(STAGES, WARPGROUPS)
    tile_s = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full, tile_empty = barrier_pairs(2, WARPGROUPS)
    fence_async_shared()
    if NORM_IS_TENSOR:
        scale = 1.0 / gl.load(norm).to(gl.float32)
    else:
        scale = 1.0 / norm
    half_alpha = alpha * 0.5
    gl.static_assert(WARPGROUPS == 3)
    gl.warp_specialize(
        [
            (_consume, (
                Out, Offsets, Targets, tile_s, tile_full, tile_empty, q_s, k_s, v_s, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, scale, half_alpha, num_blocks, tiles, heads, out_stride, out_head, D,
                WARPGROUPS, BUFFERS, STAGES, HAS_TARGETS, 0,
            )),
            (_consume, (
                Out, Offsets, Targets, tile_s, tile_full, tile_empty, q_s, k_s, v_s, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, scale, half_alpha, num_blocks, tiles, heads, out_stride, out_head, D,
                WARPGROUPS, BUFFERS, STAGES, HAS_TARGETS, 1,
            )),
            (_consume, (
                Out, Offsets, Targets, tile_s, tile_full, tile_empty, q_s, k_s, v_s, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, scale, half_alpha, num_blocks, tiles, heads, out_stride, out_head, D,
                WARPGROUPS, BUFFERS, STAGES, HAS_TARGETS, 2,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, Offsets, Targets, Counter, tile_s, tile_full, tile_empty, q_s, k_s, v_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, num_blocks, tiles, heads, D, WARPGROUPS, BUFFERS,
                STAGES, HAS_TARGETS,
            )),
        ],
        [4, 4, 1],
        [160, 160, 32],
    )  # fmt: skip
