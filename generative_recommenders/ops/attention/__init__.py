"""HSTU attention: jagged, target-aware, pointwise SiLU attention with gradients.

``hstu_mha`` is the differentiable op, ``hstu_preprocess_attention`` the fused front of an STU layer, ``launch`` the
explicit forward and backward that write into caller-owned (strided) buffers.
"""

from generative_recommenders.ops.attention.attention import hstu_mha
from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.attention.stu_front import hstu_preprocess_attention
from generative_recommenders.ops.attention.uvqk import Projection, UvqkParameters

__all__ = ["AttentionCall", "Projection", "UvqkParameters", "hstu_mha", "hstu_preprocess_attention"]
