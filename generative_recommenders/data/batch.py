"""A batch as the model takes it: two keyed jagged tensors and who the samples are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loading either takes seconds, and TorchRec's CUDA build a driver: not for opening a data set
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclasses.dataclass
class Batch:
    """B samples, one candidate each; B may be 0.

    ``uih``: the user interaction histories; keys ``FeatureSchema.uih_keys`` (contextual features, one value a sample;
    item features, ``action_weight`` and ``action_timestamp``, one value a history row). ``candidates``: keys
    ``FeatureSchema.candidate_keys``, one value a sample. Values are int64, lengths int32, times seconds.
    ``user_ids`` int64 [B]: the users' ids in the source data. ``sample_ids`` int64 [B]: anchor numbers, unique in a
    data set.
    """

    uih: KeyedJaggedTensor
    candidates: KeyedJaggedTensor
    user_ids: torch.Tensor
    sample_ids: torch.Tensor

    @property
    def batch_size(self) -> int:
        """B."""
        return self.sample_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on ``device``."""
        return Batch(
            self.uih.to(device, non_blocking=non_blocking),
            self.candidates.to(device, non_blocking=non_blocking),
            self.user_ids.to(device, non_blocking=non_blocking),
            self.sample_ids.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked host memory, from which a copy to a GPU runs beside the computation.

        Numbers of values per feature are counted here and go along: on a GPU counting them would wait for it.
        """
        for part in (self.uih, self.candidates):
            if part.stride() > 0:
                part.sync()
        return Batch(
            self.uih.pin_memory(),
            self.candidates.pin_memory(),
            self.user_ids.pin_memory(),
            self.sample_ids.pin_memory(),
        )
