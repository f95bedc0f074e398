"""``x · sigmoid(LayerNorm(x))`` as one function, a pass forward and a pass backward."""

from __future__ import annotations

import torch

from generative_recommenders.ops.checks import vector
from generative_recommenders.ops.encode import reference
from generative_recommenders.ops.encode.backends import kernels


def swish_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, fused: bool = True
) -> torch.Tensor:
    """``x · sigmoid(LayerNorm(x) · weight + bias)`` over the last dimension; once differentiable.

    Args:
        x: ``[..., D]``, float32, float16 or bfloat16.
        weight, bias: ``[D]``, any float dtype; their gradients are summed in fp32.
        eps: added to the variance.
        fused: on kernels; ``why_not_fused`` tells. Else plain PyTorch.

    Returns:
        The shape and dtype of x; what lies between is fp32.
    """
    if not fused:
        return reference.swish_layer_norm(x, weight, bias, eps)
    weight, bias = vector("weight", weight, x.shape[-1]), vector("bias", bias, x.shape[-1])
    return _SwishLayerNorm.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


class _SwishLayerNorm(torch.autograd.Function):
    """Keeps x and two numbers per row."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        x = x if x.stride(1) == 1 else x.contiguous()
        y, *statistics = kernels().swish_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, *statistics)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dx, d_weight, d_bias = kernels().swish_backward(dy, x, weight, bias, mean, rstd)
        return dx, d_weight.to(weight.dtype), d_bias.to(bias.dtype), None
