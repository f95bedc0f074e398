"""Looked-up rows of every feature → the inputs of the MLPs on them, one read and one write per element.

A table look-up returns fp32 rows of all features in one buffer and hands out views of it. Cast, concatenated over
history and candidates and then over features, they would be copied three times, and back as often, since the gradients
of views are concatenated again. Here each element is read once, and the gradient is written once, into a buffer that
is the gradient of the look-up's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from generative_recommenders.ops.checks import matrix
from generative_recommenders.ops.encode import reference
from generative_recommenders.ops.encode.backends import kernels
from generative_recommenders.ops.encode.call import JoinedFeatures


def join_features(
    history: Sequence[torch.Tensor],
    candidates: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    dtype: torch.dtype,
    fused: bool,
) -> JoinedFeatures:
    """Place rows of all features.

    Args:
        history, candidates: ``[Lh, E]`` and ``[C, E]`` of each feature.
        others: ``[n, E]`` of features that are only passed on (they share the look-up's buffer and its gradient).
        dtype: of ``item`` and ``attributes``.
        fused: on kernels; ``why_not_fused`` tells. Else plain PyTorch.

    Raises:
        ValueError: features that do not have the same rows and width.
    """
    width = history[0].shape[1]
    for rows in history:
        matrix("each feature of the history", rows, width, history[0].shape[0])
    for rows in candidates:
        matrix("each feature of the candidates", rows, width, candidates[0].shape[0])
    for rows in others:
        matrix("each other feature", rows, width)
    if not fused:
        return reference.join_features(history, candidates, others, dtype)
    tensors = [*history, *candidates, *others]
    sources, places = _common_buffers(tensors)
    plan = _Plan(places, len(history), history[0].shape[1], dtype)
    item, attributes, joined, *rest = _JoinFeatures.apply(plan, *sources)
    return JoinedFeatures(item, attributes if len(history) > 1 else None, joined, tuple(rest))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Rows ``first … first + count`` of source number ``source``."""

    source: int
    first: int
    count: int

    def of(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return sources[self.source][self.first : self.first + self.count]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where the rows of each feature are: of all histories, all candidates, the others."""

    places: list[_Place]
    features: int
    width: int
    dtype: torch.dtype

    @property
    def history(self) -> list[_Place]:
        return self.places[: self.features]

    @property
    def candidates(self) -> list[_Place]:
        return self.places[self.features : 2 * self.features]

    @property
    def others(self) -> list[_Place]:
        return self.places[2 * self.features :]


def _common_buffers(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[_Place]]:
    """The buffers of rows E wide that the tensors are blocks of, and where; a tensor may be its own buffer.

    The gradient of a block would be a buffer-sized sum; the gradient of the buffer takes all blocks at once.
    """
    sources: list[torch.Tensor] = []
    places: list[_Place] = []
    for tensor in tensors:
        base = tensor
        if _is_block(tensor) and tensor._base is not None:
            base = tensor._base
        number = next((i for i, known in enumerate(sources) if known is base), len(sources))
        if number == len(sources):
            sources.append(base)
        first = 0 if base is tensor else (tensor.storage_offset() - base.storage_offset()) // tensor.shape[1]
        places.append(_Place(number, first, tensor.shape[0]))
    if _overlap(places):  # then each needs a gradient of its own, for autograd to add
        return list(tensors), [_Place(i, 0, tensor.shape[0]) for i, tensor in enumerate(tensors)]
    return sources, places


def _overlap(places: Sequence[_Place]) -> bool:
    ordered = sorted((place.source, place.first, place.count) for place in places if place.count)
    pairs = zip(ordered, ordered[1:], strict=False)
    return any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in pairs)


def _is_block(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a block of whole rows of the buffer it is a view of, and that one's gradient is its own."""
    base, width = tensor._base, tensor.shape[1]
    if base is None or base.requires_grad != tensor.requires_grad or base.dtype != tensor.dtype or width == 0:
        return False
    offset = tensor.storage_offset() - base.storage_offset()
    return base.is_contiguous() and tensor.is_contiguous() and base.numel() % width == 0 and offset % width == 0


class _JoinFeatures(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx, plan: _Plan, *sources):
        copy_rows = kernels().copy_rows
        ctx.plan, ctx.sources = plan, [(s.shape, s.dtype, s.device) for s in sources]
        width, like = plan.width, sources[0]
        sources = tuple(s.view(-1, width) if s.is_contiguous() else s for s in sources)
        events, count = plan.history[0].count, plan.candidates[0].count
        rows, attributes = events + count, (plan.features - 1) * width
        item = torch.empty(rows, width, device=like.device, dtype=plan.dtype)
        side = torch.empty(rows, attributes, device=like.device, dtype=plan.dtype)
        joined = torch.empty(count, plan.features * width, device=like.device, dtype=like.dtype)
        for number, (history, candidate) in enumerate(zip(plan.history, plan.candidates, strict=True)):
            block = item if number == 0 else side[:, (number - 1) * width : number * width]
            copy_rows(history.of(sources), block[:events])
            copy_rows(candidate.of(sources), block[events:])
            copy_rows(candidate.of(sources), joined[:, number * width : (number + 1) * width])
        return item, side, joined, *(place.of(sources).clone() for place in plan.others)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_item, d_side, d_joined, *d_others):
        copy_rows = kernels().copy_rows
        plan = ctx.plan
        width, events = plan.width, plan.history[0].count
        grads = []
        for number, (shape, dtype, device) in enumerate(ctx.sources):
            rows = shape.numel() // width
            covered = sum(place.count for place in plan.places if place.source == number)
            allocate = torch.empty if covered == rows else torch.zeros
            grads.append(allocate(rows, width, dtype=dtype, device=device))
        for number, (history, candidate) in enumerate(zip(plan.history, plan.candidates, strict=True)):
            block = d_item if number == 0 else d_side[:, (number - 1) * width : number * width]
            copy_rows(block[:events], history.of(grads))
            target = candidate.of(grads)
            copy_rows(block[events:], target)
            target += d_joined[:, number * width : (number + 1) * width]
        for place, grad in zip(plan.others, d_others, strict=True):
            place.of(grads).copy_(grad)
        return None, *(grad.view(shape) for grad, (shape, _, _) in zip(grads, ctx.sources, strict=True))
