"""Checkpoints: everything a run needs to go on, written whole or not at all.

A checkpoint is a folder ``step_<n>``: the tensors as torch.distributed.checkpoint shards (weights, Adam's moments,
row-wise Adagrad's sums), ``vocabularies/`` (the raw ids that the tables' rows stand for), ``rank_<r>.pt`` per rank
(random streams, running sums) and ``meta.json`` (step, position in the data, configuration, fingerprints of the data).
It is written under another name and renamed when every rank is done, so a kill at any moment leaves the previous
checkpoint as the newest one.

Everything is compared before anything is loaded: ``checkpoint_meta.py`` compares the configuration,
``checkpoint_ids.py`` the ids, ``checkpoint_fit.py`` the tensors. What one rank finds stops all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from generative_recommenders import disk
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.errors import UserError
from generative_recommenders.train import checkpoint_ids, randomness
from generative_recommenders.train.checkpoint_fit import (
    Fit,
    compare,
    first_cause,
    listed,
    load_whole,
    read_index,
    table_sizes,
    tensors_of,
)
from generative_recommenders.train.checkpoint_ids import SHORT, Carry
from generative_recommenders.train.checkpoint_meta import (
    FORMAT,
    REPLACED,
    check_config,
    check_places,
    meaning,
    newest,
    other_meaning,
    other_options,
    read_meta,
)
from generative_recommenders.train.checkpoint_rows import load_rows
from generative_recommenders.train.distributed import World
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.optimizers import Optimizers
from generative_recommenders.train.progress import Progress

WAY_ON = "free some, then go on with --resume or begin again"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What ``restore`` found beside the tensors it loaded."""

    progress: Progress
    local: dict[str, torch.Tensor]
    ranks_before: int
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What ``load`` has to say: ``notes`` on what was asked for, ``warnings`` on what may surprise."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Checkpointer:
    """Saves and restores one run's state on all ranks; every method is a collective call."""

    def __init__(self, folder: pathlib.Path, keep: int, config: RunConfig, world: World, data: RankingDataset) -> None:
        self._folder, self._keep, self._config, self._world, self._data = folder, keep, config, world, data

    def save(
        self, model: nn.Module, optimizers: Optimizers, progress: Progress, local: dict[str, torch.Tensor]
    ) -> pathlib.Path:
        """Write a checkpoint and drop the oldest ones. ``local`` is this rank's own state beside its random streams."""
        final = self._folder / f"step_{progress.step:08d}"
        partial = self._folder / f"{final.name}.partial"
        try:
            self._write(partial, final, model, optimizers, progress, local)
        except BaseException as exc:
            full = disk.is_full(first_cause(exc))
            place = disk.where(self._folder, _bytes(tensors_of(model, optimizers))) if full else ""
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # half a checkpoint serves nobody, least of all a full disk
            if full:
                raise disk.DiskFull(f"no space left on the disk{place} for a checkpoint; {WAY_ON}") from exc
            raise
        self._world.barrier()
        return final

    def _write(
        self,
        partial: pathlib.Path,
        final: pathlib.Path,
        model: nn.Module,
        optimizers: Optimizers,
        progress: Progress,
        local: dict[str, torch.Tensor],
    ) -> None:
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._world.agree(lambda: self._write_ids(partial))
        dcp.save(tensors_of(model, optimizers), checkpoint_id=partial, process_group=self._world.host_group)
        own = {**randomness.capture(self._world.device), **{f"local/{k}": v for k, v in local.items()}}
        torch.save(own, partial / f"rank_{self._world.rank}.pt")
        self._world.barrier()
        if self._world.is_main:
            meta = self._meta(progress, model)
            (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
            if final.exists():
                os.replace(final, final.with_name(final.name + REPLACED))
            os.replace(partial, final)
            self._retire()

    def _write_ids(self, partial: pathlib.Path) -> None:
        if not self._world.is_main:
            return
        previous, data = newest(self._folder), None
        if previous is not None:
            with contextlib.suppress(UserError):  # a damaged one is no source
                data = read_meta(previous).get("data")
        checkpoint_ids.save(partial, self._data.identity, previous, data)

    def _meta(self, progress: Progress, model: nn.Module) -> dict:
        return {
            "format": FORMAT,
            "progress": dataclasses.asdict(progress),
            "world_size": self._world.size,
            "device": self._world.device.type,
            "config": self._config.values(),
            "meaning": meaning(model),
            "data": checkpoint_ids.describe(self._data.identity),
            "torch": torch.__version__,
        }

    def _retire(self) -> None:
        kept = sorted(p for p in self._folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name))
        stale = [p for p in self._folder.glob("step_*") if p.name.endswith((".partial", REPLACED))]
        for path in kept[: -self._keep] + stale:
            shutil.rmtree(path, ignore_errors=True)

    def restore(self, path: pathlib.Path, model: nn.Module, optimizers: Optimizers) -> Restored:
        """Load everything and put this rank's random streams back.

        Raises:
            UserError: another configuration or other data, a damaged checkpoint, or no random state for this rank
                although the number of ranks is the same.
        """
        wanted = tensors_of(model, optimizers)
        found = _examine(path, wanted, self._config, self._data, self._world, first=self._check_run)
        found.fill(path, self._world)
        optimizers.load_dense_state(_dense_state(wanted))
        meta, warnings = found.meta, found.carry.warnings
        progress = meta["progress"]
        if meta["world_size"] != self._world.size:
            randomness.seed_dropout(self._config.train.seed, self._world.rank, progress.step)
            return Restored(progress, {}, meta["world_size"], warnings)
        own = self._world.agree(lambda: self._read_own(path))
        randomness.restore(self._world.device, own)
        local = {key.removeprefix("local/"): value for key, value in own.items() if key.startswith("local/")}
        return Restored(progress, local, meta["world_size"], warnings)

    def _read_own(self, path: pathlib.Path) -> dict[str, torch.Tensor]:
        file = path / f"rank_{self._world.rank}.pt"
        if not file.is_file():
            raise UserError(
                f"{file}: the random state of rank {self._world.rank} is missing, so the run cannot go on as it was; "
                f"restore the file, or start from the weights alone with checkpoint.load"
            )
        try:
            own = dict(torch.load(file, weights_only=True))
            own["cpu"]
        except Exception:  # whatever the unpickler makes of a damaged file
            raise UserError(
                f"{file}: the random state of rank {self._world.rank} cannot be read; restore the file, or start from "
                "the weights alone with checkpoint.load"
            ) from None
        here, there = self._world.device.type, "cuda" if "cuda" in own else "cpu"
        if here != there:
            raise UserError(
                f"{file}: holds the random state of a run on {there}, this one is on {here}; resume with --device "
                f"{there}, or start from the weights alone with checkpoint.load"
            )
        return own

    def _check_run(self, path: pathlib.Path, meta: dict) -> None:
        check_config(path, meta, self._config)
        there, here = (meta.get("data") or {}).get("content"), self._data.identity.content
        if there not in (None, here):
            raise UserError(
                f"{path}: the data changed: its content was {there[:SHORT]} and is {here[:SHORT]}, and a run goes on "
                "with the data that it began with; bring that back, or start a run of another --run-name from these "
                "weights with checkpoint.load (and checkpoint.match_ids=True where ids differ)"
            )


@dataclasses.dataclass(frozen=True)
class _Examined:
    """A checkpoint that fits: what it says, which tensors go where, and which rows."""

    meta: dict
    fit: Fit
    carry: Carry

    def fill(self, path: pathlib.Path, world: World) -> None:
        load_whole(path, self.fit.whole, world)
        if self.fit.by_row:
            load_rows(path, self.fit.by_row, self.carry.old_rows, world)


def _examine(
    path: pathlib.Path,
    wanted: dict[str, torch.Tensor],
    config: RunConfig,
    data: RankingDataset,
    world: World,
    *,
    first: Callable[[pathlib.Path, dict], None] | None = None,
    **choices: bool,
) -> _Examined:
    """Compare everything, load nothing; a collective call. ``first`` goes before the comparison of ids and tensors."""
    match_ids = choices.pop("match_ids", False)
    everywhere = frozenset().union(*world.gather(list(wanted)))

    def check() -> _Examined:
        meta = read_meta(path)
        if first is not None:
            first(path, meta)
        features = data.schema.item_features + data.schema.contextual_features
        check_places(path, meta, features, config.model.tasks)
        index = read_index(path)
        carry = checkpoint_ids.match(path, meta.get("data"), data.identity, table_sizes(index, wanted), match_ids)
        layout = meta["config"].get("sharding.tables", {})
        options = other_options(meta, config)
        fit = compare(
            path, index, wanted, everywhere, renumbered=carry.old_rows, options=options, layout=layout, **choices
        )
        return _Examined(meta, fit, carry)

    return world.agree(check)


def load(
    path: pathlib.Path,
    model: nn.Module,
    optimizers: Optimizers,
    config: RunConfig,
    data: RankingDataset,
    world: World,
) -> Loaded:
    """Start from what another run learnt, on any number of ranks, as the options of ``checkpoint`` say.

    A collective call.

    Raises:
        UserError: on every rank, before anything is loaded: other ids, other tensors, or damage.
    """
    options = config.checkpoint
    wanted = tensors_of(model, optimizers if options.load_optimizer else None)
    found = _examine(
        path,
        wanted,
        config,
        data,
        world,
        match_ids=options.match_ids,
        weights_only=not options.load_optimizer,
        partial=options.partial,
    )
    found.fill(path, world)
    if options.load_optimizer:
        optimizers.load_dense_state(_dense_state(wanted))
    notes = [*found.carry.notes, *_passed_over(path, found.fit)]
    return Loaded(tuple(notes), (*found.carry.warnings, *other_meaning(path, found.meta, model)))


def _passed_over(path: pathlib.Path, fit: Fit) -> list[str]:
    """What a partial load did not load, one line each way."""
    said = []
    if fit.left_out:
        said.append(
            f"{path}: left out {len(fit.left_out)} tensors that this model has no place for: {listed(fit.left_out)}"
        )
    if fit.kept:
        said.append(f"{path}: lacks {len(fit.kept)} tensors, which stay at their initial values: {listed(fit.kept)}")
    return said


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of this rank's part of some tensors."""
    parts = [
        local
        for tensor in tensors.values()
        for local in ([s.tensor for s in tensor.local_shards()] if hasattr(tensor, "local_shards") else [tensor])
        if isinstance(local, torch.Tensor)
    ]
    return sum(part.numel() * part.element_size() for part in parts)


def _dense_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Adam's part of ``tensors_of``, as ``Optimizers.load_dense_state`` takes it."""
    nested: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("dense_optimizer."):
            name, entry = key.removeprefix("dense_optimizer.").rsplit("/", 1)
            nested.setdefault(name, {})[entry] = tensor
    return nested
