"""How LMSD kernels are launched: a rule of the block width, the dtype and the pass, never of N, strides or seed.

No autotuning: the first call is as fast as the second, and a run's choice does not depend on what else the GPU was
doing. The rule's constants come from ``benchmarks/lmsd.py --sweep``.
"""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Launch of one kernel.

    Attributes:
        units: rows (row groups) a program works on at a time.
        warps: warps per program.
        vector: neighbouring columns per thread, 4 or 8; 4 where the kernel draws dropout.
        programs_per_sm: persistent programs per multiprocessor.
        stages: loop stages; above 1 the next block's loads are in flight while this one is computed.
        max_registers: cap per thread, or ``None``.
    """

    units: int
    warps: int
    vector: int
    programs_per_sm: int
    stages: int = 1
    max_registers: int | None = None

    def options(self) -> dict[str, int]:
        """The launch options that Triton takes beside the kernel's arguments."""
        options = {"num_warps": self.warps}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


ELEMENTS_PER_WARP = 512  # 16 per thread: enough independent Philox counters and loads, few enough registers


def choose_launch(block: int, dtype: torch.dtype, backward: bool, dropout: bool) -> LaunchConfig:
    """One warp per 512 elements of a block, so that up to D = 512 a row never leaves its warp and nothing waits.

    Args:
        block: columns of a unit, padded to a power of two.
        dtype: of x.
    """
    warps = min(16, max(1, block // ELEMENTS_PER_WARP))
    units = max(1, ELEMENTS_PER_WARP // block)
    vector = 4 if dropout and not backward or dtype == torch.float32 else 8
    return LaunchConfig(units, warps, vector, programs_per_sm=max(1, 16 // warps))


def interpreter_launch(block: int, vector: int) -> LaunchConfig:
    """Many units per program: the interpreter pays per program and per operation, not per element."""
    return LaunchConfig(units=max(1, 16384 // block), warps=1, vector=vector, programs_per_sm=2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 stands for the interpreter's CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def grid_size(config: LaunchConfig, total: int, device: torch.device) -> int:
    """Persistent programs: never more than there are blocks of units."""
    return min(-(-total // config.units), multiprocessors(device) * config.programs_per_sm)
