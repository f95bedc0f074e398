"""Attention backward in plain Triton, for every GPU: two kernels, no atomics, so two runs give equal bits.

``attention_backward_kv_kernel`` owns a block of keys and walks the queries that see it (four products per pair of
blocks), ``attention_backward_q_kernel`` owns a block of queries and walks the keys (three products): seven products
instead of five, yet faster than one kernel that reduces dQ through memory. 1/N and alpha enter once, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from generative_recommenders.ops.attention.triton_common import (
    inverse_norm,
    key_ranges,
    load_rows,
    query_ranges,
    sequence_of,
    silu_and_slope,
    store_rows,
    visible,
)
from generative_recommenders.ops.attention.triton_fwd import NOT_SPECIALIZED


@triton.jit
def _add_queries(
    dk, dv, k, v, Q, DOut, q_stride, do_stride, m, n0, length, id_max, window, contextual, half_alpha,
    BM: tl.constexpr, BN: tl.constexpr, DQK: tl.constexpr, DV: tl.constexpr, BQK: tl.constexpr, BV: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CONTEXT: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one block of queries to dk and dv; scores are held transposed, [BN, BM]."""
    q = load_rows(Q, q_stride, m, length, BM, DQK, BQK, MASKED)
    do = load_rows(DOut, do_stride, m, length, BM, DV, BV, MASKED)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    p, e = silu_and_slope(scores, half_alpha, FAST)
    ds = dp * e + dp
    if MASKED:
        i = m + tl.arange(0, BM)[None, :]
        j = n0 + tl.arange(0, BN)[:, None]
        seen = visible(i, j, id_max, window, contextual, CAUSAL, HAS_WINDOW, HAS_CONTEXT)
        p = tl.where(seen, p, 0.0)
        ds = tl.where(seen, ds, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_kv_kernel(
    Q, K, V, DOut, DK, DV_, Offsets, Targets, norm, alpha, num_blocks, heads, window, contextual,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, do_stride, do_head, dk_stride, dk_head, dv_stride, dv_head,
    DQK: tl.constexpr, DV: tl.constexpr, BQK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NORM_IS_TENSOR: tl.constexpr, HAS_TARGETS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CONTEXT: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of BN key rows of one (sequence, head)."""
    pid = tl.program_id(0)
    head = (pid // num_blocks % heads).to(tl.int64)
    first, length, history, id_max = sequence_of(
        Offsets, Targets, pid // num_blocks // heads, contextual, HAS_TARGETS, HAS_CONTEXT
    )
    n0 = pid % num_blocks * BN
    if n0 >= length:
        return
    Q += first * q_stride + head * q_head
    K += first * k_stride + head * k_head
    V += first * v_stride + head * v_head
    DOut += first * do_stride + head * do_head
    prefix_end, start, full, tail, end = query_ranges(
        n0, tl.minimum(n0 + BN, length), length, history, id_max, window, contextual,
        BM, CAUSAL, HAS_WINDOW, HAS_CONTEXT,
    )  # fmt: skip
    k = load_rows(K, k_stride, n0, length, BN, DQK, BQK, True)
    v = load_rows(V, v_stride, n0, length, BN, DV, BV, True)
    half_alpha = alpha * 0.5
    dk = tl.zeros((BN, BQK), tl.float32)
    dv = tl.zeros((BN, BV), tl.float32)
    for m in tl.range(full, tail, BM, num_stages=STAGES):
        dk, dv = _add_queries(
            dk, dv, k, v, Q, DOut, q_stride, do_stride, m, n0, length, id_max, window, contextual, half_alpha,
            BM, BN, DQK, DV, BQK, BV, False, CAUSAL, HAS_WINDOW, HAS_CONTEXT, FAST, PRECISION,
        )  # fmt: skip
    prefix_blocks = tl.cdiv(prefix_end, BM)
    diagonal_blocks = prefix_blocks + tl.cdiv(tl.maximum(full - start, 0), BM)
    tail_blocks = diagonal_blocks + tl.cdiv(tl.maximum(end - tail, 0), BM)
    for index in tl.range(0, tail_blocks, num_stages=STAGES):
        m = tl.where(index < prefix_blocks, 0, start - prefix_blocks * BM)
        m = tl.where(index < diagonal_blocks, m, tail - diagonal_blocks * BM) + index * BM
        dk, dv = _add_queries(
            dk, dv, k, v, Q, DOut, q_stride, do_stride, m, n0, length, id_max, window, contextual, half_alpha,
            BM, BN, DQK, DV, BQK, BV, True, CAUSAL, HAS_WINDOW, HAS_CONTEXT, FAST, PRECISION,
        )  # fmt: skip
    scale = inverse_norm(norm, NORM_IS_TENSOR)
    DK += first * dk_stride + head * dk_head
    DV_ += first * dv_stride + head * dv_head
    store_rows(DK, dk_stride, n0, length, dk * (half_alpha * scale), BN, DQK, BQK)
    store_rows(DV_, dv_stride, n0, length, dv * scale, BN, DV, BV)


@triton.jit
def _add_keys(
    dq, q, do, K, V, k_stride, v_stride, m0, n, length, id_max, window, contextual, half_alpha,
    BM: tl.constexpr, BN: tl.constexpr, DQK: tl.constexpr, DV: tl.constexpr, BQK: tl.constexpr, BV: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CONTEXT: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = load_rows(K, k_stride, n, length, BN, DQK, BQK, MASKED)
    v = load_rows(V, v_stride, n, length, BN, DV, BV, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p, e = silu_and_slope(scores, half_alpha, FAST)
    ds = dp * e + dp
    if MASKED:
        i = m0 + tl.arange(0, BM)[:, None]
        j = n + tl.arange(0, BN)[None, :]
        ds = tl.where(visible(i, j, id_max, window, contextual, CAUSAL, HAS_WINDOW, HAS_CONTEXT), ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_q_kernel(
    Q, K, V, DOut, DQ, Offsets, Targets, norm, alpha, num_blocks, heads, window, contextual,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, do_stride, do_head, dq_stride, dq_head,
    DQK: tl.constexpr, DV: tl.constexpr, BQK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NORM_IS_TENSOR: tl.constexpr, HAS_TARGETS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CONTEXT: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of one block of BM query rows of one (sequence, head)."""
    pid = tl.program_id(0)
    block = num_blocks - 1 - pid % num_blocks
    head = (pid // num_blocks % heads).to(tl.int64)
    first, length, history, id_max = sequence_of(
        Offsets, Targets, pid // num_blocks // heads, contextual, HAS_TARGETS, HAS_CONTEXT
    )
    m0 = block * BM
    if m0 >= length:
        return
    Q += first * q_stride + head * q_head
    K += first * k_stride + head * k_head
    V += first * v_stride + head * v_head
    DOut += first * do_stride + head * do_head
    head_at, full_at, tail_at, tail_end, own_at, own_end = key_ranges(
        m0, tl.minimum(m0 + BM, length), length, history, id_max, window, contextual,
        BN, CAUSAL, HAS_WINDOW, HAS_CONTEXT,
    )  # fmt: skip
    q = load_rows(Q, q_stride, m0, length, BM, DQK, BQK, True)
    do = load_rows(DOut, do_stride, m0, length, BM, DV, BV, True)
    half_alpha = alpha * 0.5
    dq = tl.zeros((BM, BQK), tl.float32)
    for n in tl.range(full_at, tail_at, BN, num_stages=STAGES):
        dq = _add_keys(
            dq, q, do, K, V, k_stride, v_stride, m0, n, length, id_max, window, contextual, half_alpha,
            BM, BN, DQK, DV, BQK, BV, False, CAUSAL, HAS_WINDOW, HAS_CONTEXT, FAST, PRECISION,
        )  # fmt: skip
    heads_blocks = tl.cdiv(full_at - head_at, BN)
    tail_blocks = heads_blocks + tl.cdiv(tl.maximum(tail_end - tail_at, 0), BN)
    own_blocks = tail_blocks + tl.cdiv(tl.maximum(own_end - own_at, 0), BN)
    for index in tl.range(0, own_blocks, num_stages=STAGES):
        n = tl.where(index < heads_blocks, head_at, tail_at - heads_blocks * BN)
        n = tl.where(index < tail_blocks, n, own_at - tail_blocks * BN) + index * BN
        dq = _add_keys(
            dq, q, do, K, V, k_stride, v_stride, m0, n, length, id_max, window, contextual, half_alpha,
            BM, BN, DQK, DV, BQK, BV, True, CAUSAL, HAS_WINDOW, HAS_CONTEXT, FAST, PRECISION,
        )  # fmt: skip
    scale = inverse_norm(norm, NORM_IS_TENSOR) * half_alpha
    DQ += first * dq_stride + head * dq_head
    store_rows(DQ, dq_stride, m0, length, dq * scale, BM, DQK, BQK)
