"""The accelerators a dry run can plan for: memory, dense peak, and how fast ranks reach each other."""

from __future__ import annotations

import dataclasses
import re

from generative_recommenders.errors import UserError
from generative_recommenders.train.flops import PEAK_TFLOPS

GIB = 2**30

#: One port of 400 Gbit/s per accelerator, bytes per second and direction.
NETWORK = 400e9 / 8


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of accelerator.

    Attributes:
        name: as the driver gives it, a key of ``flops.PEAK_TFLOPS``.
        memory: bytes that a process finds on it.
        bandwidth: of that memory, bytes per second.
        link: bytes per second and direction to the other accelerators of its host (data sheets).
        warp_specialised: whether the attention kernels written for its generation can run.
    """

    name: str
    memory: float
    bandwidth: float
    link: float
    warp_specialised: bool = False

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s at ``bfloat16`` or ``float32``."""
        return PEAK_TFLOPS[self.name][dtype] * 1e12


DEVICE_KINDS = {
    "a100": DeviceKind("NVIDIA A100-SXM4-80GB", 79 * GIB, 2.0e12, 300e9),
    "h100": DeviceKind("NVIDIA H100 80GB HBM3", 79 * GIB, 3.35e12, 450e9, True),
    "h200": DeviceKind("NVIDIA H200", 139 * GIB, 4.8e12, 450e9, True),
    "b200": DeviceKind("NVIDIA B200", 178 * GIB, 8.0e12, 900e9),
    "mi300x": DeviceKind("AMD Instinct MI300X", 191 * GIB, 5.3e12, 448e9),
    "mi325x": DeviceKind("AMD Instinct MI325X", 255 * GIB, 6.0e12, 448e9),
}


def device_kind(name: str) -> DeviceKind:
    """The kind of that short name; ``UserError`` for one that is not known."""
    if name.lower() not in DEVICE_KINDS:
        raise UserError(f"--device-kind {name!r}: expected one of {', '.join(DEVICE_KINDS)}")
    return DEVICE_KINDS[name.lower()]


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {f"{_letter}ib": 2 ** (10 * _power), f"{_letter}b": 1000**_power}


def parse_bytes(option: str, text: str) -> int:
    """``139GiB``, ``1TiB``, ``80 GB`` → bytes; ``UserError`` naming the option for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    unit = found and found.group(2).lower()
    if not found or unit not in _UNITS or float(found.group(1)) <= 0:
        raise UserError(f"{option} {text!r}: expected a size above 0 such as 139GiB, 1TiB or 80GB")
    return int(float(found.group(1)) * _UNITS[unit])


def gib(amount: float) -> str:
    """Bytes as GiB for a person."""
    return f"{amount / GIB:,.1f} GiB"
