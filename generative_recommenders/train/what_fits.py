"""Whether a run fits a machine, and the smallest changes with which it would: plans on meta tensors, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig

from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig
from generative_recommenders.modules.stu import STULayerConfig
from generative_recommenders.train import build, sharding
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.hardware import GIB, DeviceKind, gib
from generative_recommenders.train.optimizers import fuse_sparse_optimizer
from generative_recommenders.train.plan import Load, Machine, Planner, tables_of
from generative_recommenders.train.plan_report import PlanReport, report
from generative_recommenders.train.workload import Workload

#: In the order of what they cost in time.
RECOMPUTE = ("recompute_normed_x", "recompute_y", "recompute_uvqk", "recompute_preprocessor")
#: More than these take the planner minutes.
MOST_RANKS = 512
HOST_SIZES = (256, 512, 1024, 2048)
#: Head widths of those attention kernels (``ops/attention/hopper_launch.py``, which needs Triton to be imported).
WARP_SPECIALISED_WIDTHS = (64, 128)
TABLE_LIMITS = (10_000_000, 5_000_000, 2_000_000, 1_000_000, 500_000, 100_000)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything a plan is made of; the ``with_…`` functions vary it to find a change that would fit."""

    config: RunConfig
    work: Workload
    machine: Machine
    kind: DeviceKind


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A planned setting: ``plan`` is ``None`` where nothing fits, ``problem`` then says why."""

    setting: Setting
    sizes: DlrmHSTUConfig
    load: Load
    plan: PlanReport | None
    problem: str


def plan(setting: Setting) -> Outcome:
    """Plan one setting, on meta tensors."""
    config, work, machine = setting.config, setting.work, setting.machine
    sizes = build.run_sizes(config, work)
    with torch.device("meta"):
        model = DlrmHSTU(sizes, device="meta", embedding_device="meta")
    fuse_sparse_optimizer(sharding.table_parameters(model), config.optimizer)
    dense = build.dense_parameters(model)
    load = build.step_load(config, sizes, work, dense, machine.ranks, "cuda")
    special = why_not_warp_specialised(setting.kind, sizes.layer_config(), load.shape.half) is None
    load = dataclasses.replace(load, shape=dataclasses.replace(load.shape, slope_buffer=special))
    sharding.check_names(config.sharding, model)
    tables = tables_of(model)
    planner = Planner(tables, config.sharding, machine, load)
    if planner.reserved >= machine.known_memory:
        return Outcome(setting, sizes, load, None, _step_alone(load, machine))
    solution = planner.solve(model.embedding_collection, [sharding.make_sharder(config.sharding, machine.ranks)])
    if solution.plan is None:
        return Outcome(setting, sizes, load, None, _tables_too(tables, load, machine))
    return Outcome(setting, sizes, load, report(solution.plan, tables, machine, load, solution.cache_share), "")


def why_not_warp_specialised(kind: DeviceKind, layer: STULayerConfig, half: bool) -> str | None:
    """Why attention would not run on the kernels written for one generation of GPUs, or ``None``."""
    if not kind.warp_specialised:
        return f"none are written for {kind.name}"
    if not half:
        return "they take bfloat16 or float16"
    if layer.attention_dim != layer.hidden_dim or layer.attention_dim not in WARP_SPECIALISED_WIDTHS:
        return f"d_qk={layer.attention_dim}, d_v={layer.hidden_dim}: must be equal and one of {WARP_SPECIALISED_WIDTHS}"
    if not layer.causal or layer.max_attn_len > 0 or layer.contextual_seq_len > 0:
        return "the mask is not causal"
    return None


def _step_alone(load: Load, machine: Machine) -> str:
    return (
        f"a step of {load.shape.samples:,} samples takes {gib(load.reserved.total)} beside the tables "
        f"({load.reserved.name}) and {gib(machine.headroom)} stay free: no room for tables on a device of "
        f"{gib(machine.known_memory)}"
    )


def _tables_too(tables: Sequence[EmbeddingConfig], load: Load, machine: Machine) -> str:
    needed = sum(table.num_embeddings * (table.embedding_dim + 1) * 4 for table in tables)
    room = machine.known_memory - load.reserved.total - machine.headroom
    host = (
        ", no host memory"
        if not machine.host_memory
        else (f" and {gib(machine.host_memory_per_rank * machine.ranks)} of host memory")
    )
    return (
        f"tables and their optimizer take {gib(needed)}; {machine.ranks} x {gib(room)} of device memory are left "
        f"beside the step's peak of {gib(load.reserved.total)} and {gib(machine.headroom)} of headroom{host}"
    )


@dataclasses.dataclass(frozen=True)
class Change:
    """Another setting, and the words on the command line that reach it."""

    words: str
    setting: Setting


def fitting_changes(setting: Setting) -> list[str]:
    """The smallest change of each kind that would fit, in words; recomputation alone where that is enough.

    Recomputation costs time only; host memory, devices, samples per step and tables' rows are tried with all of it.
    """
    if found := _first_that_fits(recompute_changes(setting)):
        return [found]
    larger = [_first_that_fits(changes) for changes in larger_changes(setting)]
    return [words for words in larger if words]


def _first_that_fits(changes: Sequence[Change]) -> str:
    return next((change.words for change in changes if plan(change.setting).plan is not None), "")


def recompute_changes(setting: Setting) -> list[Change]:
    """More and more of the recompute options switched on that are off."""
    off = [name for name in RECOMPUTE if not getattr(setting.config.model, name)]
    steps = [off[: count + 1] for count in range(len(off))]
    return [
        Change(
            " ".join(f"--bind model.{name}=True" for name in names),
            with_section(setting, "model", **dict.fromkeys(names, True)),
        )
        for names in steps
    ]


def larger_changes(setting: Setting) -> Iterator[list[Change]]:
    """Kinds of changes, each from the smallest on: host memory, ranks, batch, batch and host memory, tables' rows."""
    least = (recompute_changes(setting) or [Change("", setting)])[-1]

    def also(words: str, changed: Setting) -> Change:
        return Change(f"{words} {least.words}".rstrip(), changed)

    sizes = [size for size in HOST_SIZES if size * GIB > setting.machine.host_memory]
    hosts = [also(f"--host-memory {size}GiB", with_machine(least.setting, host_memory=size * GIB)) for size in sizes]
    yield hosts
    more = [setting.machine.ranks << power for power in range(1, 9)]
    more = [ranks for ranks in more if ranks <= MOST_RANKS]
    yield [also(f"--ranks {ranks}", with_machine(least.setting, ranks=ranks)) for ranks in more]
    halves = [setting.config.train.batch_size >> power for power in range(1, 11)]
    halves = [samples for samples in halves if samples]
    batches = [(f"--bind train.batch_size={samples}", samples) for samples in halves]
    yield [also(words, with_section(least.setting, "train", batch_size=samples)) for words, samples in batches]
    if hosts:
        most = with_machine(least.setting, host_memory=sizes[-1] * GIB)
        host = f"--host-memory {sizes[-1]}GiB"
        yield [also(f"{host} {words}", with_section(most, "train", batch_size=n)) for words, n in batches]
    if setting.work.has_limit:
        name = f"--bind {setting.config.data.dataset}.table_rows_limit"
        yield [also(f"{name}={rows}", with_limit(least.setting, rows)) for rows in TABLE_LIMITS]


def with_section(setting: Setting, section: str, **options: object) -> Setting:
    """The setting with other options of a section of its configuration."""
    changed = dataclasses.replace(getattr(setting.config, section), **options)
    return dataclasses.replace(setting, config=dataclasses.replace(setting.config, **{section: changed}))


def with_machine(setting: Setting, **changed: Any) -> Setting:
    """The setting on another machine."""
    return dataclasses.replace(setting, machine=dataclasses.replace(setting.machine, **changed))


def with_limit(setting: Setting, rows: int) -> Setting:
    """The setting with crosses hashed down to so many rows."""
    return dataclasses.replace(setting, work=setting.work.limited(rows))
