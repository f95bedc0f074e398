"""Builds one sequence per sample: contextual rows, then the history, then the candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from generative_recommenders.modules.action_encoder import ActionEncoder
from generative_recommenders.modules.layers import swish_mlp
from generative_recommenders.ops.jagged import interleave, jagged_to_padded_dense


@dataclasses.dataclass(frozen=True)
class JaggedRows:
    """Embedded rows of B sequences.

    Attributes:
        item: ``[N, E]`` embedding of the item id.
        attributes: ``[N, E]`` for each attribute of the item, in the model's order.
        offsets: int64 ``[B + 1]``.
        timestamps: int64 ``[N]`` seconds.
    """

    item: torch.Tensor
    attributes: Sequence[torch.Tensor]
    offsets: torch.Tensor
    timestamps: torch.Tensor


@dataclasses.dataclass(frozen=True)
class PreparedSequence:
    """What the transducer works on.

    Sequences may stand in another order than the batch's (longest first); ``candidate_rows`` restores the batch's.

    Attributes:
        x: ``[T, D]``.
        offsets: int64 ``[B + 1]``.
        timestamps: int64 ``[T]``, 0 for contextual rows.
        num_targets: int64 ``[B]``.
        candidate_rows: int64 ``[C]``, row of each candidate in x, candidates in the batch's order.
        candidate_timestamps: int64 ``[C]`` seconds, in the batch's order.
        seq_lengths: int64 ``[B]``, rows of each sequence, in the batch's order.
        in_batch_order: whether sequences stand in the batch's order.
    """

    x: torch.Tensor
    offsets: torch.Tensor
    timestamps: torch.Tensor
    num_targets: torch.Tensor
    candidate_rows: torch.Tensor
    candidate_timestamps: torch.Tensor
    seq_lengths: torch.Tensor
    in_batch_order: bool


class ContextualPreprocessor(nn.Module):
    """Content MLP on the item, MLP on its attributes side by side, action encoding: summed; context in front.

    Args:
        input_dim: E, width of the embedding tables.
        output_dim: D, width of the sequence.
        hidden_dim: hidden width of the three MLPs.
        num_contextual: contextual features, each one row at the start of the sequence (0: none).
        num_attributes: attributes of an item (0: none, and no MLP for them).
        action_weights, action_dim: see ``ActionEncoder``.
        recompute: redo the two MLPs over all rows in the backward instead of keeping what they computed.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        hidden_dim: int,
        num_contextual: int,
        num_attributes: int,
        action_weights: Sequence[int] = (1, 2, 4),
        action_dim: int = 8,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.num_contextual = num_contextual
        self.num_attributes = num_attributes
        self.content_mlp = swish_mlp(input_dim, hidden_dim, output_dim)
        self.attribute_mlp = swish_mlp(num_attributes * input_dim, hidden_dim, output_dim) if num_attributes else None
        self.action_encoder = ActionEncoder(action_weights, action_dim, hidden_dim, output_dim)
        if num_contextual:
            self.contextual_weight = nn.Parameter(torch.empty(num_contextual, input_dim, output_dim))
            self.contextual_bias = nn.Parameter(torch.zeros(num_contextual, output_dim))
            for slot in self.contextual_weight:
                nn.init.xavier_uniform_(slot)

    def forward(
        self,
        history: JaggedRows,
        candidates: JaggedRows,
        action_bits: torch.Tensor,
        contextual: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        longest_first: bool = False,
    ) -> PreparedSequence:
        """Join everything into one jagged batch.

        Args:
            history, candidates: rows of the same B sequences.
            action_bits: int64 ``[Lh]`` of the history rows. Candidates have none here, by construction.
            contextual: per contextual feature its embeddings ``[n, E]`` and offsets ``[B + 1]``; a sequence without the
                feature has a zero embedding, of several values the first counts.
            longest_first: order the sequences by falling length (scheduling, and less padding on a CPU).
        """
        rows = self.embed_rows(history, candidates, action_bits)
        num_history = history.item.shape[0]
        parts = [rows[:num_history], rows[num_history:]]
        offsets = [history.offsets, candidates.offsets]
        times = [history.timestamps, candidates.timestamps]
        if self.num_contextual:
            slots = self.embed_context(contextual).to(rows.dtype)
            parts.insert(0, slots.flatten(0, 1))
            offsets.insert(0, torch.arange(slots.shape[0] + 1, device=rows.device) * self.num_contextual)
            times.insert(0, times[0].new_zeros(slots.shape[0] * self.num_contextual))
        num_targets = candidates.offsets.diff()
        lengths = torch.stack(offsets).sum(0).diff()
        order = lengths.argsort(descending=True, stable=True) if longest_first else None
        join = interleave(offsets, [part.shape[0] for part in parts], order)
        return PreparedSequence(
            x=join.place(parts),
            offsets=join.offsets,
            timestamps=join.place(times),
            num_targets=num_targets if order is None else num_targets[order],
            candidate_rows=join.rows[-1],
            candidate_timestamps=candidates.timestamps,
            seq_lengths=lengths,
            in_batch_order=order is None,
        )

    def embed_rows(self, history: JaggedRows, candidates: JaggedRows, action_bits: torch.Tensor) -> torch.Tensor:
        """Content + attributes + action of all history rows, then all candidate rows: ``[Lh + C, D]``."""
        x = self._run(self.content_mlp, _joined([(history.item, candidates.item)]))
        if self.attribute_mlp is not None:
            pairs = zip(history.attributes, candidates.attributes, strict=True)
            x = x + self._run(self.attribute_mlp, _joined(list(pairs)))
        return x + self.action_encoder(action_bits, candidates.item.shape[0])

    def _run(self, mlp: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(mlp, rows, use_reentrant=False, preserve_rng_state=False)
        return mlp(rows)

    def embed_context(self, contextual: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Each slot through its own linear: ``[B, slots, D]``."""
        if len(contextual) != self.num_contextual:
            raise ValueError(f"got {len(contextual)} contextual features, the model has {self.num_contextual}")
        slots = [jagged_to_padded_dense(values, offsets, 1).squeeze(1) for values, offsets in contextual]
        projected = torch.baddbmm(self.contextual_bias[:, None], torch.stack(slots), self.contextual_weight)
        return projected.transpose(0, 1)


def _joined(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """(history, candidate) rows of each feature → ``[Lh + C, features · E]``.

    Cast to the autocast dtype first, so that no fp32 copy of all rows is made on the way.
    """
    device = pairs[0][0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else pairs[0][0].dtype
    columns = [torch.cat([history.to(dtype), candidates.to(dtype)]) for history, candidates in pairs]
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
