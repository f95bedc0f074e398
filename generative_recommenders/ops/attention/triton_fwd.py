"""Attention forward in plain Triton, for every GPU.

One program computes BM query rows of one (sequence, head): per visible key block two products, together
2 * BM * BN * (d_qk + d_v) FLOPs, and BN * (d_qk + d_v) elements read; the output is written once. The longest blocks of
a sequence start first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from generative_recommenders.ops.attention.triton_common import (
    inverse_norm,
    key_ranges,
    load_rows,
    sequence_of,
    silu,
    store_rows,
    visible,
)

NOT_SPECIALIZED = ("num_blocks", "heads", "window", "contextual")


@triton.jit
def _add_block(
    acc, q, K, V, k_stride, v_stride, m0, n, length, id_max, window, contextual, half_alpha,
    BM: tl.constexpr, BN: tl.constexpr, DQK: tl.constexpr, DV: tl.constexpr, BQK: tl.constexpr, BV: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CONTEXT: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = load_rows(K, k_stride, n, length, BN, DQK, BQK, MASKED)
    v = load_rows(V, v_stride, n, length, BN, DV, BV, MASKED)
    p = silu(tl.dot(q, tl.trans(k), input_precision=PRECISION), half_alpha, FAST)
    if MASKED:
        i = m0 + tl.arange(0, BM)[:, None]
        j = n + tl.arange(0, BN)[None, :]
        p = tl.where(visible(i, j, id_max, window, contextual, CAUSAL, HAS_WINDOW, HAS_CONTEXT), p, 0.0)
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_kernel(
    Q, K, V, Out, Offsets, Targets, norm, alpha, num_blocks, heads, window, contextual,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head,
    DQK: tl.constexpr, DV: tl.constexpr, BQK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NORM_IS_TENSOR: tl.constexpr, HAS_TARGETS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CONTEXT: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Out = mask * SiLU(alpha * Q K^T) / norm * V for one block of query rows of one (sequence, head)."""
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
    m1 = tl.minimum(m0 + BM, length)
    head_at, full_at, tail_at, tail_end, own_at, own_end = key_ranges(
        m0, m1, length, history, id_max, window, contextual, BN, CAUSAL, HAS_WINDOW, HAS_CONTEXT
    )
    q = load_rows(Q, q_stride, m0, length, BM, DQK, BQK, True)
    half_alpha = alpha * 0.5
    acc = tl.zeros((BM, BV), tl.float32)
    for n in tl.range(full_at, tail_at, BN, num_stages=STAGES):
        acc = _add_block(
            acc, q, K, V, k_stride, v_stride, m0, n, length, id_max, window, contextual, half_alpha,
            BM, BN, DQK, DV, BQK, BV, False, CAUSAL, HAS_WINDOW, HAS_CONTEXT, FAST, PRECISION,
        )  # fmt: skip
    heads_blocks = tl.cdiv(full_at - head_at, BN)
    tail_blocks = heads_blocks + tl.cdiv(tl.maximum(tail_end - tail_at, 0), BN)
    own_blocks = tail_blocks + tl.cdiv(tl.maximum(own_end - own_at, 0), BN)
    for index in tl.range(0, own_blocks, num_stages=STAGES):
        n = tl.where(index < heads_blocks, head_at, tail_at - heads_blocks * BN)
        n = tl.where(index < tail_blocks, n, own_at - tail_blocks * BN) + index * BN
        acc = _add_block(
            acc, q, K, V, k_stride, v_stride, m0, n, length, id_max, window, contextual, half_alpha,
            BM, BN, DQK, DV, BQK, BV, True, CAUSAL, HAS_WINDOW, HAS_CONTEXT, FAST, PRECISION,
        )  # fmt: skip
    Out += first * out_stride + head * out_head
    store_rows(Out, out_stride, m0, length, acc * inverse_norm(norm, NORM_IS_TENSOR), BM, DV, BV)
