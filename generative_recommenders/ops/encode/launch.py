"""Launches of this package's kernels: buffers, grids and the second stage of the sums around them."""

from __future__ import annotations

import math

import torch

from generative_recommenders.ops.common.launch import row_launch
from generative_recommenders.ops.common.philox import keep_threshold, signed32
from generative_recommenders.ops.encode.triton_copy import copy_rows
from generative_recommenders.ops.encode.triton_encode import encode_backward_kernel, encode_forward_kernel
from generative_recommenders.ops.encode.triton_swish import (
    swish_layer_norm_backward_kernel,
    swish_layer_norm_forward_kernel,
)
from generative_recommenders.ops.encode.triton_table_sums import MOST_SHORT_ENTRIES, table_gradient

__all__ = [
    "MOST_SHORT_ENTRIES", "copy_rows", "encode_context_backward", "encode_rows", "encode_rows_backward",
    "swish_backward", "swish_forward", "table_gradient",
]  # fmt: skip

BACKWARD_LAUNCH = {"resident": 12, "registers": 168}  # two rows and two sums at hand: more registers, fewer warps


def swish_forward(x, weight, bias, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``swish_layer_norm`` of rows x ``[N, D]``, and their mean and reciprocal deviation, fp32 ``[N]``."""
    rows, width = x.shape
    y = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    mean, rstd = torch.empty(2, rows, device=x.device, dtype=torch.float32).unbind()
    if rows > 0:
        launch = row_launch(width, x.device)
        swish_layer_norm_forward_kernel[launch.grid(rows, x.device)](
            x, weight, bias, y, mean, rstd, rows, -(-rows // launch.rows), x.stride(0), y.stride(0), eps,
            D=width, BD=launch.block, ROWS=launch.rows, **launch.options(),
        )  # fmt: skip
    return y, mean, rstd


def swish_backward(dy, x, weight, bias, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, and of weight and bias in fp32."""
    rows, width = x.shape
    dx = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    if rows == 0:
        d_weight, d_bias = torch.zeros(2, width, device=x.device, dtype=torch.float32).unbind()
        return dx, d_weight, d_bias
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    launch = row_launch(width, x.device, resident=16)
    grid = launch.grid(rows, x.device)
    partial = torch.empty(*grid, 2, width, device=x.device, dtype=torch.float32)
    swish_layer_norm_backward_kernel[grid](
        x, dy, weight, bias, mean, rstd, dx, partial, rows, -(-rows // launch.rows),
        x.stride(0), dy.stride(0), dx.stride(0),
        D=width, BD=launch.block, ROWS=launch.rows, **launch.options(),
    )  # fmt: skip
    d_weight, d_bias = partial.sum(0).unbind()
    return dx, d_weight, d_bias


def encode_rows(source, attributes, norms, tables, x, mask, stats, eps, call, first: int) -> None:
    """Write the joined rows of ``source``, whose rows are number ``first`` and on in source order."""
    rows, width = source.shape
    if rows == 0:
        return
    weight, bias, a_weight, a_bias, action_table, patterns = norms
    position, positions, time, times = tables
    launch = row_launch(width, source.device)
    encode_forward_kernel[launch.grid(rows, source.device)](
        source, attributes, weight, bias, a_weight, a_bias, action_table, patterns,
        position, positions[first:], time, times[first:], call.places[first:], call.seed, x, mask, stats,
        rows, -(-rows // launch.rows), source.stride(0) // 4, 0 if attributes is None else attributes.stride(0) // 4,
        x.stride(0) // 4, 0 if action_table is None else action_table.stride(0) // 4, width // 4,
        signed32(keep_threshold(call.dropout_ratio)), 1.0 / (1.0 - call.dropout_ratio), math.sqrt(width), *eps,
        D=width, BD=launch.block, ROWS=launch.rows, EVENTS=stats is not None, ATTRIBUTES=attributes is not None,
        DROPOUT=mask is not None, **launch.options(),
    )  # fmt: skip


def encode_rows_backward(dx, mask, places, content, attributes, weights, stats, factor: float):
    """Gradients of content and attributes, and of the norms' weights in fp32."""
    rows, width = content.shape
    d_content = torch.empty(rows, width, device=dx.device, dtype=content.dtype)
    d_attributes = None if attributes is None else torch.empty_like(d_content, dtype=attributes.dtype)
    if rows == 0:
        return d_content, d_attributes, torch.zeros(2, width, device=dx.device, dtype=torch.float32).unbind()
    launch = row_launch(width, dx.device, **BACKWARD_LAUNCH)
    grid = launch.grid(rows, dx.device)
    partial = torch.empty(*grid, 2, width, device=dx.device, dtype=torch.float32)
    encode_backward_kernel[grid](
        dx, mask, places, content, attributes, *weights, stats, d_content, d_attributes, partial,
        rows, -(-rows // launch.rows), content.stride(0) // 4, 0 if attributes is None else attributes.stride(0) // 4,
        dx.stride(0) // 4, width // 4, factor,
        D=width, BD=launch.block, ROWS=launch.rows, EVENTS=True, ATTRIBUTES=attributes is not None,
        DROPOUT=mask is not None, **launch.options(),
    )  # fmt: skip
    return d_content, d_attributes, partial.sum(0).unbind()


def encode_context_backward(dx, mask, places, d_context: torch.Tensor, factor: float) -> None:
    """Write the contextual rows' gradient."""
    rows, width = d_context.shape
    if rows == 0:
        return
    launch = row_launch(width, dx.device)
    encode_backward_kernel[launch.grid(rows, dx.device)](
        dx, mask, places, None, None, None, None, None, d_context, None, None,
        rows, -(-rows // launch.rows), 0, 0, dx.stride(0) // 4, width // 4, factor,
        D=width, BD=launch.block, ROWS=launch.rows, EVENTS=False, ATTRIBUTES=False,
        DROPOUT=mask is not None, **launch.options(),
    )  # fmt: skip
