"""Checks that ops share. Kernels read vectors without strides and trust sizes, so both are settled before."""

from __future__ import annotations

import torch


def vector(name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor ``[size]`` with its elements side by side.

    Raises:
        ValueError: another shape.
    """
    if tuple(tensor.shape) != (size,):
        raise ValueError(f"{name} must be [{size}]: got {tuple(tensor.shape)}")
    return tensor.contiguous()


def matrix(name: str, tensor: torch.Tensor, columns: int, rows: int | None = None) -> torch.Tensor:
    """A tensor ``[rows, columns]`` (any number of rows for ``None``), as it came.

    Raises:
        ValueError: another shape.
    """
    if tensor.dim() != 2 or tensor.shape[1] != columns or rows not in (None, tensor.shape[0]):
        want = f"[{'*' if rows is None else rows}, {columns}]"
        raise ValueError(f"{name} must be {want}: got {tuple(tensor.shape)}")
    return tensor
