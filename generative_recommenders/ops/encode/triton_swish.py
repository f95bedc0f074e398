"""``x · sigmoid(LayerNorm(x))`` both ways: memory-bound, 2 elements per column forward and 3 backward.

Weight and bias gradients are per-program partial sums, added in a fixed order afterwards: two runs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from generative_recommenders.ops.common.triton_norm import norm_backward, normed


@triton.jit(do_not_specialize=("rows", "tiles"))
def swish_layer_norm_forward_kernel(
    X, Weight, Bias, Y, Mean, Rstd, rows, tiles, x_stride, y_stride, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Y, and the statistics of each row in fp32."""
    c = tl.arange(0, BD)
    inside = c < D
    weight = tl.load(Weight + c, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(Bias + c, mask=inside, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = tile * ROWS + tl.arange(0, ROWS)
        keep = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None]
        x = tl.load(X + at * x_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        xhat, mean, rstd = normed(x, inside[None, :], eps, D)
        gate = tl.sigmoid(xhat * weight[None, :] + bias[None, :])
        tl.store(Y + at * y_stride + c[None, :], (x * gate).to(Y.dtype.element_ty), mask=keep)
        tl.store(Mean + r, mean, mask=r < rows)
        tl.store(Rstd + r, rstd, mask=r < rows)


@triton.jit(do_not_specialize=("rows", "tiles"))
def swish_layer_norm_backward_kernel(
    X, DY, Weight, Bias, Mean, Rstd, DX, Partial, rows, tiles, x_stride, dy_stride, dx_stride,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """DX, and in Partial this program's sums for weight and bias.

    With s = sigmoid(n): dn = dy x s (1 - s), and dx is dy s plus what LayerNorm's backward makes of dn.
    """
    c = tl.arange(0, BD)
    inside = c < D
    weight = tl.load(Weight + c, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(Bias + c, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BD), tl.float32)
    d_bias = tl.zeros((ROWS, BD), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = tile * ROWS + tl.arange(0, ROWS)
        keep = (r < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None]
        x = tl.load(X + at * x_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        dy = tl.load(DY + at * dy_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        mean = tl.load(Mean + r, mask=r < rows, other=0.0)
        rstd = tl.load(Rstd + r, mask=r < rows, other=0.0)
        xhat = tl.where(keep, (x - mean[:, None]) * rstd[:, None], 0.0)
        gate = tl.sigmoid(xhat * weight[None, :] + bias[None, :])
        direct = dy * gate
        dn = direct * x * (1.0 - gate)
        d_weight += dn * xhat
        d_bias += dn
        dx = direct + norm_backward(dn * weight[None, :], xhat, rstd[:, None], D)
        tl.store(DX + at * dx_stride + c[None, :], dx.to(DX.dtype.element_ty), mask=keep)
    part = tl.program_id(0) * 2 * D + c
    tl.store(Partial + part, tl.sum(d_weight, axis=0), mask=inside)
    tl.store(Partial + part + D, tl.sum(d_bias, axis=0), mask=inside)
