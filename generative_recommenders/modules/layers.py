"""The small layers that every tower uses. Norms keep the dtype of their input (statistics are taken in fp32)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension that returns the dtype it was given, inside autocast too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class SwishLayerNorm(LayerNorm):
    """``x · sigmoid(LayerNorm(x))``, dtype of x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(super().forward(x))


def init_linear(linear: nn.Linear) -> nn.Linear:
    """Xavier-uniform weight, zero bias, in place."""
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def swish_mlp(in_features: int, hidden_features: int, out_features: int) -> nn.Sequential:
    """Linear → SwishLayerNorm → Linear → LayerNorm: rows ``[N, in]`` → ``[N, out]``."""
    return nn.Sequential(
        init_linear(nn.Linear(in_features, hidden_features)),
        SwishLayerNorm(hidden_features),
        init_linear(nn.Linear(hidden_features, out_features)),
        LayerNorm(out_features),
    )
