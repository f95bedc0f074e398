"""LMSD: LayerNorm, multiply, SiLU and dropout in one op, ``[dropout(a), dropout(x), dropout(LN(x) * a)]``.

``hstu_lmsd`` is differentiable and what layers call; ``hstu_lmsd_forward`` and ``hstu_lmsd_backward`` are the explicit
pair. Dropout is drawn by position (Philox4x32-10 over row, column and segment), so every backend and every tile shape
draws the same mask.
"""

from generative_recommenders.ops.lmsd.autograd import hstu_lmsd
from generative_recommenders.ops.lmsd.backends import supports_indexed_output_dropout
from generative_recommenders.ops.lmsd.contract import LmsdBackward, LmsdForward
from generative_recommenders.ops.lmsd.explicit import hstu_lmsd_backward, hstu_lmsd_forward

__all__ = [
    "LmsdBackward",
    "LmsdForward",
    "hstu_lmsd",
    "hstu_lmsd_backward",
    "hstu_lmsd_forward",
    "supports_indexed_output_dropout",
]
