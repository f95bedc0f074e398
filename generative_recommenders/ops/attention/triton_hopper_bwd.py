"""Attention backward on Hopper: dK/dV and dQ in two kernels without atomics, so two runs give equal bits.

dK/dV: 128 keys per tile, two consumer warpgroups of 64 keys each walk the query blocks (four products per pair of
blocks); dQ: 128 queries per tile walk the key blocks (three products). Loads past the end of a sequence bring rows of
the next one (or zeros past the last): the mask sets their weights and slopes to zero.
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
    silu_and_slope,
    take_tile,
    tile_at,
    tma_load,
)


@gluon.jit
def _query_blocks(row, length, history):
    """64-row query blocks, from ``row`` on, that see any of the 128 keys from ``row`` on."""
    blocks = (length - row + 63) // 64
    # Candidates are seen by themselves alone.
    return gl.where(row < history, blocks, gl.minimum(blocks, 2))


@gluon.jit
def _produce_queries(
    q_desc, k_desc, v_desc, do_desc, Offsets, Targets, Counter, tile_s, tile_full, tile_empty, k_s, v_s, q_s, do_s,
    kv_full, kv_empty, q_full, q_empty,
    num_blocks, tiles, heads: gl.constexpr, D: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr,
    HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """The producer warp: every tile's keys and values, and the query blocks that see them."""
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row, head, first, length, history = tile_at(tile, Offsets, Targets, num_blocks, heads, 128, False, HAS_TARGETS)
        if row < length:
            hand_out(tile, turn, tile_s, tile_full, tile_empty)
            buffer = turn % BUFFERS
            mbarrier.wait(kv_empty.index(buffer), ((turn // BUFFERS) & 1) ^ 1)
            mbarrier.expect(kv_full.index(buffer), 4 * 64 * D * 2)
            for w in gl.static_range(2):
                n = first + row + w * 64
                tma_load(k_desc, [n, head * D], kv_full.index(buffer), k_s.index(buffer * 2 + w))
                tma_load(v_desc, [n, head * D], kv_full.index(buffer), v_s.index(buffer * 2 + w))
            turn += 1
            for index in range(_query_blocks(row, length, history)):
                slot = step % STAGES
                mbarrier.wait(q_empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), 2 * 64 * D * 2)
                tma_load(q_desc, [first + row + index * 64, head * D], q_full.index(slot), q_s.index(slot))
                tma_load(do_desc, [first + row + index * 64, head * D], q_full.index(slot), do_s.index(slot))
                step += 1
        tile = claim_tile(Counter)
    hand_out(tile, turn, tile_s, tile_full, tile_empty)


@gluon.jit
def _consume_queries(
    DK, DV, Offsets, Targets, tile_s, tile_full, tile_empty, k_s, v_s, q_s, do_s, kv_full, kv_empty, q_full, q_empty,
    scale, half_alpha,
    num_blocks, tiles, heads: gl.constexpr, dk_stride: gl.constexpr, dk_head: gl.constexpr, dv_stride: gl.constexpr,
    dv_head: gl.constexpr, D: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, HAS_TARGETS: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WG: keys 64 * WG … of every tile; scores are held transposed, [keys, queries]."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    dtype: gl.constexpr = k_s.dtype
    turn = 0
    step = 0
    tile = take_tile(turn, tile_s, tile_full, tile_empty)
    while tile < tiles:
        row, head, first, length, history = tile_at(tile, Offsets, Targets, num_blocks, heads, 128, False, HAS_TARGETS)
        blocks = _query_blocks(row, length, history)
        # From here on rows count from the tile's first.
        first += row
        length -= row
        history -= row
        j = WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        dk = gl.zeros([64, D], gl.float32, O_LAYOUT)
        dv = gl.zeros([64, D], gl.float32, O_LAYOUT)
        buffer = turn % BUFFERS
        k = k_s.index(buffer * 2 + WG)
        v = v_s.index(buffer * 2 + WG)
        mbarrier.wait(kv_full.index(buffer), (turn // BUFFERS) & 1)
        for _ in gl.static_range(WG):
            mbarrier.wait(q_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(q_empty.index(step % STAGES))
            step += 1
        for index in range(WG, blocks):
            slot = step % STAGES
            mbarrier.wait(q_full.index(slot), (step // STAGES) & 1)
            s = warpgroup_mma(
                k, q_s.index(slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
                use_acc=False, is_async=True,
            )  # fmt: skip
            dp = warpgroup_mma(
                v, do_s.index(slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
                use_acc=False, is_async=True,
            )  # fmt: skip
            s = warpgroup_mma_wait(1, [s])
            p, e = silu_and_slope(s, half_alpha)
            if (index <= WG) | (index * 64 + 64 > length) | (WG * 64 + 64 > history):
                i = index * 64 + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
                if HAS_TARGETS:
                    # Keys past the end may pass the second test: their gradients are not stored.
                    limit = gl.where(i < length, gl.minimum(i, history), 0)
                    seen = (j[:, None] < limit[None, :]) | (j[:, None] == i[None, :])
                else:
                    seen = (j[:, None] <= i[None, :]) & (i < length)[None, :]
                p = gl.where(seen, p, 0.0)
                e = gl.where(seen, e, -1.0)
            dv_next = warpgroup_mma(
                gl.convert_layout(p.to(dtype), P_LAYOUT), do_s.index(slot), dv, is_async=True
            )  # fmt: skip
            dp = warpgroup_mma_wait(1, [dp])
            ds = (dp * e + dp).to(dtype)
            dk_next = warpgroup_mma(gl.convert_layout(ds, P_LAYOUT), q_s.index(slot), dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, [dv_next, dk_next])
            mbarrier.arrive(q_empty.index(slot))
            step += 1
        mbarrier.arrive(kv_empty.index(buffer))
        r = WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
        c = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        keep = (r < length)[:, None]
        at = first.to(gl.int64)
        dk_at = DK + (at * dk_stride + head * dk_head) + (r[:, None] * dk_stride + c[None, :])
        gl.store(dk_at, (dk * (half_alpha * scale)).to(dtype), mask=keep)
        dv_at = DV + (at * dv_stride + head * dv_head) + (r[:, None] * dv_stride + c[None, :])
        gl.store(dv_at, (dv * scale).to(dtype), mask=keep)
        turn += 1
        tile = take_tile(turn, tile_s, tile_full, tile_empty)


@gluon.jit(do_not_specialize=("num_blocks", "tiles"))
def hopper_backward_kv(
    q_desc, k_desc, v_desc, do_desc, DK, DV, Offsets, Targets, Counter, norm, alpha, num_blocks, tiles, heads:
    gl.constexpr,
    dk_stride: gl.constexpr, dk_head: gl.constexpr, dv_stride: gl.constexpr, dv_head: gl.constexpr,
    D: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, NORM_IS_TENSOR: gl.constexpr,
    HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """dK and dV under the causal, target-aware mask; descriptors are [T, heads * D] in blocks of [64, D]."""
    k_s = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS * 2, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [BUFFERS * 2, 64, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 64, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 64, D], do_desc.layout)
    kv_full, kv_empty = barrier_pairs(BUFFERS, 2)
    q_full, q_empty = barrier_pairs(STAGES, 2)
    tile_s = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full, tile_empty = barrier_pairs(2, 2)
    fence_async_shared()
    if NORM_IS_TENSOR:
        scale = 1.0 / gl.load(norm).to(gl.float32)
    else:
        scale = 1.0 / norm
    half_alpha = alpha * 0.5
    gl.warp_specialize(
        [
            (_consume_queries, (
                DK, DV, Offsets, Targets, tile_s, tile_full, tile_empty, k_s, v_s, q_s, do_s, kv_full, kv_empty,
                q_full, q_empty, scale, half_alpha, num_blocks, tiles, heads, dk_stride, dk_head, dv_stride,
                dv_head, D, BUFFERS, STAGES, HAS_TARGETS, 0,
            )),
            (_consume_queries, (
                DK, DV, Offsets, Targets, tile_s, tile_full, tile_empty, k_s, v_s, q_s, do_s, kv_full, kv_empty,
                q_full, q_empty, scale, half_alpha, num_blocks, tiles, heads, dk_stride, dk_head, dv_stride,
                dv_head, D, BUFFERS, STAGES, HAS_TARGETS, 1,
            )),
            (_produce_queries, (
                q_desc, k_desc, v_desc, do_desc, Offsets, Targets, Counter, tile_s, tile_full, tile_empty, k_s, v_s,
                q_s, do_s, kv_full, kv_empty, q_full, q_empty, num_blocks, tiles, heads, D, BUFFERS, STAGES,
                HAS_TARGETS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _produce_keys(
    q_desc, k_desc, v_desc, do_desc, Offsets, Targets, Counter, tile_s, tile_full, tile_empty, q_s, do_s, k_s, v_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, num_blocks, tiles, heads: gl.constexpr,
    D: gl.constexpr, BUFFERS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """The producer warp: every tile's queries and upstream gradients, and the key blocks they need."""
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row, head, first, length, history = tile_at(tile, Offsets, Targets, num_blocks, heads, 128, True, HAS_TARGETS)
        if row < length:
            hand_out(tile, turn, tile_s, tile_full, tile_empty)
            buffer = turn % BUFFERS
            mbarrier.wait(q_empty.index(buffer), ((turn // BUFFERS) & 1) ^ 1)
            mbarrier.expect(q_full.index(buffer), 4 * 64 * D * 2)
            for w in gl.static_range(2):
                m = first + row + w * 64
                tma_load(q_desc, [m, head * D], q_full.index(buffer), q_s.index(buffer * 2 + w))
                tma_load(do_desc, [m, head * D], q_full.index(buffer), do_s.index(buffer * 2 + w))
            turn += 1
            for index in range(key_blocks(row, history, 2)):
                n = first + key_block_row(index, row, history, 2)
                slot = step % K_STAGES
                mbarrier.wait(k_empty.index(slot), ((step // K_STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(slot), 64 * D * 2)
                tma_load(k_desc, [n, head * D], k_full.index(slot), k_s.index(slot))
                slot = step % V_STAGES
                mbarrier.wait(v_empty.index(slot), ((step // V_STAGES) & 1) ^ 1)
                mbarrier.expect(v_full.index(slot), 64 * D * 2)
                tma_load(v_desc, [n, head * D], v_full.index(slot), v_s.index(slot))
                step += 1
        tile = claim_tile(Counter)
    hand_out(tile, turn, tile_s, tile_full, tile_empty)


@gluon.jit
def _masked_slope(e, i, n, history, S_LAYOUT: gl.constexpr):
    """e = -1 (so that ds = 0) where query row ``i`` does not see key row n …."""
    j = n + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
    seen = (j[None, :] < gl.minimum(i, history)[:, None]) | (j[None, :] == i[:, None])
    return gl.where(seen, e, -1.0)


@gluon.jit
def _consume_keys(
    DQ, Offsets, Targets, tile_s, tile_full, tile_empty, q_s, do_s, k_s, v_s, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, scale, half_alpha,
    num_blocks, tiles, heads: gl.constexpr, dq_stride: gl.constexpr, dq_head: gl.constexpr, D: gl.constexpr,
    BUFFERS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, HAS_TARGETS: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WG: query rows 64 * WG … of every tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    SKIPPED: gl.constexpr = 1 - WG
    dtype: gl.constexpr = k_s.dtype
    turn = 0
    step = 0
    tile = take_tile(turn, tile_s, tile_full, tile_empty)
    while tile < tiles:
        row, head, first, length, history = tile_at(tile, Offsets, Targets, num_blocks, heads, 128, True, HAS_TARGETS)
        blocks = key_blocks(row, history, 2)
        i = row + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        dq = gl.zeros([64, D], gl.float32, O_LAYOUT)
        buffer = turn % BUFFERS
        q = q_s.index(buffer * 2 + WG)
        do = do_s.index(buffer * 2 + WG)
        mbarrier.wait(q_full.index(buffer), (turn // BUFFERS) & 1)
        for _ in gl.static_range(SKIPPED):
            mbarrier.wait(k_full.index(step % K_STAGES), (step // K_STAGES) & 1)
            mbarrier.arrive(k_empty.index(step % K_STAGES))
            mbarrier.wait(v_full.index(step % V_STAGES), (step // V_STAGES) & 1)
            mbarrier.arrive(v_empty.index(step % V_STAGES))
            step += 1
        masked = SKIPPED + 1
        if HAS_TARGETS:
            masked += masked_blocks_after_own(row, history, WG)
        slot = step % K_STAGES
        v_slot = step % V_STAGES
        mbarrier.wait(k_full.index(slot), (step // K_STAGES) & 1)
        s = warpgroup_mma(
            q, k_s.index(slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
            use_acc=False, is_async=True,
        )  # fmt: skip
        mbarrier.wait(v_full.index(v_slot), (step // V_STAGES) & 1)
        dp = warpgroup_mma(
            do, v_s.index(v_slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
            use_acc=False, is_async=True,
        )  # fmt: skip
        s, dp = warpgroup_mma_wait(0, [s, dp])
        mbarrier.arrive(v_empty.index(v_slot))
        p, e = silu_and_slope(s, half_alpha)
        e = _masked_slope(e, i, row + WG * 64, history, S_LAYOUT)
        ds = gl.convert_layout((dp * e + dp).to(dtype), P_LAYOUT)
        step += 1
        for index in range(SKIPPED + 1, blocks):
            slot = step % K_STAGES
            v_slot = step % V_STAGES
            previous = (step - 1) % K_STAGES
            mbarrier.wait(k_full.index(slot), (step // K_STAGES) & 1)
            s = warpgroup_mma(
                q, k_s.index(slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
                use_acc=False, is_async=True,
            )  # fmt: skip
            mbarrier.wait(v_full.index(v_slot), (step // V_STAGES) & 1)
            dp = warpgroup_mma(
                do, v_s.index(v_slot).permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT),
                use_acc=False, is_async=True,
            )  # fmt: skip
            dq = warpgroup_mma(ds, k_s.index(previous), dq, is_async=True)
            s, dp = warpgroup_mma_wait(1, [s, dp])
            mbarrier.arrive(v_empty.index(v_slot))
            p, e = silu_and_slope(s, half_alpha)
            if index < masked:
                e = _masked_slope(e, i, key_block_row(index, row, history, 2), history, S_LAYOUT)
            d = dp * e + dp
            # A wait that is already over, but a branch: it keeps the assembler from hoisting the next one.
            mbarrier.wait(k_full.index(previous), ((step - 1) // K_STAGES) & 1)
            dq, d = warpgroup_mma_wait(0, [dq, d])
            mbarrier.arrive(k_empty.index(previous))
            ds = gl.convert_layout(d.to(dtype), P_LAYOUT)
            step += 1
        mbarrier.arrive(q_empty.index(buffer))
        previous = (step - 1) % K_STAGES
        dq = warpgroup_mma(ds, k_s.index(previous), dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
        mbarrier.arrive(k_empty.index(previous))
        r = row + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
        c = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        rows = WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
        base = DQ + (first.to(gl.int64) + row) * dq_stride + head * dq_head
        gl.store(base + (rows[:, None] * dq_stride + c[None, :]), (dq * scale).to(dtype), mask=(r < length)[:, None])
        turn += 1
        tile = take_tile(turn, tile_s, tile_full, tile_empty)


@gluon.jit(do_not_specialize=("num_blocks", "tiles"))
def hopper_backward_q(
    q_desc, k_desc, v_desc, do_desc, DQ, Offsets, Targets, Counter, norm, alpha, num_blocks, tiles, heads: gl.constexpr,
    dq_stride: gl.constexpr, dq_head: gl.constexpr,
    D: gl.constexpr, BUFFERS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    NORM_IS_TENSOR: gl.constexpr, HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """dQ under the causal, target-aware mask; descriptors are [T, heads * D] in blocks of [64, D]."""
    q_s = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS * 2, 64, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [BUFFERS * 2, 64, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, 64, D], v_desc.layout)
    q_full, q_empty = barrier_pairs(BUFFERS, 2)
    k_full, k_empty = barrier_pairs(K_STAGES, 2)
    v_full, v_empty = barrier_pairs(V_STAGES, 2)
    tile_s = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full, tile_empty = barrier_pairs(2, 2)
    fence_async_shared()
    if NORM_IS_TENSOR:
        scale = 1.0 / gl.load(norm).to(gl.float32)
    else:
        scale = 1.0 / norm
    half_alpha = alpha * 0.5
    dq_scale = scale * half_alpha
    gl.warp_specialize(
        [
            (_consume_keys, (
                DQ, Offsets, Targets, tile_s, tile_full, tile_empty, q_s, do_s, k_s, v_s, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, dq_scale, half_alpha, num_blocks, tiles, heads, dq_stride, dq_head, D,
                BUFFERS, K_STAGES, V_STAGES, HAS_TARGETS, 0,
            )),
            (_consume_keys, (
                DQ, Offsets, Targets, tile_s, tile_full, tile_empty, q_s, do_s, k_s, v_s, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, dq_scale, half_alpha, num_blocks, tiles, heads, dq_stride, dq_head, D,
                BUFFERS, K_STAGES, V_STAGES, HAS_TARGETS, 1,
            )),
            (_produce_keys, (
                q_desc, k_desc, v_desc, do_desc, Offsets, Targets, Counter, tile_s, tile_full, tile_empty, q_s,
                do_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, num_blocks, tiles, heads, D,
                BUFFERS, K_STAGES, V_STAGES, HAS_TARGETS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
