"""Which rows of a jagged batch are candidates."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class TargetSummary:
    """What the host must know about a batch's candidates: B sequences, C candidates, the smallest and largest count."""

    sequences: int
    total: int
    smallest: int
    largest: int

    @property
    def one_each(self) -> bool:
        """Exactly one candidate in every sequence (true of an empty batch)."""
        return self.total == self.sequences and (self.sequences == 0 or self.smallest == self.largest == 1)

    @staticmethod
    def of(num_targets: torch.Tensor) -> TargetSummary:
        """Read the counts ``num_targets`` int64 ``[B]`` (one device sync if they are on a GPU)."""
        if num_targets.numel() == 0:
            return TargetSummary(0, 0, 0, 0)
        total, smallest, largest = torch.stack([num_targets.sum(), num_targets.min(), num_targets.max()]).tolist()
        return TargetSummary(num_targets.numel(), total, smallest, largest)


@dataclasses.dataclass(frozen=True)
class CandidateRows:
    """The candidates of a jagged batch, sequence after sequence: the last rows of each.

    Attributes:
        rows: int64 ``[C]``, row number of each candidate in ``[T, D]``.
        offsets: int64 ``[B + 1]``, candidates before each sequence.
        summary: the counts on the host.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    summary: TargetSummary

    @staticmethod
    def of(seq_offsets: torch.Tensor, num_targets: torch.Tensor, summary: TargetSummary | None = None) -> CandidateRows:
        """From ``seq_offsets`` int64 ``[B + 1]`` and ``num_targets`` int64 ``[B]``; no sync if the summary is given."""
        if seq_offsets.dim() != 1 or num_targets.shape != (seq_offsets.numel() - 1,):
            raise ValueError(
                f"num_targets must be [{seq_offsets.numel() - 1}] for seq_offsets [{seq_offsets.numel()}]: "
                f"got {list(num_targets.shape)}"
            )
        summary = TargetSummary.of(num_targets) if summary is None else summary
        sequences = num_targets.numel()
        if summary.one_each:
            offsets = torch.arange(sequences + 1, device=seq_offsets.device)
            return CandidateRows(seq_offsets[1:] - 1, offsets, summary)
        offsets = torch.cat([num_targets.new_zeros(1, dtype=torch.int64), num_targets.long().cumsum(0)])
        # Candidate c of sequence b lies as far before the sequence's end as before the end of its candidates.
        behind = torch.repeat_interleave(seq_offsets[1:] - offsets[1:], num_targets, output_size=summary.total)
        return CandidateRows(torch.arange(summary.total, device=seq_offsets.device) + behind, offsets, summary)
