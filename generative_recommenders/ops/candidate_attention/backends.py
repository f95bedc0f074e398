"""What the kernels of candidate attention can serve, and the one place that imports them."""

from __future__ import annotations

import functools

import torch

from generative_recommenders.ops.candidate_attention.call import CandidateShape, operand_columns
from generative_recommenders.ops.dispatch import why_not_triton

MAX_WIDTH = 1024


@functools.cache
def kernels():
    """The launches; imported on first use, since Triton is optional."""
    from generative_recommenders.ops.candidate_attention import launch

    return launch


def why_not_kernels(call: CandidateShape) -> str | None:
    """Why the Triton kernels cannot serve a call, or ``None``."""
    reason = why_not_triton(call.device, call.dtype)
    if reason is None and call.computation == "absorbed":
        return why_not_absorbed(call.width, call.dtype, call.num_heads)
    if reason is None and not call.summary.one_each:
        return "the materialised kernels take exactly one target per sequence"
    return reason


def why_not_absorbed(width: int, dtype: torch.dtype, num_heads: int) -> str | None:
    """Why the absorbed kernels cannot serve rows of this width with this many heads, or ``None``."""
    if width > MAX_WIDTH:
        return f"embedding width {width} is above {MAX_WIDTH}"
    least, most = operand_columns(width, dtype, num_heads)
    if least > most:
        return f"{num_heads} heads at embedding width {width} in {dtype} need more shared memory than there is"
    return None
