"""How LMSD kernels are launched: a rule of the block width, the dtype and the pass, never of N, strides or seed.

No autotuning: the first call is as fast as the second, and a run's choice does not depend on what else the GPU was
doing. The rule's constants come from ``benchmarks/lmsd.py --sweep``.
"""

from __future__ import annotations

import dataclasses

import torch

from generative_recommenders.ops.launching import launch_options, multiprocessors


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Launch of one kernel.

    Attributes:
        units: rows (row groups) a program works on at a time.
        warps: warps per program.
        vector: neighbouring columns per thread, 4 or 8; 4 where the kernel draws dropout.
        programs_per_sm: persistent programs per multiprocessor.
        max_registers: cap per thread, or ``None``.
    """

    units: int
    warps: int
    vector: int
    programs_per_sm: int
    max_registers: int | None = None

    def options(self) -> dict[str, int]:
        """The launch options that Triton takes beside the kernel's arguments."""
        return launch_options(self.warps, self.max_registers)


MAX_WARPS = 16
REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor; 32 times the warps' caps must fit


def choose_launch(block: int, dtype: torch.dtype, backward: bool, dropout: bool) -> LaunchConfig:
    """As few warps per row as registers allow, so that a row seldom leaves its warp and nothing waits at a barrier.

    - backward: 512 elements per warp (16 per thread), as many programs as are resident, since each keeps partial
      weight gradients for its whole life;
    - forward with dropout: 512 per warp, but rows of up to 256 get 256, one row per warp: Philox takes the registers;
    - forward without: 1024 per warp, for loads in flight; nothing else takes registers.

    The forward passes have nothing to keep, so they launch many more programs than fit and let the hardware even them
    out. Measured on an H200 at D = 256, 512 and 1024 (bfloat16); other widths follow the same rule.

    Args:
        block: columns of a unit, padded to a power of two.
        dtype: of x.
    """
    vector = 4 if dropout and not backward or dtype == torch.float32 else 8
    per_warp = 512 if backward or dropout else 1024
    if dropout and not backward and block <= 256:
        per_warp = 256
    warps = min(MAX_WARPS, max(1, block // per_warp))
    units = max(1, per_warp // block)
    if backward or (dropout and warps > 1):
        registers, programs = 168, max(1, 12 // warps)
    else:
        registers = 80 if per_warp == 256 else 128 if block <= 512 else 168
        programs = 256 // warps
    return LaunchConfig(units, warps, vector, programs, max_registers=min(registers, REGISTER_FILE // (32 * warps)))


def interpreter_launch(block: int, vector: int) -> LaunchConfig:
    """Many units per program: the interpreter pays per program and per operation, not per element."""
    return LaunchConfig(units=max(1, 16384 // block), warps=1, vector=vector, programs_per_sm=2)


def grid_size(config: LaunchConfig, total: int, device: torch.device) -> int:
    """Persistent programs: never more than there are blocks of units."""
    return min(-(-total // config.units), multiprocessors(device) * config.programs_per_sm)
