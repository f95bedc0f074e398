"""Builds one sequence per sample: contextual rows, then the history, then the candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from generative_recommenders.modules.action_encoder import ActionEncoder
from generative_recommenders.modules.layers import swish_mlp
from generative_recommenders.ops.jagged import JaggedJoin, interleave, jagged_to_padded_dense


@dataclasses.dataclass(frozen=True)
class EventRows:
    """Embedded events of B sequences: all history rows ``Lh``, then all candidate rows C.

    Attributes:
        item: ``[Lh + C, E]`` embedding of the item id.
        attributes: ``[Lh + C, attributes · E]``, the item's attributes side by side; ``None`` if the model has none.
        history_offsets, candidate_offsets: int64 ``[B + 1]``.
        history_timestamps, candidate_timestamps: int64 ``[Lh]`` and ``[C]`` seconds.
    """

    item: torch.Tensor
    attributes: torch.Tensor | None
    history_offsets: torch.Tensor
    candidate_offsets: torch.Tensor
    history_timestamps: torch.Tensor
    candidate_timestamps: torch.Tensor

    @property
    def num_history(self) -> int:
        """Lh."""
        return self.history_timestamps.shape[0]

    @property
    def num_candidates(self) -> int:
        """C."""
        return self.candidate_timestamps.shape[0]


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """Where the rows of a joined batch stand; sequences in the batch's order or longest first.

    Attributes:
        join: offsets of the joined sequences, and each part's rows in them: context (if any), history, candidates.
        timestamps: int64 ``[T]``, 0 for contextual rows.
        num_targets: int64 ``[B]``.
        candidate_timestamps: int64 ``[C]`` seconds, in the batch's order.
        seq_lengths: int64 ``[B]``, rows of each sequence, in the batch's order.
        in_batch_order: whether sequences stand in the batch's order.
    """

    join: JaggedJoin
    timestamps: torch.Tensor
    num_targets: torch.Tensor
    candidate_timestamps: torch.Tensor
    seq_lengths: torch.Tensor
    in_batch_order: bool


@dataclasses.dataclass(frozen=True)
class PreparedSequence:
    """What the transducer works on.

    Attributes:
        x: ``[T, D]``.
        layout: where its rows stand.
    """

    x: torch.Tensor
    layout: SequenceLayout

    @property
    def offsets(self) -> torch.Tensor:
        """int64 ``[B + 1]``."""
        return self.layout.join.offsets

    @property
    def candidate_rows(self) -> torch.Tensor:
        """int64 ``[C]``, row of each candidate in x, candidates in the batch's order."""
        return self.layout.join.rows[-1]


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
        backend: as ``SwishLayerNorm``.
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
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.num_contextual = num_contextual
        self.num_attributes = num_attributes
        self.content_mlp = swish_mlp(input_dim, hidden_dim, output_dim, backend)
        self.attribute_mlp = None
        if num_attributes:
            self.attribute_mlp = swish_mlp(num_attributes * input_dim, hidden_dim, output_dim, backend)
        self.action_encoder = ActionEncoder(action_weights, action_dim, hidden_dim, output_dim, backend)
        if num_contextual:
            self.contextual_weight = nn.Parameter(torch.empty(num_contextual, input_dim, output_dim))
            self.contextual_bias = nn.Parameter(torch.zeros(num_contextual, output_dim))
            for slot in self.contextual_weight:
                nn.init.xavier_uniform_(slot)

    def forward(
        self,
        events: EventRows,
        action_bits: torch.Tensor,
        contextual: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        longest_first: bool = False,
    ) -> PreparedSequence:
        """Join everything into one jagged batch.

        Args:
            events: history and candidates of B sequences.
            action_bits: int64 ``[Lh]`` of the history rows. Candidates have none here, by construction.
            contextual: per contextual feature its embeddings ``[n, E]`` and offsets ``[B + 1]``; a sequence without the
                feature has a zero embedding, of several values the first counts.
            longest_first: order the sequences by falling length (scheduling, and less padding on a CPU).
        """
        layout = self.lay_out(events, longest_first)
        rows = self.embed_rows(events, action_bits)
        parts = [rows[: events.num_history], rows[events.num_history :]]
        if self.num_contextual:
            parts.insert(0, self.embed_context(contextual).to(rows.dtype).flatten(0, 1))
        return PreparedSequence(layout.join.place(parts), layout)

    def lay_out(self, events: EventRows, longest_first: bool) -> SequenceLayout:
        """Plan the join of context, history and candidates."""
        offsets = [events.history_offsets, events.candidate_offsets]
        times = [events.history_timestamps, events.candidate_timestamps]
        if self.num_contextual:
            batch = offsets[0].numel() - 1
            offsets.insert(0, torch.arange(batch + 1, device=offsets[0].device) * self.num_contextual)
            times.insert(0, times[0].new_zeros(batch * self.num_contextual))
        num_targets = events.candidate_offsets.diff()
        lengths = torch.stack(offsets).sum(0).diff()
        order = lengths.argsort(descending=True, stable=True) if longest_first else None
        join = interleave(offsets, [part.shape[0] for part in times], order)
        return SequenceLayout(
            join=join,
            timestamps=join.place(times),
            num_targets=num_targets if order is None else num_targets[order],
            candidate_timestamps=events.candidate_timestamps,
            seq_lengths=lengths,
            in_batch_order=order is None,
        )

    def embed_rows(self, events: EventRows, action_bits: torch.Tensor) -> torch.Tensor:
        """Content + attributes + action of all history rows, then all candidate rows: ``[Lh + C, D]``."""
        x = self._run(self.content_mlp, events.item)
        if self.attribute_mlp is not None:
            if events.attributes is None:
                raise ValueError("the model has item attributes, these events have none")
            x = x + self._run(self.attribute_mlp, events.attributes)
        return x + self.action_encoder(action_bits, events.num_candidates)

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
