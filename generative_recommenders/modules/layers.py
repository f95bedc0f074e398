"""The small layers that every tower uses. Norms keep the dtype of their input (statistics are taken in fp32)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from generative_recommenders.ops.encode import swish_layer_norm, why_not_fused


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension that returns the dtype it was given, inside autocast too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class SwishLayerNorm(LayerNorm):
    """``x · sigmoid(LayerNorm(x))``, dtype of x.

    Args:
        features: width of the last dimension.
        backend: of ``ops.encode``; one pass where that can serve, else of plain PyTorch.
    """

    def __init__(self, features: int, backend: str | None = None) -> None:
        super().__init__(features)
        self.backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = why_not_fused(x, x.shape[-1], backend=self.backend) is None
        return swish_layer_norm(x, self.weight, self.bias, self.eps, fused)


def init_linear(linear: nn.Linear) -> nn.Linear:
    """Xavier-uniform weight, zero bias, in place."""
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def swish_mlp(in_features: int, hidden_features: int, out_features: int, backend: str | None = None) -> nn.Sequential:
    """Linear → SwishLayerNorm → Linear → LayerNorm: rows ``[N, in]`` → ``[N, out]``; backend as ``SwishLayerNorm``."""
    return nn.Sequential(
        init_linear(nn.Linear(in_features, hidden_features)),
        SwishLayerNorm(hidden_features, backend),
        init_linear(nn.Linear(hidden_features, out_features)),
        LayerNorm(out_features),
    )
