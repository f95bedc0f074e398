"""Launch configurations of the attention kernels: a table by architecture and head width, and the rule behind it.

Rule. Half-precision tiles keep a program's fp32 accumulators within 64 to 128 registers per thread: forward 64 x 64
(queries x keys) with 4 warps, dQ 128 x 64 and dK/dV 64 x 128 with 8 warps up to a padded head width of 128, half of
that at 256. The pipeline is as deep as shared memory allows: three stages with 227 KiB (sm_90, sm_100), two with 163
KiB (sm_80). GPUs with less (99 KiB: sm_86, sm_89, sm_120; 64 KiB: gfx942; 160 KiB but no asynchronous copies: gfx950)
take 64 x 64 tiles with 4 warps and one stage. float32 tiles are 32 x 32. Measured on an H200 (sm_90) only; the other
lines follow the rule and are not measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib

import torch

KERNELS = ("forward", "backward_kv", "backward_q")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Tile of queries and keys, warps and pipeline stages of one kernel launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def width_bucket(d_qk: int, d_v: int) -> int:
    """Padded head width that decides the tile: 32 (and below), 64, 128 or 256."""
    widest = max(d_qk, d_v)
    return next(width for width in (32, 64, 128, 256) if widest <= width)


def architecture_of(device: torch.device) -> str:
    """ "sm_90" style name of a CUDA device, "gfx942" style of a ROCm one, "interpreter" for the CPU."""
    if device.type != "cuda":
        return "interpreter"
    return _architecture(device.index if device.index is not None else torch.cuda.current_device())


@functools.lru_cache
def _architecture(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


_STAGES = {"sm_80": 2, "sm_90": 3, "sm_100": 3, "sm_103": 3}


def default_config(kernel: str, architecture: str, d_qk: int, d_v: int, dtype: torch.dtype) -> LaunchConfig:
    """The shipped configuration of ``kernel`` (one of ``KERNELS``) by the rule at the top of this file."""
    width = width_bucket(d_qk, d_v)
    if architecture == "interpreter":
        return LaunchConfig(16, 16, 4, 1)
    stages = _STAGES.get(architecture, 1)
    if dtype == torch.float32:
        return LaunchConfig(32, 32, 4, 1 if width == 256 else min(stages, 2))
    if width == 256 and stages == 1 and kernel == "backward_kv":
        return LaunchConfig(32, 32, 4, 1)
    if width == 256:
        return LaunchConfig(32, 64, 8, 1) if kernel == "backward_kv" else LaunchConfig(64, 32, 8, min(stages, 2))
    if width < 64 or kernel == "forward" or stages == 1:
        return LaunchConfig(64, 64, 4, stages)
    return LaunchConfig(64, 128, 8, stages) if kernel == "backward_kv" else LaunchConfig(128, 64, 8, stages)


def tuned_file() -> pathlib.Path:
    """Where ``tune.py`` keeps what it found; survives the process."""
    root = os.path.expanduser("~")
    return pathlib.Path(root, ".cache", "generative_recommenders", "attention.json")


@functools.lru_cache(maxsize=1)
def tuned_table() -> dict[str, LaunchConfig]:
    """Configurations found by an earlier tuning run, or an empty table; a damaged file counts as empty."""
    try:
        entries = json.loads(tuned_file().read_text(encoding="utf-8"))
        return {key: LaunchConfig(**value) for key, value in entries.items()}
    except (OSError, ValueError, TypeError):
        return {}


def table_key(kernel: str, architecture: str, d_qk: int, d_v: int, dtype: torch.dtype) -> str:
    return f"{kernel}/{architecture}/{width_bucket(d_qk, d_v)}/{str(dtype).removeprefix('torch.')}"


def launch_config(kernel: str, device: torch.device, d_qk: int, d_v: int, dtype: torch.dtype) -> LaunchConfig:
    """What to launch: the forced configuration, else the tuned one, else the shipped one."""
    if kernel in _forced:
        return _forced[kernel]
    architecture = architecture_of(device)
    tuned = tuned_table().get(table_key(kernel, architecture, d_qk, d_v, dtype))
    return tuned or default_config(kernel, architecture, d_qk, d_v, dtype)


_forced: dict[str, LaunchConfig] = {}


@contextlib.contextmanager
def forced(kernel: str, config: LaunchConfig):
    """Launch ``kernel`` with one configuration inside a ``with`` block (tuning and tests)."""
    before = _forced.copy()
    _forced[kernel] = config
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
