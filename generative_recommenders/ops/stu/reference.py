"""An STU layer in plain PyTorch under autograd, any float dtype and device: the oracle of the fused layer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from generative_recommenders.ops.attention import AttentionCall, Projection, UvqkParameters
from generative_recommenders.ops.attention.attention import attend
from generative_recommenders.ops.dispatch import Backend
from generative_recommenders.ops.lmsd import hstu_lmsd
from generative_recommenders.ops.stu.call import OutputParameters


def hstu_layer(
    x: torch.Tensor,
    parameters: UvqkParameters,
    output: OutputParameters,
    projection: Projection,
    call: AttentionCall,
    dropout_ratio: float = 0.0,
    seed: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Arguments and result as ``stu.hstu_layer``, all of one dtype; keeps what autograd keeps."""
    normed = F.layer_norm(x, x.shape[-1:], parameters.norm_weight, parameters.norm_bias, projection.eps)
    u, vqk = torch.addmm(parameters.bias, normed, parameters.weight).tensor_split([projection.u_columns], dim=1)
    attention = attend(*projection.split(vqk), call, Backend.PYTORCH).flatten(1)
    y = hstu_lmsd(
        attention, u, output.norm_weight, output.norm_bias, projection.eps, dropout_ratio, seed,
        backend=Backend.PYTORCH,
    )  # fmt: skip
    return torch.addmm(x, y, output.weight)
