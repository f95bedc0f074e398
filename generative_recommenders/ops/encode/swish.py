"""``x · sigmoid(LayerNorm(x))`` as one function, a pass forward and a pass backward."""

from __future__ import annotations

import torch

from generative_recommenders.ops.checks import vector


def swish_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """``x · sigmoid(LayerNorm(x) · weight + bias)`` over the last dimension; once differentiable.

    Args:
        x: ``[..., D]``, float32, float16 or bfloat16.
        weight, bias: ``[D]``, any float dtype; their gradients are summed in fp32.
        eps: added to the variance.

    Returns:
        The shape and dtype of x; what lies between is fp32. Ask ``why_not_fused`` first.
    """
    weight, bias = vector("weight", weight, x.shape[-1]), vector("bias", bias, x.shape[-1])
    return _SwishLayerNorm.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


class _SwishLayerNorm(torch.autograd.Function):
    """Keeps x and two numbers per row."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        from generative_recommenders.ops.encode.launch import row_launch
        from generative_recommenders.ops.encode.triton_swish import swish_norm_forward

        x = x if x.stride(1) == 1 else x.contiguous()
        rows, width = x.shape
        y = torch.empty(rows, width, device=x.device, dtype=x.dtype)
        mean, rstd = torch.empty(2, rows, device=x.device, dtype=torch.float32).unbind()
        if rows > 0:
            launch = row_launch(width, x.device)
            swish_norm_forward[launch.grid(rows, x.device)](
                x, weight, bias, y, mean, rstd, rows, -(-rows // launch.rows), x.stride(0), y.stride(0), eps,
                D=width, BD=launch.block, ROWS=launch.rows, **launch.options(),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        from generative_recommenders.ops.encode.launch import row_launch
        from generative_recommenders.ops.encode.triton_swish import swish_norm_backward

        x, weight, bias, mean, rstd = ctx.saved_tensors
        rows, width = x.shape
        dx = torch.empty(rows, width, device=x.device, dtype=x.dtype)
        if rows == 0:
            return dx, torch.zeros_like(weight), torch.zeros_like(bias), None
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        launch = row_launch(width, x.device, resident=16)
        grid = launch.grid(rows, x.device)
        partial = torch.empty(*grid, 2, width, device=x.device, dtype=torch.float32)
        swish_norm_backward[grid](
            x, dy, weight, bias, mean, rstd, dx, partial, rows, -(-rows // launch.rows),
            x.stride(0), dy.stride(0), dx.stride(0),
            D=width, BD=launch.block, ROWS=launch.rows, **launch.options(),
        )  # fmt: skip
        d_weight, d_bias = partial.sum(0).unbind()
        return dx, d_weight.to(weight.dtype), d_bias.to(bias.dtype), None
