"""From looked-up embeddings to the stack's input, as few passes over memory as there are products between them.

- ``join_features``: rows of every feature, history and candidates → the input of each MLP, cast and side by side;
- ``swish_layer_norm``: ``x · sigmoid(LayerNorm(x))``;
- ``encode_sequence``: LayerNorm of content and attributes, action, join, position, time and dropout in one pass.

Each runs on Triton or in plain PyTorch (``reference.py``); ``why_not_fused`` tells where the kernels cannot serve.
There ``modules`` composes ``encode_sequence`` of steps of its own, which round where autocast rounds.
"""

from __future__ import annotations

from generative_recommenders.ops.encode.backends import why_not_fused
from generative_recommenders.ops.encode.call import EncodeCall, JoinedFeatures, Norm
from generative_recommenders.ops.encode.features import join_features
from generative_recommenders.ops.encode.sequence import encode_sequence
from generative_recommenders.ops.encode.swish import swish_layer_norm

__all__ = [
    "EncodeCall",
    "JoinedFeatures",
    "Norm",
    "encode_sequence",
    "join_features",
    "swish_layer_norm",
    "why_not_fused",
]
