"""Which rows of a jagged batch are candidates."""

from __future__ import annotations

import dataclasses

import torch

from generative_recommenders.ops.checks import (
    assert_on_device,
    check_counts,
    check_sequences,
    is_settled,
    whole_numbers,
)


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
        """Read the counts ``num_targets`` int64 ``[B]`` (one device sync if they are on a GPU).

        Raises:
            ValueError: another shape or dtype, or a count below 0.
        """
        summary = _read(whole_numbers("num_targets", num_targets))
        if summary.smallest < 0:
            check_counts("num_targets", num_targets.cpu())
        return summary


def _read(num_targets: torch.Tensor) -> TargetSummary:
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
        """From ``seq_offsets`` int64 ``[B + 1]`` and ``num_targets`` int64 ``[B]``; no sync if the summary is given.

        Raises:
            ValueError: shapes, dtypes or a summary's number of sequences that do not fit; on a CPU also counts that do
                not fit their sequences or the summary (on a GPU these are asserted on the device).
        """
        check_sequences(seq_offsets, None, num_targets=num_targets)
        if summary is None:
            summary = TargetSummary.of(num_targets)
        else:
            _check_summary(summary, num_targets)
        rows, offsets = _rows_and_offsets(seq_offsets, num_targets, summary)
        return CandidateRows(rows, offsets, summary)

    def check(self, seq_offsets: torch.Tensor) -> None:
        """Raise ``ValueError`` (on a GPU: assert there) unless these are candidates of those sequences."""
        whole_numbers("candidates' offsets", self.offsets, seq_offsets.numel())
        if self.offsets.device.type != "cpu" and is_settled():
            return
        counts = self.offsets.diff()
        check_sequences(seq_offsets, None, num_targets=counts)
        _check_summary(self.summary, counts)
        whole_numbers("candidates' rows", self.rows, self.summary.total)
        want, _ = _rows_and_offsets(seq_offsets, counts, self.summary)
        ok, message = (want == self.rows).all(), "candidates are of other sequences than seq_offsets"
        if self.offsets.device.type != "cpu":
            assert_on_device(ok, message)
        elif not ok:
            raise ValueError(f"{message}: make them with CandidateRows.of(seq_offsets, num_targets)")


def _rows_and_offsets(seq_offsets, num_targets, summary: TargetSummary) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = num_targets.numel()
    if summary.one_each:
        return seq_offsets[1:].long() - 1, torch.arange(sequences + 1, device=seq_offsets.device)
    offsets = torch.cat([num_targets.new_zeros(1, dtype=torch.int64), num_targets.long().cumsum(0)])
    # Candidate c of sequence b lies as far before the sequence's end as before the end of its candidates.
    behind = torch.repeat_interleave(seq_offsets[1:] - offsets[1:], num_targets, output_size=summary.total)
    return torch.arange(summary.total, device=seq_offsets.device) + behind, offsets


def _check_summary(summary: TargetSummary, num_targets: torch.Tensor) -> None:
    """A summary from outside must be of these counts, or rows of other sequences would pass for candidates."""
    on_host = num_targets.device.type == "cpu"
    if summary.sequences != num_targets.numel() or (on_host and summary != _read(num_targets)):
        raise ValueError(f"num_targets ({num_targets.numel()} sequences) are not those of the summary {summary}")
    if on_host or summary.sequences == 0:
        return
    if summary.one_each:
        ok = (num_targets == 1).all()
    else:
        least, most = num_targets.aminmax()
        ok = (num_targets.sum() == summary.total) & (least == summary.smallest) & (most == summary.largest)
    assert_on_device(ok, f"num_targets are not those of the summary {summary}")
