"""What LMSD calls accept and return: configuration, named results, and the checks that run before any kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from generative_recommenders.ops.checks import check_indices
from generative_recommenders.ops.common import philox

ALIGNMENT = 16  # bytes, of every row that a kernel reads or writes as vectors
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclasses.dataclass(frozen=True)
class LmsdConfig:
    """The part of a call that fixes what is computed; forward and backward must be given the same one."""

    dropout_ratio: float
    apply_u_silu: bool
    concat_u: bool
    concat_x: bool
    num_groups: int = 1
    eps: float = 1e-6  # forward only: the backward reads the saved statistics

    @property
    def num_segments(self) -> int:
        """Segments of D columns in the result."""
        return 1 + int(self.concat_u) + int(self.concat_x)


@dataclasses.dataclass(frozen=True)
class LmsdShape:
    """What decides which backend serves a call.

    Attributes:
        device, dtype: of x. parameter_dtypes: of weight and bias.
        rows, columns: N and D.
        cfg: the call's configuration.
        indexed: whether it has ``row_indices``.
        seed_on_device: whether its seed is a tensor.
    """

    device: torch.device
    dtype: torch.dtype
    parameter_dtypes: tuple[torch.dtype, ...]
    rows: int
    columns: int
    cfg: LmsdConfig
    indexed: bool = False
    seed_on_device: bool = False

    @classmethod
    def of(cls, x, weight, bias, cfg: LmsdConfig, row_indices=None, seed: int | torch.Tensor = 0) -> LmsdShape:
        """Of a call with these arguments."""
        indexed, on_device = row_indices is not None, isinstance(seed, torch.Tensor)
        rows, columns = x.shape
        return cls(x.device, x.dtype, (weight.dtype, bias.dtype), rows, columns, cfg, indexed, on_device)


class _Named(tuple):
    """Lets a named tuple be read by key too: ``result["y_tensor"]``, ``result.y_tensor``, ``y, mean, ... = result``."""

    __slots__ = ()
    _fields: Any

    def __getitem__(self, key):
        if isinstance(key, str):
            if key not in self._fields:
                raise KeyError(f"{key!r}: this result has {', '.join(self._fields)}")
            return getattr(self, key)
        return tuple.__getitem__(self, key)

    def keys(self):
        """The names, in order."""
        return self._fields

    def items(self):
        """``(name, tensor)`` pairs, in order."""
        return tuple(zip(self._fields, self, strict=True))


class _ForwardFields(NamedTuple):
    y_tensor: torch.Tensor
    mean_tensor: torch.Tensor
    rstd_tensor: torch.Tensor
    mask_tensor: torch.Tensor | None


class _BackwardFields(NamedTuple):
    dx_tensor: torch.Tensor
    du_tensor: torch.Tensor
    dweight_tensor: torch.Tensor | None
    dbias_tensor: torch.Tensor


class LmsdForward(_Named, _ForwardFields):
    """``y`` ``[N, D * segments]``, float32 ``mean`` and ``rstd`` ``[N]`` (``[N, H]`` with groups; float64 for float64
    inputs), int8 ``mask`` ``[N, D]`` or ``None`` at dropout 0."""

    __slots__ = ()


class LmsdBackward(_Named, _BackwardFields):
    """Gradients in the dtypes of x, u, weight and bias; ``dweight`` is ``None`` when it was not asked for."""

    __slots__ = ()


def check_inputs(x: torch.Tensor, u: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cfg: LmsdConfig) -> None:
    """Raise ``TypeError`` or ``ValueError`` for dtypes, shapes, devices and settings no backend serves."""
    philox.check_dropout_ratio(cfg.dropout_ratio)
    if not (math.isfinite(cfg.eps) and cfg.eps >= 0):
        raise ValueError(f"lmsd: eps={cfg.eps} must be a finite number, 0 or more")
    for name, tensor in (("x", x), ("u", u), ("weight", weight), ("bias", bias)):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"lmsd: {name} has dtype {tensor.dtype}: use one of {', '.join(map(str, FLOATS))}")
        if tensor.device != x.device:
            raise ValueError(f"lmsd: {name} is on {tensor.device} but x is on {x.device}: move them to one device")
    if u.dtype != x.dtype:
        raise TypeError(f"lmsd: u has dtype {u.dtype} but x has {x.dtype}: cast one of them")
    if x.dim() != 2 or u.shape != x.shape:
        raise ValueError(f"lmsd: x and u must both be [N, D]; got {list(x.shape)} and {list(u.shape)}")
    columns = x.shape[1]
    if columns < 8 or columns % 8:
        raise ValueError(f"lmsd: D={columns} must be a positive multiple of 8")
    if cfg.num_groups < 1 or columns % cfg.num_groups:
        raise ValueError(f"lmsd: num_groups={cfg.num_groups} must divide D={columns}")
    parameters = columns if cfg.num_groups == 1 else cfg.num_groups
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor.shape != (parameters,):
            raise ValueError(f"lmsd: {name} has shape {list(tensor.shape)} but needs [{parameters}]")


def check_row_indices(row_indices: torch.Tensor | None, x: torch.Tensor) -> None:
    """``row_indices`` must be row numbers (0 or more), one per row of x, on its device."""
    if row_indices is None:
        return
    if row_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lmsd: row_indices has dtype {row_indices.dtype}: use int64 or int32")
    if row_indices.shape != (x.shape[0],):
        raise ValueError(f"lmsd: row_indices has shape {list(row_indices.shape)} but x has {x.shape[0]} rows")
    if row_indices.device != x.device:
        raise ValueError(f"lmsd: row_indices is on {row_indices.device} but x is on {x.device}")
    check_indices("lmsd: row_indices", row_indices)


def check_seed(seed: int | torch.Tensor, x: torch.Tensor) -> None:
    """A seed is a signed 64-bit integer or an int64 tensor of one element on the device of x."""
    if not isinstance(seed, torch.Tensor):
        philox.signed_seed(seed)
        return
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(f"lmsd: seed tensor must be int64 with 1 element; got {seed.dtype} with {seed.numel()}")
    if seed.device != x.device:
        raise ValueError(f"lmsd: seed is on {seed.device} but x is on {x.device}: the kernel reads it on the device")


def check_saved(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    mask: torch.Tensor | None,
    cfg: LmsdConfig,
) -> None:
    """The upstream gradient and what forward saved must belong to these inputs and this configuration."""
    rows, columns = x.shape
    wide = cfg.num_segments * columns
    if dy.shape != (rows, wide):
        raise ValueError(
            f"lmsd: dy has shape {list(dy.shape)} but N={rows}, D={columns}, concat_u={cfg.concat_u}, "
            f"concat_x={cfg.concat_x} make [{rows}, {wide}]: pass forward's configuration"
        )
    if dy.dtype != x.dtype:
        raise TypeError(f"lmsd: dy has dtype {dy.dtype} but x has {x.dtype}: cast it")
    shape = (rows,) if cfg.num_groups == 1 else (rows, cfg.num_groups)
    wide_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        if tensor.shape != shape or tensor.dtype != wide_dtype:
            raise ValueError(
                f"lmsd: {name} is {tensor.dtype} {list(tensor.shape)} but forward saved {wide_dtype} {list(shape)}"
            )
    if (mask is not None) != (cfg.dropout_ratio > 0):
        has = "no mask" if mask is None else "a mask"
        raise ValueError(f"lmsd: dropout_ratio={cfg.dropout_ratio} with {has}: pass what forward used and returned")
    if mask is not None and (mask.dtype != torch.int8 or mask.shape != x.shape):
        raise ValueError(f"lmsd: mask is {mask.dtype} {list(mask.shape)} but forward saved int8 {list(x.shape)}")


def why_unaligned(tensor: torch.Tensor) -> str | None:
    """Why a kernel cannot read rows of this ``[N, D]`` tensor as 16-byte vectors, or ``None``."""
    if tensor.data_ptr() % ALIGNMENT:
        return f"its first element is not {ALIGNMENT}-byte aligned"
    if tensor.shape[0] == 0:
        return None
    if tensor.stride(1) != 1:
        return f"its columns have stride {tensor.stride(1)}"
    if tensor.shape[0] > 1 and (tensor.stride(0) * tensor.element_size()) % ALIGNMENT:
        return f"its row stride of {tensor.stride(0)} elements is no multiple of {ALIGNMENT} bytes"
    return None


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows can be read as 16-byte vectors, else a contiguous copy."""
    return tensor if why_unaligned(tensor) is None else tensor.clone(memory_format=torch.contiguous_format)


def check_aligned(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors whose rows a kernel cannot address, naming each."""
    for name, tensor in tensors.items():
        reason = None if tensor is None else why_unaligned(tensor)
        if reason is not None:
            raise ValueError(f"lmsd: {name} cannot be used by this backend: {reason}; pass {name}.contiguous()")


def check_owned(name: str, tensor: torch.Tensor | None, like: torch.Tensor) -> None:
    """A caller-owned gradient must look like what it is the gradient of, and not overlap itself."""
    if tensor is None:
        return
    if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"lmsd: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} but must be {like.dtype} "
            f"{list(like.shape)} on {like.device}"
        )
    rows_meet = tensor.dim() == 2 and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]
    if tensor.numel() and (tensor.stride(-1) != 1 or rows_meet):
        raise ValueError(f"lmsd: {name} has strides {list(tensor.stride())}: give it unit column stride and own rows")


def _byte_rows(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """(first byte, end byte, bytes between rows, bytes of a row) of a 1-D or 2-D tensor."""
    size = tensor.element_size()
    width = ((tensor.shape[-1] - 1) * tensor.stride(-1) + 1) * size
    pitch = tensor.stride(0) * size if tensor.dim() == 2 and tensor.shape[0] > 1 else 0
    rows = tensor.shape[0] if tensor.dim() == 2 else 1
    return tensor.data_ptr(), tensor.data_ptr() + (rows - 1) * pitch + width, pitch, width


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory. Column blocks of one buffer do not; other interleavings count as sharing."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    a_start, a_end, a_pitch, a_width = _byte_rows(a)
    b_start, b_end, b_pitch, b_width = _byte_rows(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    pitch = a_pitch or b_pitch
    if pitch == 0 or (a_pitch and b_pitch and a_pitch != b_pitch):
        return True
    shift = (b_start - a_start) % pitch
    return not (shift >= a_width and shift + b_width <= pitch)


def check_overlap(outputs: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor | None]) -> None:
    """Outputs must overlap neither inputs nor one another."""
    owned = [(name, tensor) for name, tensor in outputs.items() if tensor is not None]
    others = [(name, tensor) for name, tensor in inputs.items() if tensor is not None]
    for position, (name, tensor) in enumerate(owned):
        for other_name, other in others + owned[:position]:
            if overlap(tensor, other):
                raise ValueError(f"lmsd: {name} overlaps {other_name} in memory: give {name} a buffer of its own")
