"""One whole STU layer as one differentiable function on Triton; ``reference.py`` has it in a few lines of PyTorch.

``why_not_fused`` says whether it can serve; where it cannot, ``modules.stu`` composes the layer from
``ops.attention.hstu_preprocess_attention`` and ``ops.lmsd.hstu_lmsd``.
"""

from generative_recommenders.ops.stu.call import OutputParameters
from generative_recommenders.ops.stu.layer import hstu_layer, why_not_fused, why_not_fused_shape

__all__ = ["OutputParameters", "hstu_layer", "why_not_fused", "why_not_fused_shape"]
