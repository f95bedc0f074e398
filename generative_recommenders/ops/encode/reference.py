"""The functions of this package in plain PyTorch, under autograd, for any float dtype and device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from generative_recommenders.ops.common.philox import SEGMENT_INPUT, keep_decisions
from generative_recommenders.ops.encode.call import EncodeCall, JoinedFeatures, Norm


def join_features(
    history: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor], others: Sequence[torch.Tensor], dtype
) -> JoinedFeatures:
    """Arguments and result as ``encode.join_features``."""
    # Cast first, so that no fp32 copy of all rows is made on the way.
    columns = [torch.cat([h.to(dtype), c.to(dtype)]) for h, c in zip(history, candidates, strict=True)]
    attributes = None if len(columns) == 1 else columns[1] if len(columns) == 2 else torch.cat(columns[1:], dim=1)
    return JoinedFeatures(columns[0], attributes, torch.cat(list(candidates), dim=1), tuple(others))


def swish_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """``x · sigmoid(LayerNorm(x) · weight + bias)`` in the dtype of x, inside autocast too."""
    with torch.autocast(x.device.type, enabled=False):
        return x * torch.sigmoid(F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps))


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
) -> torch.Tensor:
    """Arguments and result as ``encode.encode_sequence``; fp32 (float64 for float64 rows) until the row is written."""
    wide, width = torch.promote_types(content.dtype, torch.float32), content.shape[1]
    rows = _normed(content.to(wide), content_norm) + action_table.to(wide)[call.patterns]
    if attributes is not None:
        assert attribute_norm is not None
        rows = rows + _normed(attributes.to(wide), attribute_norm)
    if context is not None:
        rows = torch.cat([rows, context.to(wide)])
    joined = torch.arange(rows.shape[0], device=rows.device)
    source = torch.empty_like(joined).index_copy_(0, call.places, joined)
    x = math.sqrt(width) * rows[source] + position_table.to(wide)[call.positions] + time_table.to(wide)[call.times]
    if call.dropout_ratio > 0:
        assert call.seed is not None
        kept = keep_decisions(joined, width, call.seed, SEGMENT_INPUT, call.dropout_ratio)
        x = torch.where(kept, x / (1.0 - call.dropout_ratio), 0.0)
    return x.to(call.dtype)


def _normed(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    weight, bias, eps = norm
    return F.layer_norm(rows, rows.shape[-1:], weight.to(rows.dtype), bias.to(rows.dtype), eps)
