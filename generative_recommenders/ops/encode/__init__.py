"""From looked-up embeddings to the stack's input, as few passes over memory as there are products between them.

- ``join_features``: rows of every feature, history and candidates → the input of each MLP, cast and side by side;
- ``swish_layer_norm``: ``x · sigmoid(LayerNorm(x))``;
- ``encode_sequence``: LayerNorm of content and attributes, action, join, position, time and dropout in one pass.

These run on Triton alone. Ask ``why_not_fused`` first: where they cannot serve, ``modules`` composes the same
mathematics of plain PyTorch, which is also what they are tested against.
"""

from __future__ import annotations

from generative_recommenders.ops.encode.backends import why_not_fused
from generative_recommenders.ops.encode.features import JoinedFeatures, join_features
from generative_recommenders.ops.encode.sequence import EncodeCall, encode_sequence
from generative_recommenders.ops.encode.swish import swish_layer_norm

__all__ = ["EncodeCall", "JoinedFeatures", "encode_sequence", "join_features", "swish_layer_norm", "why_not_fused"]
