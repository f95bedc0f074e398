"""Which Triton kernels run a call: the Hopper ones where they serve it, plain Triton otherwise.

What else a fused layer launches around attention, norms and column sums, is at hand here too.
"""

from __future__ import annotations

import contextlib

import torch

from generative_recommenders.ops.attention import hopper_launch, triton_launch
from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.common.triton_column_sums import sum_columns
from generative_recommenders.ops.common.triton_layer_norm import normalize, normalize_backward

__all__ = ["backward_into", "forward_into", "normalize", "normalize_backward", "sum_columns", "variant"]

VARIANTS = ("plain", "hopper")
_wanted: list[str | None] = [None]


@contextlib.contextmanager
def variant(name: str | None):
    """Force "plain" or "hopper" kernels inside a ``with`` block (tests, benchmarks); ``None``: automatic choice."""
    if name is not None and name not in VARIANTS:
        raise ValueError(f"attention kernels {name!r} are not known: use one of {', '.join(VARIANTS)}")
    before, _wanted[0] = _wanted[0], name
    try:
        yield
    finally:
        _wanted[0] = before


def _choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall):
    if _wanted[0] == "plain":
        return triton_launch
    reason = hopper_launch.why_not_hopper(q, k, v, call)
    if _wanted[0] == "hopper" and reason is not None:
        raise ValueError(f"attention: the Hopper kernels cannot serve this call: {reason}")
    return triton_launch if reason is not None else hopper_launch


def _last_contiguous(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


def forward_into(q, k, v, out, call: AttentionCall) -> None:
    """Write the attention of q, k [T, H, d_qk] and v [T, H, d_v] into ``out`` [T, H, d_v], all of any row stride."""
    q, k, v = (_last_contiguous(t) for t in (q, k, v))
    _choose(q, k, v, call).launch_forward(q, k, v, out, call)


def backward_into(dout, q, k, v, dq, dk, dv, call: AttentionCall) -> None:
    """Write the gradients for ``dout`` [T, H, d_v] into dq, dk and dv (shapes of q, k, v, any row stride).

    No atomics: two runs give equal bits. Gradient buffers need no zeroing and are only written.
    """
    dout, q, k, v = (_last_contiguous(t) for t in (dout, q, k, v))
    _choose(q, k, v, call).launch_backward(dout, q, k, v, dq, dk, dv, call)
