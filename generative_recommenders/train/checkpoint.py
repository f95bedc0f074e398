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
from torch.distributed.checkpoint.api import CheckpointException

from generative_recommenders import disk
from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU
from generative_recommenders.paths import user_path
from generative_recommenders.train import randomness
from generative_recommenders.train.distributed import World
from generative_recommenders.train.gin_files import FREE_ON_RESUME, RunConfig
from generative_recommenders.train.optimizers import Optimizers

FORMAT = 1
WAY_ON = "free some, then go on with --resume or begin again"
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


def newest(folder: pathlib.Path) -> pathlib.Path | None:
    """The complete checkpoint with the highest step in ``folder``, or ``None``."""
    found = [(int(m.group(1)), not m.group(2), p) for p in folder.glob("step_*") if (m := NAME.fullmatch(p.name))]
    return max(found)[2] if found else None


def resolve(path: str) -> pathlib.Path:
    """A checkpoint folder, or the newest one of a run folder. Raises ``UserError`` where there is none."""
    given = user_path(path)
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
        except BaseException as exc:
            full = disk.is_full(first_cause(exc))
            place = disk.where(self._folder, _bytes(_tensors(model, optimizers))) if full else ""
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
        self._world.barrier()
        dcp.save(_tensors(model, optimizers), checkpoint_id=partial, process_group=self._world.host_group)
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
        meta = _read_meta(path)
        self._check_config(path, meta)
        state = _tensors(model, optimizers)
        _load(state, path, self._world)
        optimizers.load_dense_state(_unflatten(state["dense_optimizer"]))
        progress = meta["progress"]
        if meta["world_size"] != self._world.size:
            randomness.seed_dropout(self._config.train.seed, self._world.rank, progress.step)
            return Restored(progress, {}, meta["world_size"])
        own, problem = None, None
        try:
            own = self._read_own(path)
        except UserError as exc:
            problem = str(exc)
        problems = [text for text in self._world.gather(problem) if text]
        if problems:  # every rank stops, also where its own file is there
            raise UserError(problems[0])
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
        now = json.loads(json.dumps(self._config.values(), default=str))
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


def load_weights(path: pathlib.Path, model: nn.Module, world: World) -> list[str]:
    """Load the model's weights alone, onto any number of ranks.

    Returns:
        One line for each option under which the weights mean something else than where they were trained.
    """
    then = _read_meta(path).get("meaning", {})
    _load({"model": model.state_dict()}, path, world)
    return [
        f"{path}: was trained with model.{name} = {then[name]!r}, this run has {now!r}: they score otherwise"
        for name, now in _meaning(model).items()
        if then.get(name, now) != now
    ]


def _tensors(model: nn.Module, optimizers: Optimizers) -> dict:
    """Everything torch.distributed.checkpoint stores; tensors alias the live ones, so loading fills them in place."""
    dense = {f"{name}/{key}": t for name, entry in optimizers.dense_state().items() for key, t in entry.items()}
    return {
        "model": model.state_dict(),
        "dense_optimizer": dense,
        "sparse_optimizer": optimizers.sparse_state(),
    }


def _bytes(state: dict) -> int:
    """Bytes of this rank's part of a state."""
    parts = [part for group in state.values() for part in group.values()]
    tensors = [
        local
        for part in parts
        for local in ([s.tensor for s in part.local_shards()] if hasattr(part, "local_shards") else [part])
        if isinstance(local, torch.Tensor)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _unflatten(flat: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    nested: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in flat.items():
        name, entry = key.rsplit("/", 1)
        nested.setdefault(name, {})[entry] = tensor
    return nested


def _read_meta(path: pathlib.Path) -> dict:
    """``meta.json``, with ``progress`` as a ``Progress``."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise UserError(f"{path}: checkpoint format {meta['format']}, this version reads {FORMAT}")
        return {**meta, "progress": Progress(**meta["progress"])}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        reason = f"meta.json: {type(exc).__name__} {exc}"
        raise UserError(f"{path}: not a complete checkpoint ({reason}); remove it to use the one before") from None


def first_cause(exc: BaseException) -> BaseException:
    """What went wrong on the first rank that failed; torch.distributed.checkpoint wraps it in its own exception."""
    return next(iter(exc.failures.values()))[0] if isinstance(exc, CheckpointException) else exc


def _load(state: dict, path: pathlib.Path, world: World) -> None:
    try:
        dcp.load(state, checkpoint_id=path, process_group=world.host_group)
    except (Exception, CheckpointException) as exc:
        cause = first_cause(exc)
        reason = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
        raise UserError(
            f"{path}: does not fit this model, or is damaged ({reason}); check the model options, or use another one"
        ) from exc
