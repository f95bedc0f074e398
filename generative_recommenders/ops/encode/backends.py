"""Whether this package's kernels serve, and where they are imported."""

from __future__ import annotations

import torch

from generative_recommenders.ops.dispatch import Backend, always, choose_backend, why_not_triton

MAX_WIDTH = 4096


def why_not_fused(rows: torch.Tensor, *widths: int, backend: Backend | str | None = None) -> str | None:
    """Why the functions of this package cannot serve, or ``None``.

    Args:
        rows: a tensor of the call's device and dtype.
        widths: numbers of columns that are normalised, D or the hidden width.
        backend: "TRITON" or "PYTORCH"; None takes HSTU_ENCODE_BACKEND, HSTU_BACKEND, or TRITON on a GPU.

    Raises:
        BackendUnavailable: TRITON was asked for by name and cannot serve the rows' device or dtype. A width that it
            cannot serve is a reason that is returned: a model may well have one narrow layer.
    """
    checks = {Backend.TRITON: lambda: _why_not_triton(rows), Backend.PYTORCH: always}
    # On a CPU the interpreter is for whoever asks for it.
    checks = checks if rows.device.type == "cuda" else dict(reversed(checks.items()))
    chosen = choose_backend("encode", backend, checks)
    if chosen is not Backend.TRITON:
        return f"backend {chosen.value} was chosen"
    for width in widths:
        if width % 8 or not 8 <= width <= MAX_WIDTH:
            return f"{width} columns: kernels take multiples of 8 up to {MAX_WIDTH}"
    return None


def _why_not_triton(rows: torch.Tensor) -> str | None:
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {rows.dtype} has no kernel: use float32, float16 or bfloat16"
    return why_not_triton(rows)


def kernels():
    """The launches; imported on first use, since Triton is optional."""
    from generative_recommenders.ops.encode import launch

    return launch
