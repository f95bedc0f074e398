"""What a checkpoint's tensors are, held against those that a run asks for: decided before a single one is loaded.

Tensors go by the names under which torch.distributed.checkpoint stores them: ``model.…``, ``dense_optimizer.…`` and
``sparse_optimizer.…``. What does not fit is told apart: tensors that only one side has, other shapes, another layout of
the tables, damaged files.
"""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from generative_recommenders.errors import UserError
from generative_recommenders.modules.table_names import feature_of_table, table_name
from generative_recommenders.train.distributed import World
from generative_recommenders.train.optimizers import Optimizers

# A table's weight, or the sums that row-wise Adagrad keeps for it.
TABLE_TENSOR = re.compile(
    r"(?:model|sparse_optimizer\.state)\.embedding_collection\.embeddings\.(?P<table>.+)\.weight(?P<sums>\.(?P=table)\.\w+)?"
)
SHOWN = 3  # names in a message; the others are counted


@dataclasses.dataclass(frozen=True)
class Fit:
    """Which tensors go where. ``whole``: as they are stored. ``by_row``: of tables whose rows have other numbers now.

    ``left_out``: names in the checkpoint alone; ``kept``: names in the run alone, which stay as they were.
    """

    whole: dict[str, torch.Tensor]
    by_row: dict[str, torch.Tensor]
    left_out: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def tensors_of(model: nn.Module, optimizers: Optimizers | None = None) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint stores by its stored name, or the weights alone; the tensors alias the live ones."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if optimizers is not None:
        for name, entry in optimizers.dense_state().items():
            found.update({f"dense_optimizer.{name}/{key}": tensor for key, tensor in entry.items()})
        for name, entry in optimizers.sparse_state()["state"].items():
            found.update({f"sparse_optimizer.state.{name}.{key}": tensor for key, tensor in entry.items()})
    return found


def size_of(tensor: Any) -> tuple[int, ...]:
    """The size of a tensor; the whole one's of a sharded tensor, whose own ``size`` warns on every call."""
    return tuple(tensor.metadata().size if hasattr(tensor, "local_shards") else tensor.size())


def table_of(name: str) -> tuple[str, bool] | None:
    """The feature whose table a stored tensor is of, and whether it holds the table's sums; ``None`` for others."""
    match = TABLE_TENSOR.fullmatch(name)
    return (feature_of_table(match["table"]), match["sums"] is not None) if match else None


def weight_of(table: str) -> str:
    """The stored name of a table's weight."""
    return f"model.embedding_collection.embeddings.{table_name(table)}.weight"


def entries_of(index: Metadata) -> Mapping[str, TensorStorageMetadata]:
    """What a checkpoint says of its tensors, by stored name; all that it holds are tensors."""
    return cast(Mapping[str, TensorStorageMetadata], index.state_dict_metadata)


def table_sizes(index: Metadata, wanted: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Table → its rows in the checkpoint and in ``wanted``, of the tables that both have."""
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in wanted.items():
        table, sums = table_of(name) or ("", True)
        if not sums and name in index.state_dict_metadata:
            found[table] = (entries_of(index)[name].size[0], size_of(tensor)[0])
    return found


def read_index(path: pathlib.Path) -> Metadata:
    """The index of a checkpoint's tensors. ``UserError`` if it, or a file that it names, is damaged or cut off."""
    try:
        index = dcp.FileSystemReader(path).read_metadata()
        ends: dict[str, int] = {}
        for place in index.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        names = [*index.state_dict_metadata]
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, TypeError, KeyError, ImportError):
        raise UserError(f"{path / '.metadata'}: missing or damaged, the tensors cannot be found; {_ANOTHER}") from None
    for file, end in sorted(ends.items()):
        size = (path / file).stat().st_size if (path / file).is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size:,} bytes of {end:,}, it is cut off"
            raise UserError(f"{path / file}: {found}: the checkpoint is damaged; {_ANOTHER}")
    if not names:
        raise UserError(f"{path / '.metadata'}: damaged, it lists no tensors; {_ANOTHER}")
    return index


_ANOTHER = "restore the file, or use another checkpoint"


def compare(
    path: pathlib.Path,
    index: Metadata,
    wanted: Mapping[str, torch.Tensor],
    everywhere: Set[str],
    *,
    renumbered: Iterable[str] = (),
    weights_only: bool = False,
    partial: bool = False,
    options: str = "",
    layout: object = None,
) -> Fit:
    """Decide what is loaded.

    Args:
        wanted: this rank's tensors by stored name.
        everywhere: the names that any rank wants: a table's sums are known to the ranks that hold a shard of it alone.
        renumbered: tables whose rows are carried by number, and may be more or fewer than stored.
        weights_only: the optimizers' state is not asked for, and does not count as left out.
        partial: names that only one side has are passed over.
        options: how the options differ, for messages.
        layout: ``sharding.tables`` of the run that wrote the checkpoint, for messages.

    Raises:
        UserError: something does not fit; says what, and the way out.
    """
    stored = index.state_dict_metadata
    names = [name for name in stored if name.startswith("model.") or not weights_only]
    left_out = tuple(sorted(set(names) - everywhere))
    kept = tuple(sorted(everywhere - set(names)))
    if (left_out or kept) and not partial:
        raise UserError(f"{path}: does not fit this model: {_one_sided(left_out, kept)}{options}; {_PARTIAL}")
    both = {name: tensor for name, tensor in wanted.items() if name in stored}
    if not both:
        raise UserError(f"{path}: has no tensor in common with this model{options}; use another one")
    _check_layout(path, index, both, layout)
    renumbered = set(renumbered)
    by_row = {name: tensor for name, tensor in both.items() if (table_of(name) or ("",))[0] in renumbered}
    _check_shapes(path, index, both, by_row, options)
    return Fit({name: tensor for name, tensor in both.items() if name not in by_row}, by_row, left_out, kept)


_PARTIAL = (
    "use the options that it was written with, or have what fits loaded and the rest passed over with "
    "--bind checkpoint.load=... --bind checkpoint.partial=True"
)


def _one_sided(left_out: tuple[str, ...], kept: tuple[str, ...]) -> str:
    parts = []
    if left_out:
        parts.append(f"the model has no place for {len(left_out)} of its tensors ({listed(left_out)})")
    if kept:
        parts.append(f"it lacks {len(kept)} that the run needs ({listed(kept)})")
    return " and ".join(parts)


def listed(names: Iterable[str]) -> str:
    """The first few names and a count of the others; the model's tensors without the prefix."""
    names = [name.removeprefix("model.") for name in names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _check_layout(path: pathlib.Path, index: Metadata, both: Mapping[str, Any], layout: object) -> None:
    """Row-wise Adagrad keeps a sum per row, or per piece of a row where a table is split by columns."""
    for name in both:
        table, sums = table_of(name) or ("", False)
        weight = weight_of(table)
        if not sums or weight not in both:
            continue
        there = {chunk.offsets[1] for chunk in entries_of(index)[weight].chunks}
        here = {shard.shard_offsets[1] for shard in both[weight].metadata().shards_metadata}
        if there != here:
            raise UserError(
                f"{path}: table {table} has another layout: {_pieces(there)} in the checkpoint, {_pieces(here)} in "
                "this run, and row-wise Adagrad keeps one sum for each, so its sums fit one layout only; go on with "
                f"sharding.tables = {layout!r} as there, or start from the weights alone with checkpoint.load"
            )


def _pieces(starts: set[int]) -> str:
    if len(starts) == 1:
        return "whole rows (row_wise or table_wise)"
    return f"rows in {len(starts)} pieces (column_wise)"


def _check_shapes(
    path: pathlib.Path,
    index: Metadata,
    both: Mapping[str, torch.Tensor],
    by_row: Mapping[str, torch.Tensor],
    options: str,
) -> None:
    wrong = []
    for name, tensor in both.items():
        there, here = tuple(getattr(index.state_dict_metadata[name], "size", ())), size_of(tensor)
        if name in by_row:  # the number of rows may differ
            there, here = there[1:], here[1:]
        if there != here:
            wrong.append((name, there, here))
    if wrong:
        name, there, here = wrong[0]
        more = f", and {len(wrong) - 1} more tensors differ" if len(wrong) > 1 else ""
        raise UserError(
            f"{path}: does not fit this model: {name.removeprefix('model.')} is {there} there and {here} here{more}"
            f"{options}; check the model options, or use another one"
        )


def first_cause(exc: BaseException) -> BaseException:
    """What went wrong on the first rank that failed; torch.distributed.checkpoint wraps it in its own exception."""
    return next(iter(exc.failures.values()))[0] if isinstance(exc, CheckpointException) else exc


def load_whole(path: pathlib.Path, tensors: dict[str, torch.Tensor], world: World) -> None:
    """Load tensors as they are stored, in place, onto any number of ranks; a collective call.

    Raises:
        UserError: on every rank, if any rank cannot read its part.
    """
    try:
        dcp.load(tensors, checkpoint_id=path, process_group=world.host_group)
    except (Exception, CheckpointException) as exc:
        raise unreadable(path, exc) from exc


def unreadable(path: pathlib.Path, exc: BaseException) -> UserError:
    """What to say of tensors that fit by their index, and cannot be read."""
    cause = first_cause(exc)
    reason = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
    return UserError(f"{path}: its tensors cannot be read, it is damaged ({reason}); {_ANOTHER}")
