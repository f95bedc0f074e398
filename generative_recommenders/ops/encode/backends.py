"""Whether this package's kernels serve, and where they are imported."""

from __future__ import annotations

import dataclasses
import functools

import torch

from generative_recommenders.ops.dispatch import Backend, Implementation, Op, never, why_not_triton

MAX_WIDTH = 4096


@dataclasses.dataclass(frozen=True)
class EncodeShape:
    """What decides which backend serves a call: device and dtype of its rows."""

    device: torch.device
    dtype: torch.dtype


def _why_not_triton(call: EncodeShape) -> str | None:
    return why_not_triton(call.device, call.dtype)


#: Of a family of functions: each asks which backend serves, and where it is PYTORCH its caller composes.
ENCODE = Op("encode", {Backend.TRITON: Implementation(_why_not_triton), Backend.PYTORCH: Implementation(never)})


def why_not_fused(rows: torch.Tensor | EncodeShape, *widths: int, backend: Backend | str | None = None) -> str | None:
    """Why the functions of this package cannot serve, or ``None``.

    Args:
        rows: a tensor of the call's device and dtype, or these alone.
        widths: numbers of columns that are normalised, D or the hidden width.
        backend: "TRITON" or "PYTORCH"; None takes HSTU_ENCODE_BACKEND, HSTU_BACKEND, or TRITON on a GPU.

    Raises:
        BackendUnavailable: TRITON was asked for by name and cannot serve the rows' device or dtype. A width that it
            cannot serve is a reason that is returned: a model may well have one narrow layer.
    """
    chosen = ENCODE.choose(EncodeShape(rows.device, rows.dtype), backend)
    if chosen is not Backend.TRITON:
        return f"backend {chosen.value} was chosen"
    for width in widths:
        if width % 8 or not 8 <= width <= MAX_WIDTH:
            return f"{width} columns: kernels take multiples of 8 up to {MAX_WIDTH}"
    return None


@functools.cache
def kernels():
    """The launches; imported on first use, since Triton is optional."""
    from generative_recommenders.ops.encode import launch

    return launch
