"""How kernels over rows are launched: rules of the width alone, so the first call is as fast as any."""

from __future__ import annotations

import dataclasses
import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 stands for the interpreter's CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded(width: int) -> int:
    """The columns of a row's block: the next power of two."""
    return 1 << (width - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class RowLaunch:
    """Launch of a kernel whose programs walk over tiles of rows with the stride of the grid.

    Attributes:
        block: columns of a row, padded to a power of two.
        rows: rows of a tile.
        warps: warps per program.
        programs: programs per multiprocessor.
        registers: cap per thread, ``None`` for none.
        vector: neighbouring columns per thread, for kernels that fix it.
    """

    block: int
    rows: int
    warps: int
    programs: int
    registers: int | None = None
    vector: int = 1

    def options(self) -> dict[str, int]:
        """Launch options beside the kernel's arguments."""
        options = {"num_warps": self.warps}
        if self.registers is not None and torch.version.hip is None:  # a CUDA-only option
            options["maxnreg"] = self.registers
        return options

    def grid(self, rows: int, device: torch.device) -> tuple[int]:
        """Programs for so many rows: never more than there are tiles."""
        return (min(-(-rows // self.rows), self.programs * multiprocessors(device)),)


def row_launch(width: int, device: torch.device, resident: int | None = None, registers: int = 128) -> RowLaunch:
    """A warp per 512 columns, so that a row's sums seldom leave its warp; shorter rows share a warp.

    Measured on an H200 at 2.7 M rows of 256 and 512 columns: with more rows or warps per program, barriers and
    registers cost up to twice the time.

    Args:
        width: columns of a row.
        resident: warps per multiprocessor that run at once, for programs that add up columns over their life: more
            would let the last ones run alone. ``None``: many more than are resident, which the hardware evens out.
        registers: cap per thread.
    """
    block = padded(width)
    if device.type != "cuda":
        return RowLaunch(block, max(1, 8192 // block), 1, 2, registers)  # the interpreter pays per operation
    warps = min(16, max(1, block // 512))
    programs = max(1, (256 if resident is None else resident) // warps)
    return RowLaunch(block, max(1, 512 // block), warps, programs, min(registers, 2048 // warps))
