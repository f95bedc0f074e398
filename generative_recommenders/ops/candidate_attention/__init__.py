"""Attention of the candidate rows alone: the front of a targets-only last layer.

``candidate_attention`` is the differentiable op; ``reference.py`` states the maths, ``absorbed.py`` and
``materialised.py`` compute it on Triton.
"""

from generative_recommenders.ops.candidate_attention.attention import candidate_attention, why_not_computation
from generative_recommenders.ops.candidate_attention.call import COMPUTATIONS
from generative_recommenders.ops.candidate_attention.rows import CandidateRows, TargetSummary

__all__ = ["COMPUTATIONS", "CandidateRows", "TargetSummary", "candidate_attention", "why_not_computation"]
