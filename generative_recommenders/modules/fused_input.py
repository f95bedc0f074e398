"""Preprocessor, positional encoder and input dropout in one pass: the same mathematics as their composition.

Where the composition rounds to the autocast dtype after every step, this one keeps fp32 until the row is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from generative_recommenders.modules.positional_encoder import PositionalEncoder
from generative_recommenders.modules.preprocessor import ContextualPreprocessor, EventRows, PreparedSequence
from generative_recommenders.ops.encode import EncodeCall, Norm, encode_sequence
from generative_recommenders.ops.position import SequenceRows, position_indices, time_indices


def prepare_fused(
    preprocessor: ContextualPreprocessor,
    encoder: PositionalEncoder,
    events: EventRows,
    action_bits: torch.Tensor,
    contextual: Sequence[tuple[torch.Tensor, torch.Tensor]],
    longest_first: bool,
    dropout_ratio: float,
    dtype: torch.dtype,
) -> PreparedSequence:
    """``HSTUTransducer.prepare`` on the kernels of ``ops.encode``.

    Args:
        events, action_bits, contextual, longest_first: as ``ContextualPreprocessor.forward``.
        dropout_ratio: of the encoded rows, 0 in evaluation. Its seed is drawn from the device's default generator.
        dtype: of the result.
    """
    layout = preprocessor.lay_out(events, longest_first)
    context = preprocessor.embed_context(contextual).flatten(0, 1) if preprocessor.num_contextual else None
    call = _make_call(preprocessor, encoder, layout, action_bits, dropout_ratio, dtype)
    action_table = preprocessor.action_encoder.table()

    def run(item: torch.Tensor, attributes: torch.Tensor | None) -> torch.Tensor:
        mlp, others = preprocessor.content_mlp, preprocessor.attribute_mlp
        return encode_sequence(
            mlp[:-1](item), _norm(mlp), None if others is None else others[:-1](attributes),
            None if others is None else _norm(others), action_table, context, encoder.position_embedding,
            encoder.time_embedding, call,
        )  # fmt: skip

    if preprocessor.recompute and torch.is_grad_enabled():
        x = checkpoint(run, events.item, events.attributes, use_reentrant=False, preserve_rng_state=False)
    else:
        x = run(events.item, events.attributes)
    return PreparedSequence(x, layout)


def _make_call(preprocessor, encoder, layout, action_bits, dropout_ratio: float, dtype: torch.dtype) -> EncodeCall:
    join, device = layout.join, layout.timestamps.device
    context, (history, candidates) = join.rows[:-2], join.rows[-2:]
    rows = SequenceRows.from_offsets(join.offsets, join.num_rows)
    buckets = encoder.position_embedding.shape[0], encoder.time_embedding.shape[0] - 1
    return EncodeCall(
        places=torch.cat([history, candidates, *context]),
        patterns=preprocessor.action_encoder.pattern_of(action_bits, candidates.numel()),
        positions=position_indices(rows, layout.num_targets, encoder.num_contextual, buckets[0]),
        times=time_indices(rows, layout.timestamps, buckets[1]),
        dtype=dtype,
        dropout_ratio=dropout_ratio,
        seed=torch.empty(1, dtype=torch.int64, device=device).random_() if dropout_ratio > 0 else None,
    )


def _norm(mlp) -> Norm:
    """Weight, bias and eps of the LayerNorm that ends an MLP."""
    return mlp[-1].weight, mlp[-1].bias, mlp[-1].eps
