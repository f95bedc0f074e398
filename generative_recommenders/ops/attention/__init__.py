"""HSTU attention: jagged, target-aware, pointwise SiLU attention with gradients.

``hstu_mha`` is the differentiable op, ``hstu_mha_forward`` / ``hstu_mha_backward`` the explicit pair that writes into
caller-owned (strided) buffers, ``hstu_preprocess_attention`` the fused front of an STU layer.
"""

from generative_recommenders.ops.attention.attention import hstu_mha
from generative_recommenders.ops.attention.stu_front import hstu_preprocess_attention

__all__ = ["hstu_mha", "hstu_preprocess_attention"]
