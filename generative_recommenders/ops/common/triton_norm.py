"""LayerNorm inside kernels: what every kernel that normalises rows, or goes back through a norm, is made of."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normed(x, inside, eps, D: tl.constexpr):
    """(x - mean) * rstd, mean [R] and rstd [R] of rows [R, BD] in fp32; ``inside`` tells the D columns of a row."""
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + eps)
    return centred * rstd[:, None], mean, rstd


@triton.jit
def norm_backward(g, xhat, rstd, D: tl.constexpr):
    """Gradient of a LayerNorm's rows: rstd * (g - mean(g) - xhat * mean(g * xhat)), means over the last dimension.

    ``g`` is the gradient of the normalised rows before weight and bias, ``xhat`` those rows: [R, BD], or [BD] for one
    row, with zeros in g past column D. ``rstd`` is [R, 1], or a scalar.
    """
    mean_g = tl.sum(g, axis=-1, keep_dims=True) / D
    mean_gx = tl.sum(g * xhat, axis=-1, keep_dims=True) / D
    return (g - mean_g - xhat * mean_gx) * rstd
