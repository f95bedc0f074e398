"""Preprocess → positional encoding → STU stack → candidate rows → postprocess."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from generative_recommenders.modules.fused_input import prepare_fused
from generative_recommenders.modules.positional_encoder import PositionalEncoder
from generative_recommenders.modules.preprocessor import ContextualPreprocessor, EventRows, PreparedSequence
from generative_recommenders.modules.stu import STUStack
from generative_recommenders.modules.targets_only import LastLayerDecision, LastLayerUse, TargetsOnlyGate
from generative_recommenders.ops.candidate_attention import CandidateRows, TargetSummary
from generative_recommenders.ops.encode import why_not_fused
from generative_recommenders.ops.jagged import place_rows, take_rows
from generative_recommenders.ops.position import SequenceRows


@dataclasses.dataclass(frozen=True)
class TransducerOutput:
    """Result of the transducer.

    Attributes:
        candidates: ``[C, D]`` in the batch's order of candidates, fp32.
        num_rows: T of the joined sequences.
        seq_lengths: int64 ``[B]``, rows of each joined sequence, in the batch's order.
        full: ``[T, D]``, every row of the stack's output, only if full embeddings were asked for.
        full_offsets: int64 ``[B + 1]`` of ``full``.
    """

    candidates: torch.Tensor
    num_rows: int
    seq_lengths: torch.Tensor
    full: torch.Tensor | None = None
    full_offsets: torch.Tensor | None = None


class HSTUTransducer(nn.Module):
    """From embedded features to one embedding per candidate.

    Under autocast the rows inside the stack have the autocast dtype, else the parameters' own.

    Args:
        preprocessor, positional_encoder, stack, postprocessor: its parts.
        input_dropout_ratio: dropout of the encoded sequence, in training.
        return_full_embeddings: also return every row of the stack's output.
        targets_only: decides per batch whether the last layer runs for candidate rows alone; ``None``: never.
        backend: of the preparation, see ``ops.encode.why_not_fused``.
    """

    def __init__(
        self,
        preprocessor: ContextualPreprocessor,
        positional_encoder: PositionalEncoder,
        stack: STUStack,
        postprocessor: nn.Module,
        input_dropout_ratio: float = 0.2,
        return_full_embeddings: bool = False,
        targets_only: TargetsOnlyGate | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.preprocessor = preprocessor
        self.positional_encoder = positional_encoder
        self.stack = stack
        self.postprocessor = postprocessor
        self.input_dropout_ratio = input_dropout_ratio
        # Every row in the batch's order is part of what full embeddings promise.
        self.longest_first = stack.sort_by_length and not return_full_embeddings
        self.return_full_embeddings = return_full_embeddings
        self.targets_only = TargetsOnlyGate() if targets_only is None else targets_only
        self.backend = backend

    @property
    def last_layer_decision(self) -> LastLayerDecision | None:
        """How the last layer ran for the last batch, and why; ``None`` before the first."""
        return self.targets_only.last_decision

    def forward(
        self,
        events: EventRows,
        action_bits: torch.Tensor,
        contextual: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        max_seq_len: int | None = None,
        targets: TargetSummary | None = None,
    ) -> TransducerOutput:
        """Encode a batch: ``prepare``, then ``encode``.

        Args:
            events, action_bits, contextual: as ``ContextualPreprocessor.forward``.
            max_seq_len: host integer, an upper bound of the joined lengths; ``None`` reads it from the batch (a device
                sync on a GPU).
            targets: the candidate counts on the host; ``None`` reads them where the targets-only gate asks (likewise).
        """
        return self.encode(self.prepare(events, action_bits, contextual), max_seq_len, targets)

    def prepare(
        self,
        events: EventRows,
        action_bits: torch.Tensor,
        contextual: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> PreparedSequence:
        """Join the rows, add position and time embeddings, drop out, cast to the stack's dtype.

        The result holds no looked-up embeddings, so whoever holds those can let them go before the stack runs.
        """
        device = events.item.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        ratio = self.input_dropout_ratio if self.training else 0.0
        if self.why_not_fused(events) is None:
            parts = self.preprocessor, self.positional_encoder
            if dtype is None:
                dtype = torch.promote_types(events.item.dtype, self.positional_encoder.position_embedding.dtype)
            return prepare_fused(*parts, events, action_bits, contextual, self.longest_first, ratio, dtype)
        sequence = self.preprocessor(events, action_bits, contextual, self.longest_first)
        layout = sequence.layout
        rows = SequenceRows.from_offsets(sequence.offsets, sequence.x.shape[0])
        x = self.positional_encoder(sequence.x, rows, layout.timestamps, layout.num_targets)
        x = F.dropout(x, ratio, self.training)
        return dataclasses.replace(sequence, x=x if dtype is None else x.to(dtype))

    def why_not_fused(self, events: EventRows) -> str | None:
        """Why these rows are prepared step by step instead of in one pass, or ``None``."""
        width = self.positional_encoder.position_embedding.shape[1]
        return why_not_fused(events.item, width, backend=self.backend)

    def encode(
        self, sequence: PreparedSequence, max_seq_len: int | None = None, targets: TargetSummary | None = None
    ) -> TransducerOutput:
        """Run the stack and the postprocessor on a prepared batch; ``max_seq_len`` and ``targets`` as ``forward``."""
        if max_seq_len is None:
            max_seq_len = int(sequence.layout.seq_lengths.max()) if sequence.layout.seq_lengths.numel() else 0
        candidate_rows, full = self.run_stack(sequence.x, sequence, max_seq_len, targets)
        encoded = self.postprocessor(candidate_rows, sequence.layout.candidate_timestamps)
        return TransducerOutput(
            candidates=encoded.to(torch.promote_types(encoded.dtype, torch.float32)),
            num_rows=sequence.x.shape[0],
            seq_lengths=sequence.layout.seq_lengths,
            full=full,
            full_offsets=None if full is None else sequence.offsets,
        )

    def run_stack(
        self, x: torch.Tensor, sequence: PreparedSequence, max_seq_len: int, targets: TargetSummary | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers; candidate rows ``[C, D]`` in the batch's order, and all rows if they were asked for."""
        batch = sequence.offsets, max_seq_len, sequence.layout.num_targets
        last = [*self.stack][-1].config if len(self.stack) else None
        use = LastLayerUse(num_layers=len(self.stack), full_embeddings=self.return_full_embeddings)
        decision, summary = self.targets_only.decide(last, use, self.training, x, sequence.layout.num_targets, targets)
        if decision.engaged:
            candidates = CandidateRows.of(sequence.offsets, sequence.layout.num_targets, summary)
            rows = self.stack.forward_targets_only(x, *batch, candidates, decision.computation)
            return self.restore_candidate_order(rows, sequence), None
        x = self.stack(x, *batch)
        return take_rows(x, sequence.candidate_rows), x if self.return_full_embeddings else None

    def restore_candidate_order(self, rows: torch.Tensor, sequence: PreparedSequence) -> torch.Tensor:
        """Candidate rows ``[C, D]`` in the order of the laid-out sequences → in the batch's order."""
        if sequence.layout.in_batch_order:
            return rows
        return place_rows(rows.shape[0], [sequence.candidate_rows.argsort()], [rows])
