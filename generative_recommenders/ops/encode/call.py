"""What calls of this package are made of beside differentiable tensors, and what they return."""

from __future__ import annotations

import dataclasses

import torch

#: Weight ``[D]``, bias ``[D]`` and eps of a LayerNorm.
Norm = tuple[torch.Tensor, torch.Tensor, float]


@dataclasses.dataclass(frozen=True)
class EncodeCall:
    """What a call of ``encode_sequence`` says beside its differentiable tensors.

    N event rows and K contextual rows make T = N + K joined rows; *source order* is all events, then all context.

    Attributes:
        places: int64 ``[T]``, the joined row of each source row; a permutation.
        patterns: int64 ``[N]``, the action table's row of each event.
        positions, times: int64 ``[T]``, each joined row's entry of the position and time table, in joined order.
        dtype: of the result.
        dropout_ratio: in [0, 1); 0 in evaluation.
        seed: int64 ``[1]`` on the device: which elements are dropped is a function of it, the joined row and the
            column alone. Unused without dropout.
    """

    places: torch.Tensor
    patterns: torch.Tensor
    positions: torch.Tensor
    times: torch.Tensor
    dtype: torch.dtype
    dropout_ratio: float = 0.0
    seed: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class JoinedFeatures:
    """Rows of F features of ``Lh`` history events and C candidates, each E wide.

    Attributes:
        item: ``[Lh + C, E]``, the first feature: history rows, then candidate rows.
        attributes: ``[Lh + C, (F - 1) · E]``, the others side by side; ``None`` for F = 1.
        candidates: ``[C, F · E]``, all features of the candidates side by side, in the dtype of the look-up.
        others: further features as they came.
    """

    item: torch.Tensor
    attributes: torch.Tensor | None
    candidates: torch.Tensor
    others: tuple[torch.Tensor, ...]
