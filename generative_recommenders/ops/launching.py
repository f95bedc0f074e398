"""What launches of Triton kernels have in common: the device's size and the options beside a kernel's arguments."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 stands for the interpreter's CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_options(warps: int, registers: int | None) -> dict[str, int]:
    """Launch options for so many warps per program; ``registers`` caps each thread (``None``: no cap)."""
    options = {"num_warps": warps}
    if registers is not None and torch.version.hip is None:  # a CUDA-only option
        options["maxnreg"] = registers
    return options
