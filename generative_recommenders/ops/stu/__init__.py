"""One whole STU layer as one differentiable function on Triton: see ``layer.py``.

``why_not_fused`` says whether it can serve; where it cannot, ``modules.stu`` composes the layer from
``ops.attention.hstu_preprocess_attention`` and ``ops.lmsd.hstu_lmsd``.
"""

from generative_recommenders.ops.stu.layer import OutputParameters, hstu_layer, why_not_fused

__all__ = ["OutputParameters", "hstu_layer", "why_not_fused"]
