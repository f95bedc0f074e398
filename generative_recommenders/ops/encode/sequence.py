"""The stack's input from what the products before it made, as one differentiable function.

``x[place] = dropout(√D · (LayerNorm(content) + LayerNorm(attributes) + action) + position + time)``; contextual rows
take ``√D · context`` instead. Everything between the rows read and the rows written is fp32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from generative_recommenders.ops.checks import check_indices, check_permutation, matrix, vector
from generative_recommenders.ops.encode import reference
from generative_recommenders.ops.encode.backends import kernels
from generative_recommenders.ops.encode.call import EncodeCall, Norm

ROWS_PER_PAIR = 16  # fewer, and writing the pairs' sums would cost what reading the rows twice does


def encode_sequence(
    content: torch.Tensor,
    content_norm: Norm,
    attributes: torch.Tensor | None,
    attribute_norm: Norm | None,
    action_table: torch.Tensor,
    context: torch.Tensor | None,
    position_table: torch.Tensor,
    time_table: torch.Tensor,
    call: EncodeCall,
    fused: bool = True,
) -> torch.Tensor:
    """Norms, action, join, encoding and dropout; once differentiable, gradients bit for bit the same in every run.

    Args:
        content, attributes: ``[N, D]`` before their norms; attributes may be ``None``.
        content_norm, attribute_norm: (weight ``[D]``, bias ``[D]``, eps).
        action_table: ``[patterns, D]``.
        context: ``[K, D]``, or ``None`` for K = 0.
        position_table, time_table: ``[entries, D]``.
        fused: on kernels; ``why_not_fused`` tells. Else plain PyTorch.

    Returns:
        x ``[T, D]`` in ``call.dtype``.

    Raises:
        ValueError: shapes that do not fit, or dropout without a seed; on a CPU also indices outside their tables (on a
            GPU they are asserted on the device).
    """
    if (attributes is None) != (attribute_norm is None):
        raise ValueError("give attributes and attribute_norm together, or neither")
    events, width = content.shape
    total = events + (0 if context is None else context.shape[0])
    if call.dropout_ratio > 0 and not isinstance(call.seed, torch.Tensor):
        raise ValueError(f"dropout_ratio={call.dropout_ratio} needs a seed, an int64 tensor [1]: got {call.seed!r}")
    sizes = {"places": total, "patterns": events, "positions": total, "times": total}
    checked: dict[str, Any] = {name: vector(name, getattr(call, name), size) for name, size in sizes.items()}
    call = dataclasses.replace(call, **checked)
    if attributes is not None:
        matrix("attributes", attributes, width, events)
    if context is not None:
        matrix("context", context, width)
    tables = {"action_table": action_table, "position_table": position_table, "time_table": time_table}
    for name, table in tables.items():
        matrix(name, table, width)
    check_permutation("places", call.places, total)
    entries = {"patterns": action_table, "positions": position_table, "times": time_table}
    for name, table in entries.items():
        check_indices(name, getattr(call, name), table.shape[0])
    if not fused:
        return reference.encode_sequence(
            content, content_norm, attributes, attribute_norm, action_table, context, position_table, time_table, call
        )
    (weight, bias, eps), (a_weight, a_bias, a_eps) = _checked(content_norm, width), _checked(attribute_norm, width)
    return _Encode.apply(
        content, weight, bias, attributes, a_weight, a_bias, action_table, context, position_table, time_table,
        (eps, a_eps), call,
    )  # fmt: skip


def _checked(norm: Norm | None, width: int) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    if norm is None:
        return None, None, 0.0
    weight, bias, eps = norm
    return vector("a norm's weight", weight, width), vector("a norm's bias", bias, width), eps


def _rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with rows that kernels can read: neighbouring columns, a stride of whole quads."""
    if tensor is None or (tensor.stride(1) == 1 and tensor.stride(0) % 4 == 0):
        return tensor
    return tensor.contiguous()


class _Encode(torch.autograd.Function):
    """Keeps the rows before their norms, four numbers per event and a byte of decisions per four columns."""

    @staticmethod
    def forward(
        ctx, content, weight, bias, attributes, a_weight, a_bias, action_table, context, position, time, eps, call
    ):  # fmt: skip
        content, attributes, context, action_table = (_rows(t) for t in (content, attributes, context, action_table))
        events, width = content.shape
        total, device = call.places.numel(), content.device
        x = torch.empty(total, width, device=device, dtype=call.dtype)
        mask = None
        if call.dropout_ratio > 0:
            mask = torch.empty(total, width // 4, device=device, dtype=torch.uint8)
        stats = torch.empty(2 if attributes is None else 4, events, device=device, dtype=torch.float32)
        tables = position.contiguous(), call.positions[call.places], time.contiguous(), call.times[call.places]
        norms = weight, bias, a_weight, a_bias, action_table, call.patterns
        kernels().encode_rows(content, attributes, norms, tables, x, mask, stats, eps, call, 0)
        if context is not None:
            kernels().encode_rows(context, None, (None,) * 6, tables, x, mask, None, eps, call, events)
        ctx.save_for_backward(content, attributes, weight, a_weight, stats, mask)
        ctx.call, ctx.width = call, width
        ctx.parameters = [None if t is None else (t.shape[0], t.dtype) for t in (action_table, context, position, time)]
        ctx.biases = bias.dtype, None if a_bias is None else a_bias.dtype
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        content, attributes, weight, a_weight, stats, mask = ctx.saved_tensors
        call, events, dx = ctx.call, content.shape[0], _rows(dx)
        scale = 1.0 / (1.0 - call.dropout_ratio)
        factor = scale * math.sqrt(ctx.width)
        action, context, position, time = ctx.parameters
        d_content, d_attributes, d_norms = kernels().encode_rows_backward(
            dx, mask, call.places[:events], content, attributes, (weight, a_weight), stats, factor
        )
        d_context = None
        if context is not None:
            d_context = torch.empty(context[0], ctx.width, device=dx.device, dtype=context[1])
            kernels().encode_context_backward(dx, mask, call.places[events:], d_context, factor)
        d_position = scale * kernels().table_gradient(dx, mask, call.positions, position[0])
        d_time, d_action = _time_and_action_sums(dx, mask, call, time[0], action[0])
        d_time, d_action = scale * d_time, factor * d_action
        d_bias = d_action.sum(0)  # an event adds the same gradient to the biases and to one row of the action table
        d_weight, d_a_weight = d_norms
        if a_weight is not None:
            d_a_weight, d_a_bias = d_a_weight.to(a_weight.dtype), d_bias.to(ctx.biases[1])
        else:
            d_a_weight = d_a_bias = None
        return (
            d_content, d_weight.to(weight.dtype), d_bias.to(ctx.biases[0]), d_attributes, d_a_weight, d_a_bias,
            d_action.to(action[1]), d_context, d_position.to(position[1]), d_time.to(time[1]), None, None,
        )  # fmt: skip


def _time_and_action_sums(dx, mask, call: EncodeCall, num_times: int, num_patterns: int):
    """The kept rows of dx added up by entry of the time table and of the action table, fp32.

    With rows enough they are added up by pair of entries, so that dx is read once for both.
    """
    table_gradient = kernels().table_gradient
    events = call.patterns.numel()
    pairs = num_times * (num_patterns + 1)  # contextual rows have no action: a pattern of their own
    if pairs > min(kernels().MOST_SHORT_ENTRIES, call.times.numel() // ROWS_PER_PAIR):
        action = table_gradient(dx, mask, call.patterns, num_patterns, call.places[:events])
        return table_gradient(dx, mask, call.times, num_times), action
    patterns = torch.full_like(call.times, num_patterns).index_copy_(0, call.places[:events], call.patterns)
    sums = table_gradient(dx, mask, call.times * (num_patterns + 1) + patterns, pairs)
    sums = sums.view(num_times, num_patterns + 1, -1)
    return sums.sum(1), sums[:, :num_patterns].sum(0)
