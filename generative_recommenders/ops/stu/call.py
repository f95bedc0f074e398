"""What a call of the fused layer is made of beside ``ops.attention``'s parts."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class OutputParameters:
    """Parameters behind attention: norm_weight, norm_bias [H * d_v], and weight [3 * H * d_v, D]."""

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weight: torch.Tensor
