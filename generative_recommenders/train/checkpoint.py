"""Checkpoints: everything a run needs to go on, written whole or not at all.

A checkpoint is a folder ``step_<n>``: the tensors as torch.distributed.checkpoint shards (weights, Adam's moments,
row-wise Adagrad's sums), ``rank_<r>.pt`` per rank (random streams, running sums) and ``meta.json`` (step, position in
the data, metric state, configuration). It is written under another name and renamed when every rank is done, so a kill
at any moment leaves the previous checkpoint as the newest one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU
from generative_recommenders.train import randomness
from generative_recommenders.train.checkpoint_fit import (
    Fit,
    compare,
    listed,
    load_whole,
    read_index,
    tensors_of,
)
from generative_recommenders.train.distributed import World
from generative_recommenders.train.gin_files import FREE_ON_RESUME, RunConfig
from generative_recommenders.train.optimizers import Optimizers

FORMAT = 1
# A second checkpoint at one step replaces the first, which is out of the way under this suffix for a moment.
REPLACED = ".replaced"
NAME = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")
# Options of the model that change what weights mean, although they fit: said when another run's weights are loaded.
MEANING = """hstu_num_heads hstu_attn_qk_dim hstu_attn_linear_dim max_seq_len attn_norm postprocessor causal
    target_aware max_attn_len contextual_seq_len use_group_norm""".split()


@dataclasses.dataclass
class Progress:
    """Where a run stands: what the loop counts and what it has seen. Saved in ``meta.json``.

    ``seconds`` of training alone, ``seconds_in_all`` of everything, both from the run's beginning.
    """

    step: int = 0
    samples: int = 0
    phase: int = 0
    samples_in_phase: int = 0
    samples_at_last_eval: int = -1
    logged_step: int = 0
    best_auc: float | None = None
    seconds: float = 0.0
    seconds_in_all: float = 0.0


@dataclasses.dataclass(frozen=True)
class Restored:
    """What ``restore`` found beside the tensors it loaded."""

    progress: Progress
    local: dict[str, torch.Tensor]
    ranks_before: int


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What ``load`` has to say: ``notes`` on what was asked for, ``warnings`` on what may surprise."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def newest(folder: pathlib.Path) -> pathlib.Path | None:
    """The complete checkpoint with the highest step in ``folder``, or ``None``."""
    found = [(int(m.group(1)), not m.group(2), p) for p in folder.glob("step_*") if (m := NAME.fullmatch(p.name))]
    return max(found)[2] if found else None


def resolve(path: str) -> pathlib.Path:
    """A checkpoint folder, or the newest one of a run folder. Raises ``UserError`` where there is none."""
    given = pathlib.Path(path)
    if (given / "meta.json").is_file():
        return given
    found = newest(given / "checkpoints") or newest(given)
    if found is None:
        raise UserError(f"{path}: holds no complete checkpoint; give a run folder or a folder step_<n>")
    return found


class Checkpointer:
    """Saves and restores one run's state on all ranks; every method is a collective call."""

    def __init__(self, folder: pathlib.Path, keep: int, config: RunConfig, world: World) -> None:
        self._folder, self._keep, self._config, self._world = folder, keep, config, world

    def save(
        self, model: nn.Module, optimizers: Optimizers, progress: Progress, local: dict[str, torch.Tensor]
    ) -> pathlib.Path:
        """Write a checkpoint and drop the oldest ones. ``local`` is this rank's own state beside its random streams."""
        final = self._folder / f"step_{progress.step:08d}"
        partial = self._folder / f"{final.name}.partial"
        try:
            self._write(partial, final, model, optimizers, progress, local)
        except BaseException:
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # half a checkpoint serves nobody, least of all a full disk
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
        self._world.barrier()
        dcp.save(tensors_of(model, optimizers), checkpoint_id=partial, process_group=self._world.host_group)
        own = {**randomness.capture(self._world.device), **{f"local/{k}": v for k, v in local.items()}}
        torch.save(own, partial / f"rank_{self._world.rank}.pt")
        self._world.barrier()
        if self._world.is_main:
            meta = self._meta(progress, model)
            (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
            if final.exists():
                os.replace(final, final.with_name(final.name + REPLACED))
            os.replace(partial, final)
            self._retire()

    def _meta(self, progress: Progress, model: nn.Module) -> dict:
        return {
            "format": FORMAT,
            "progress": dataclasses.asdict(progress),
            "world_size": self._world.size,
            "device": self._world.device.type,
            "fingerprint": self._config.fingerprint(),
            "config": self._config.values(),
            "meaning": _meaning(model),
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
            UserError: another configuration, a damaged checkpoint, or no random state for this rank although the
                number of ranks is the same.
        """
        wanted = tensors_of(model, optimizers)

        def check() -> tuple[dict, Fit]:
            meta = _read_meta(path)
            self._check_config(path, meta)
            return meta, compare(path, read_index(path), wanted, **_for_messages(meta, self._config))

        meta, fit = self._world.agree(check)
        load_whole(path, fit.whole, self._world)
        optimizers.load_dense_state(_dense_state(wanted))
        progress = meta["progress"]
        if meta["world_size"] != self._world.size:
            randomness.seed_dropout(self._config.train.seed, self._world.rank, progress.step)
            return Restored(progress, {}, meta["world_size"])
        own = self._world.agree(lambda: self._read_own(path))
        randomness.restore(self._world.device, own)
        local = {key.removeprefix("local/"): value for key, value in own.items() if key.startswith("local/")}
        return Restored(progress, local, meta["world_size"])

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

    def _check_config(self, path: pathlib.Path, meta: dict) -> None:
        now = _plain(self._config.values())
        then = meta["config"]
        for name in sorted(set(now) | set(then)):
            if name not in FREE_ON_RESUME and now.get(name) != then.get(name):
                raise UserError(
                    f"{path}: was written with {name} = {then.get(name)!r}, this run has {now.get(name)!r}; "
                    "resume with the same configuration, or start from the weights alone with checkpoint.load"
                )
        if now["train.mode"] != "eval" and _streams(now) != _streams(then):
            raise UserError(
                f"{path}: was written with train.mode = {then['train.mode']!r}, which counts its way through the data "
                f"otherwise than {now['train.mode']!r}; resume with the same mode"
            )


def _streams(values: Mapping[str, object]) -> bool:
    """Whether a run counts its way window by window."""
    return values["train.mode"] == "streaming-train-eval" and not values["mlperf.enabled"]


def _meaning(model: nn.Module) -> dict[str, object]:
    """The resolved ``MEANING`` options of a sharded model."""
    core = next(module for module in model.modules() if isinstance(module, DlrmHSTU))
    return {name: getattr(core.config, name) for name in MEANING}


def load(path: pathlib.Path, model: nn.Module, config: RunConfig, world: World) -> Loaded:
    """Load another run's weights, onto any number of ranks, as the options of ``checkpoint`` say. A collective call.

    Raises:
        UserError: on every rank, before anything is loaded: what does not fit, or is damaged.
    """
    wanted = tensors_of(model)

    def check() -> tuple[dict, Fit]:
        meta = _read_meta(path)
        index = read_index(path)
        partial = config.checkpoint.partial
        fit = compare(path, index, wanted, weights_only=True, partial=partial, **_for_messages(meta, config))
        return meta, fit

    meta, fit = world.agree(check)
    load_whole(path, fit.whole, world)
    then = meta.get("meaning", {})
    warnings = [
        f"{path}: was trained with model.{name} = {then[name]!r}, this run has {now!r}: they score otherwise"
        for name, now in _meaning(model).items()
        if then.get(name, now) != now
    ]
    return Loaded(tuple(_passed_over(path, fit)), tuple(warnings))


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


def _for_messages(meta: dict, config: RunConfig) -> dict[str, object]:
    """What ``compare`` says of the options: those of the model that differ, and how the tables were laid out."""
    then, now = meta["config"], _plain(config.values())
    differ = [name for name in now if name.startswith("model.") and name in then and then[name] != now[name]]
    options = [f"{name} = {then[name]!r} there and {now[name]!r} here" for name in differ]
    return {"options": "".join(f"; {text}" for text in options[:3]), "layout": then.get("sharding.tables", {})}


def _plain(values: Mapping[str, object]) -> dict:
    """Option values as JSON gives them back."""
    return json.loads(json.dumps(values, default=str))


def _dense_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Adam's part of ``tensors_of``, as ``Optimizers.load_dense_state`` takes it."""
    nested: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("dense_optimizer."):
            name, entry = key.removeprefix("dense_optimizer.").rsplit("/", 1)
            nested.setdefault(name, {})[entry] = tensor
    return nested


def _read_meta(path: pathlib.Path) -> dict:
    """``meta.json``, with ``progress`` as a ``Progress``."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise UserError(f"{path}: checkpoint format {meta['format']}, this version reads {FORMAT}")
        return {**meta, "progress": Progress(**meta["progress"])}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        reason = f"meta.json: {type(exc).__name__} {exc}"
        raise UserError(f"{path}: not a complete checkpoint ({reason}); remove it to use the one before") from None
