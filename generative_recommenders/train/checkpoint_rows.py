"""Tables whose rows have other numbers than in the checkpoint: each row goes where its id stands now.

A rank reads the stored pieces that hold rows of its own shards, one piece at a time, and no others.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from generative_recommenders.train.checkpoint_fit import entries_of, size_of, table_of, unreadable, weight_of
from generative_recommenders.train.distributed import World


def load_rows(
    path: pathlib.Path, tensors: Mapping[str, torch.Tensor], old_rows: Mapping[str, np.ndarray], world: World
) -> None:
    """Load tables, and their sums, row by row; a collective call.

    Args:
        tensors: sharded tensors by stored name: weights ``[rows, columns]``, sums ``[rows]`` or, of a table split by
            columns, ``[pieces · rows]``. Filled in place; rows that the checkpoint does not have stay as they are.
        old_rows: table → int64 ``[n]``, the stored row of each of the first n rows, -1 where there is none. Rows from
            n on have none either.

    Raises:
        UserError: on every rank, if any rank cannot read its part.
    """

    def read() -> None:
        planner = _RowPlanner(dict(tensors), old_rows)
        try:
            dcp.load(dict(tensors), checkpoint_id=path, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as exc:
            raise unreadable(path, exc) from exc

    world.agree(read)


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """Rows of one stored piece that go to one shard: ``target[rows_here] = piece[rows_there]``."""

    target: torch.Tensor
    rows_here: np.ndarray
    rows_there: np.ndarray


class _RowPlanner(LoadPlanner):
    """Reads a stored piece into a buffer and hands its rows out to a shard; one request for each pair that meets."""

    def __init__(self, tensors: Mapping[str, Any], old_rows: Mapping[str, np.ndarray]) -> None:
        self._tensors, self._old_rows = tensors, old_rows
        self._transfers: dict[ReadItem, _Transfer] = {}

    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._index = entries_of(metadata)

    def create_local_plan(self) -> LoadPlan:
        for name, tensor in self._tensors.items():
            for shard in tensor.local_shards():
                wanted = self._wanted(name, shard)
                for chunk in self._index[name].chunks:
                    self._plan(name, shard, wanted, chunk)
        return LoadPlan(list(self._transfers))

    def _wanted(self, name: str, shard: Shard) -> np.ndarray:
        """int64 [rows of the shard]: the stored row of each, or -1. Sums of a later piece of columns stand behind the
        rows of the earlier ones."""
        table, sums = table_of(name) or ("", False)  # tensors of tables alone come here
        first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        piece = 0
        if sums:
            weight = weight_of(table)
            piece, first = divmod(first, size_of(self._tensors[weight])[0])
        known = self._old_rows[table][first : first + count]
        wanted = np.full(count, -1, np.int64)
        wanted[: len(known)] = known
        if piece:
            wanted[wanted >= 0] += piece * self._index[weight].size[0]
        return wanted

    def _plan(self, name: str, shard: Shard, wanted: np.ndarray, chunk: ChunkStorageMetadata) -> None:
        here = np.flatnonzero((wanted >= chunk.offsets[0]) & (wanted < chunk.offsets[0] + chunk.sizes[0]))
        if not len(here):
            return
        there = wanted[here] - chunk.offsets[0]
        first, last = int(there.min()), int(there.max()) + 1
        target, offsets, lengths = shard.tensor, [first], [last - first]
        if target.dim() == 2:
            start, width = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
            low, high = max(start, chunk.offsets[1]), min(start + width, chunk.offsets[1] + chunk.sizes[1])
            if low >= high:
                return
            target = target[:, low - start : high - start]
            offsets, lengths = [*offsets, low - chunk.offsets[1]], [*lengths, high - low]
        request = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(name, shard.metadata.shard_offsets),
            dest_offsets=torch.Size([0] * target.dim()),
            storage_index=MetadataIndex(name, chunk.offsets),
            storage_offsets=torch.Size(offsets),
            lengths=torch.Size(lengths),
        )
        self._transfers[request] = _Transfer(target, here, there - first)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TypeError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        name = read_item.storage_index.fqn
        return torch.empty(read_item.lengths, dtype=self._index[name].properties.dtype)

    @torch.no_grad()
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        transfer = self._transfers[read_item]
        target = transfer.target
        rows = tensor[torch.from_numpy(transfer.rows_there)].to(target)
        target[torch.from_numpy(transfer.rows_here).to(target.device)] = rows
