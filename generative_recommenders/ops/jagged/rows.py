"""Moving rows between jagged tensors: one scatter or gather per part, the opposite move as the gradient.

Row numbers are unique, so both directions are plain copies (deterministic, any dtype, no atomics).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from generative_recommenders.ops.checks import check_distinct, check_indices, check_permutation, check_sequences


class _PlaceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, num_rows, num_parts, *rows_and_parts):
        rows, parts = rows_and_parts[:num_parts], rows_and_parts[num_parts:]
        ctx.save_for_backward(*rows)
        out = parts[0].new_empty(num_rows, *parts[0].shape[1:])
        for index, part in zip(rows, parts, strict=True):
            out.index_copy_(0, index, part)
        return out

    @staticmethod
    def backward(ctx, grad):
        rows = ctx.saved_tensors
        needed = ctx.needs_input_grad[2 + len(rows) :]
        grads = [grad.index_select(0, r) if need else None for r, need in zip(rows, needed, strict=True)]
        return (None, None, *[None] * len(rows), *grads)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, rows):
        ctx.save_for_backward(rows)
        ctx.num_rows = values.shape[0]
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, rows, grad), None


class _SplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, *rows):
        ctx.save_for_backward(*rows)
        ctx.num_rows = values.shape[0]
        return tuple(values.index_select(0, index) for index in rows)

    @staticmethod
    def backward(ctx, *grads):
        rows = ctx.saved_tensors
        out = grads[0].new_empty(ctx.num_rows, *grads[0].shape[1:])
        for index, grad in zip(rows, grads, strict=True):
            out.index_copy_(0, index, grad)
        return (out, *[None] * len(rows))


def place_rows(num_rows: int, rows: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Write part p's row i to row ``rows[p][i]`` of the result ``[num_rows, ...]``.

    All row numbers together must cover 0 … num_rows − 1 exactly once; parts share dtype and trailing shape.
    """
    for index, part in zip(rows, parts, strict=True):
        check_indices("rows", index, num_rows)
        if index.numel() != part.shape[0]:
            raise ValueError(f"rows of a part of {part.shape[0]} rows must be [{part.shape[0]}]: got [{index.numel()}]")
    check_parts(num_rows, parts)
    if num_rows:
        check_permutation("rows", torch.cat(list(rows)), num_rows)
    return _PlaceRows.apply(num_rows, len(parts), *(index.long() for index in rows), *parts)


def check_parts(num_rows: int, parts: Sequence[torch.Tensor]) -> None:
    """Parts must share dtype and trailing shape and have ``num_rows`` rows together."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise TypeError(f"parts must share one dtype, got {', '.join(sorted(map(str, dtypes)))}: convert them first")
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"parts must share the shape of a row, got {sorted(shapes)}")
    covered = sum(part.shape[0] for part in parts)
    if covered != num_rows:
        raise ValueError(f"parts have {covered} rows together but the result has {num_rows}")


def take_rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``values[rows]`` for distinct row numbers; the gradient of all other rows is zero."""
    check_indices("rows", rows, values.shape[0])
    check_distinct("rows", rows, values.shape[0])
    return _TakeRows.apply(values, rows.long())  # copies by row number, of the backward too, take int64 alone


@dataclasses.dataclass(frozen=True)
class JaggedJoin:
    """Where the rows of several jagged tensors go when each sequence is the parts' sequences one after the other.

    Attributes:
        offsets: int64 ``[B + 1]`` of the joined sequences.
        rows: per part int64 ``[T_p]``: the joined row number of the part's row.
    """

    offsets: torch.Tensor
    rows: tuple[torch.Tensor, ...]

    @property
    def num_rows(self) -> int:
        """T of the joined tensor."""
        return sum(r.numel() for r in self.rows)

    def place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts ``[T_p, ...]`` → joined ``[T, ...]``."""
        for index, part in zip(self.rows, parts, strict=True):
            if index.numel() != part.shape[0]:
                raise ValueError(f"a part has {part.shape[0]} rows, the join was planned for {index.numel()}")
        check_parts(self.num_rows, parts)
        return _PlaceRows.apply(self.num_rows, len(parts), *self.rows, *parts)  # distinct as they were made

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Joined ``[T, ...]`` → parts."""
        if values.shape[0] != self.num_rows:
            raise ValueError(f"values have {values.shape[0]} rows, the join was planned for {self.num_rows} rows")
        return _SplitRows.apply(values, *self.rows)


def interleave(
    part_offsets: Sequence[torch.Tensor], part_rows: Sequence[int], order: torch.Tensor | None = None
) -> JaggedJoin:
    """Plan the join of parts.

    Args:
        part_offsets: int64 ``[B + 1]`` of each part.
        part_rows: row count of each part, known on the host.
        order: int64 ``[B]``, a permutation: the joined tensor's sequence s is the parts' sequence ``order[s]``.
    """
    batches = {offsets.numel() - 1 for offsets in part_offsets}
    if len(batches) != 1:
        raise ValueError(f"parts must have the same number of sequences, got {sorted(batches)}")
    if len(part_offsets) != len(part_rows):
        raise ValueError(f"part_rows has {len(part_rows)} counts for {len(part_offsets)} parts")
    for offsets, count in zip(part_offsets, part_rows, strict=True):
        check_sequences(offsets, count, name="offsets")
    if order is not None:
        check_permutation("order", order, batches.pop())
        order = order.long()
    total = torch.stack(list(part_offsets)).sum(0)
    start = total[:-1]
    if order is not None:
        lengths = total.diff()[order]
        total = torch.zeros_like(total)
        torch.cumsum(lengths, 0, out=total[1:])
        start = torch.empty_like(lengths).index_copy_(0, order, total[:-1])
    rows = []
    for offsets, count in zip(part_offsets, part_rows, strict=True):
        lengths = offsets.diff()
        shift = torch.repeat_interleave(start - offsets[:-1], lengths, output_size=count)
        rows.append(torch.arange(count, device=offsets.device) + shift)
        start = start + lengths
    return JaggedJoin(total, tuple(rows))
