"""Attention backward on Hopper: dK/dV, then dQ, without atomics, so two runs give equal bits.

dK/dV: 128 keys per tile, two consumer warpgroups of 64 keys each walk the query blocks (four products per pair of
blocks) and leave the score gradients dS in a scratch buffer. dQ = dS K: 256 queries per tile walk the key blocks (one
product). Five products in all; scores are computed once. The scratch buffer holds dS of a chunk of the batch at a time
(``hopper_launch.SlopePlan``), transposed, in tiles of 64 keys × 64 queries.

Loads past the end of a sequence bring rows of the next one (or zeros past the last): the mask sets their weights and
slopes to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from generative_recommenders.ops.attention.triton_hopper_common import (
    barrier_pairs,
    claim_tile,
    hand_out,
    key_block_row,
    key_blocks,
    silu_and_slope,
    take_tile,
    tile_at,
    tma_load,
    tma_store,
)


@gluon.jit
def _query_blocks(row, length, history):
    """64-row query blocks, from ``row`` on, that see any of the 128 keys from ``row`` on."""
    blocks = (length - row + 63) // 64
    # Candidates are seen by themselves alone.
    return gl.where(row < history, blocks, gl.minimum(blocks, 2))


@gluon.jit
def _scratch_tile(tile, Starts, num_blocks, heads, length):
    """First scratch tile of a (sequence, head): from there, query block m has key block n at m (m + 1) / 2 + n."""
    pair = tile // num_blocks
    blocks = (length + 63) // 64
    return gl.load(Starts + pair // heads) + (pair % heads) * (blocks * (blocks + 1) // 2)


@gluon.jit
def _block_of(step, blocks):
    """Query block that comes as a tile's number ``step``: 0, 1, the last, 2, 3, …: those that may need a mask first."""
    return gl.where(step < 2, step, gl.where(step == 2, blocks - 1, step - 1))


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
            blocks = _query_blocks(row, length, history)
            for number in range(blocks):
                at = first + row + _block_of(number, blocks) * 64
                slot = step % STAGES
                mbarrier.wait(q_empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), 2 * 64 * D * 2)
                tma_load(q_desc, [at, head * D], q_full.index(slot), q_s.index(slot))
                tma_load(do_desc, [at, head * D], q_full.index(slot), do_s.index(slot))
                step += 1
        tile = claim_tile(Counter)
    hand_out(tile, turn, tile_s, tile_full, tile_empty)


@gluon.jit
def _add_block(
    dk, dv, k, v, q, do, block, j, length, history, half_alpha, ds_desc, place, staged, S_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr, MASKED: gl.constexpr, HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """dk and dv plus what query block ``block`` adds; its dS goes to row ``place`` of the scratch buffer."""
    dtype: gl.constexpr = q.dtype
    s = warpgroup_mma(k, q.permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT), use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), gl.zeros([64, 64], gl.float32, S_LAYOUT), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    p, e = silu_and_slope(s, half_alpha)
    if MASKED:
        i = block * 64 + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
        if HAS_TARGETS:
            # Keys past the end may pass the second test: their gradients are not stored.
            limit = gl.where(i < length, gl.minimum(i, history), 0)
            seen = (j[:, None] < limit[None, :]) | (j[:, None] == i[None, :])
        else:
            seen = (j[:, None] <= i[None, :]) & (i < length)[None, :]
        p = gl.where(seen, p, 0.0)
        e = gl.where(seen, e, -1.0)
    dv_next = warpgroup_mma(gl.convert_layout(p.to(dtype), P_LAYOUT), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    ds = (dp * e + dp).to(dtype)
    dk_next = warpgroup_mma(gl.convert_layout(ds, P_LAYOUT), q, dk, is_async=True)
    staged.store(ds)
    fence_async_shared()
    tma_store(ds_desc, [place, 0], staged)
    dv, dk = warpgroup_mma_wait(0, [dv_next, dk_next])
    # There are two places to stage dS: the copy out of the other one is over now.
    tma.store_wait(1)
    return dk, dv


@gluon.jit
def _consume_queries(
    DK, DV, Offsets, Targets, Starts, tile_s, tile_full, tile_empty, k_s, v_s, q_s, do_s, ds_s, ds_desc, kv_full,
    kv_empty, q_full, q_empty, scale, half_alpha,
    num_blocks, tiles, heads: gl.constexpr, dk_stride: gl.constexpr, dk_head: gl.constexpr, dv_stride: gl.constexpr,
    dv_head: gl.constexpr, D: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, HAS_TARGETS: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WG: keys 64 * WG … of every tile; scores are held transposed, [keys, queries].

    Two loops, with masks and without: a branch in one loop would cost it registers that it does not have.
    """
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
        scratch = _scratch_tile(tile, Starts, num_blocks, heads, length) + row // 64 + WG
        query = row // 64
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
        # A skipped step breaks the turns of the two staging places: let the last tile's copies go first.
        tma.store_wait(0)
        for _ in gl.static_range(WG):
            mbarrier.wait(q_full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(q_empty.index(step % STAGES))
            step += 1
        masked = gl.where(WG * 64 + 64 > history, blocks, gl.minimum(blocks, 3))
        for number in range(WG, masked):
            slot = step % STAGES
            mbarrier.wait(q_full.index(slot), (step // STAGES) & 1)
            block = _block_of(number, blocks)
            m = query + block
            dk, dv = _add_block(
                dk, dv, k, v, q_s.index(slot), do_s.index(slot), block, j, length, history, half_alpha, ds_desc,
                (scratch + m * (m + 1) // 2) * 64, ds_s.index(WG * 2 + step % 2), S_LAYOUT, P_LAYOUT, True, HAS_TARGETS,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(slot))
            step += 1
        m = query + masked
        place = (scratch + m * (m - 1) // 2) * 64
        for number in range(masked, blocks):
            slot = step % STAGES
            mbarrier.wait(q_full.index(slot), (step // STAGES) & 1)
            dk, dv = _add_block(
                dk, dv, k, v, q_s.index(slot), do_s.index(slot), number - 1, j, length, history, half_alpha, ds_desc,
                place, ds_s.index(WG * 2 + step % 2), S_LAYOUT, P_LAYOUT, False, HAS_TARGETS,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(slot))
            step += 1
            place += (query + number) * 64
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
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("num_blocks",), do_not_specialize_on_alignment=("Chunk", "Counter"))
def attention_hopper_backward_kv_kernel(
    q_desc, k_desc, v_desc, do_desc, ds_desc, DK, DV, Offsets, Targets, Starts, Chunk, Counter, norm, alpha, num_blocks,
    heads: gl.constexpr,
    dk_stride: gl.constexpr, dk_head: gl.constexpr, dv_stride: gl.constexpr, dv_head: gl.constexpr,
    D: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, NORM_IS_TENSOR: gl.constexpr,
    HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """dK, dV and the scratch buffer's dS of the sequences ``Chunk[0]`` … ``Chunk[1]`` - 1, causal and target-aware.

    Descriptors are [T, heads * D] in blocks of [64, D], that of the scratch buffer [64 * tiles, 64] in [64, 64].
    """
    k_s = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS * 2, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [BUFFERS * 2, 64, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 64, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 64, D], do_desc.layout)
    ds_s = gl.allocate_shared_memory(ds_desc.dtype, [2 * 2, 64, 64], ds_desc.layout)
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
    begin = gl.load(Chunk)
    tiles = (gl.load(Chunk + 1) - begin) * heads * num_blocks
    Offsets += begin
    Targets += begin
    Starts += begin
    gl.warp_specialize(
        [
            (_consume_queries, (
                DK, DV, Offsets, Targets, Starts, tile_s, tile_full, tile_empty, k_s, v_s, q_s, do_s, ds_s, ds_desc,
                kv_full, kv_empty, q_full, q_empty, scale, half_alpha, num_blocks, tiles, heads, dk_stride, dk_head,
                dv_stride, dv_head, D, BUFFERS, STAGES, HAS_TARGETS, 0,
            )),
            (_consume_queries, (
                DK, DV, Offsets, Targets, Starts, tile_s, tile_full, tile_empty, k_s, v_s, q_s, do_s, ds_s, ds_desc,
                kv_full, kv_empty, q_full, q_empty, scale, half_alpha, num_blocks, tiles, heads, dk_stride, dk_head,
                dv_stride, dv_head, D, BUFFERS, STAGES, HAS_TARGETS, 1,
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
def _has_slopes(query, key, length, history):
    """Whether any of the 64 queries from ``query`` on sees any of the 64 keys from ``key`` on (multiples of 64)."""
    return (query < length) & (key <= query) & ((key < history) | (key == query))


@gluon.jit
def _produce_slopes(
    ds_desc, k_desc, Offsets, Targets, Starts, Counter, tile_s, tile_full, tile_empty, ds_s, k_s, full, empty,
    num_blocks, tiles, heads: gl.constexpr, D: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """The producer warp: every tile's key blocks, and beside each the slopes of the warpgroups that see it."""
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row, head, first, length, history = tile_at(
            tile, Offsets, Targets, num_blocks, heads, 64 * WARPGROUPS, True, HAS_TARGETS
        )
        if row < length:
            hand_out(tile, turn, tile_s, tile_full, tile_empty)
            turn += 1
            scratch = _scratch_tile(tile, Starts, num_blocks, heads, length)
            for index in range(key_blocks(row, history, WARPGROUPS)):
                key = key_block_row(index, row, history, WARPGROUPS)
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), 64 * D * 2)
                tma_load(k_desc, [first + key, head * D], full.index(slot), k_s.index(slot))
                for w in gl.static_range(WARPGROUPS):
                    m = row // 64 + w
                    if _has_slopes(m * 64, key, length, history):
                        mbarrier.expect(full.index(slot), 64 * 64 * 2)
                        at = scratch + m * (m + 1) // 2 + key // 64
                        tma_load(ds_desc, [at * 64, 0], full.index(slot), ds_s.index(slot * WARPGROUPS + w))
                    else:
                        mbarrier.arrive(full.index(slot))
                step += 1
        tile = claim_tile(Counter)
    hand_out(tile, turn, tile_s, tile_full, tile_empty)


@gluon.jit
def _consume_slopes(
    DQ, Offsets, Targets, tile_s, tile_full, tile_empty, ds_s, k_s, full, empty, scale, num_blocks, tiles,
    heads: gl.constexpr, dq_stride: gl.constexpr, dq_head: gl.constexpr, D: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, HAS_TARGETS: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup WG: query rows 64 * WG … of every tile."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    turn = 0
    step = 0
    tile = take_tile(turn, tile_s, tile_full, tile_empty)
    while tile < tiles:
        row, head, first, length, history = tile_at(
            tile, Offsets, Targets, num_blocks, heads, 64 * WARPGROUPS, True, HAS_TARGETS
        )
        query = row + WG * 64
        dq = gl.zeros([64, D], gl.float32, O_LAYOUT)
        for index in range(key_blocks(row, history, WARPGROUPS)):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            if _has_slopes(query, key_block_row(index, row, history, WARPGROUPS), length, history):
                slopes = ds_s.index(slot * WARPGROUPS + WG).permute((1, 0))
                dq = warpgroup_mma(slopes, k_s.index(slot), dq, is_async=True)
                dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(empty.index(slot))
            step += 1
        r = gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
        c = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        base = DQ + (first.to(gl.int64) + query) * dq_stride + head * dq_head
        keep = (query + r < length)[:, None]
        gl.store(base + (r[:, None] * dq_stride + c[None, :]), (dq * scale).to(k_s.dtype), mask=keep)
        turn += 1
        tile = take_tile(turn, tile_s, tile_full, tile_empty)


@gluon.jit(do_not_specialize=("num_blocks",), do_not_specialize_on_alignment=("Chunk", "Counter"))
def attention_hopper_backward_q_kernel(
    ds_desc, k_desc, DQ, Offsets, Targets, Starts, Chunk, Counter, norm, alpha, num_blocks, heads: gl.constexpr,
    dq_stride: gl.constexpr, dq_head: gl.constexpr, D: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    NORM_IS_TENSOR: gl.constexpr, HAS_TARGETS: gl.constexpr,
):  # fmt: skip
    """dQ = dS K of the sequences ``Chunk[0]`` … ``Chunk[1]`` - 1 from the scratch buffer that dK/dV left."""
    ds_s = gl.allocate_shared_memory(ds_desc.dtype, [STAGES * WARPGROUPS, 64, 64], ds_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 64, D], k_desc.layout)
    full, empty = barrier_pairs(STAGES, WARPGROUPS, 1 + WARPGROUPS)
    tile_s = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full, tile_empty = barrier_pairs(2, WARPGROUPS)
    fence_async_shared()
    if NORM_IS_TENSOR:
        scale = alpha * 0.5 / gl.load(norm).to(gl.float32)
    else:
        scale = alpha * 0.5 / norm
    begin = gl.load(Chunk)
    tiles = (gl.load(Chunk + 1) - begin) * heads * num_blocks
    Offsets += begin
    Targets += begin
    Starts += begin
    gl.static_assert(WARPGROUPS == 4)
    gl.warp_specialize(
        [
            (_consume_slopes, (
                DQ, Offsets, Targets, tile_s, tile_full, tile_empty, ds_s, k_s, full, empty, scale, num_blocks, tiles,
                heads, dq_stride, dq_head, D, WARPGROUPS, STAGES, HAS_TARGETS, 0,
            )),
            (_consume_slopes, (
                DQ, Offsets, Targets, tile_s, tile_full, tile_empty, ds_s, k_s, full, empty, scale, num_blocks, tiles,
                heads, dq_stride, dq_head, D, WARPGROUPS, STAGES, HAS_TARGETS, 1,
            )),
            (_consume_slopes, (
                DQ, Offsets, Targets, tile_s, tile_full, tile_empty, ds_s, k_s, full, empty, scale, num_blocks, tiles,
                heads, dq_stride, dq_head, D, WARPGROUPS, STAGES, HAS_TARGETS, 2,
            )),
            (_consume_slopes, (
                DQ, Offsets, Targets, tile_s, tile_full, tile_empty, ds_s, k_s, full, empty, scale, num_blocks, tiles,
                heads, dq_stride, dq_head, D, WARPGROUPS, STAGES, HAS_TARGETS, 3,
            )),
            (_produce_slopes, (
                ds_desc, k_desc, Offsets, Targets, Starts, Counter, tile_s, tile_full, tile_empty, ds_s, k_s, full,
                empty, num_blocks, tiles, heads, D, WARPGROUPS, STAGES, HAS_TARGETS,
            )),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 32],
    )  # fmt: skip
