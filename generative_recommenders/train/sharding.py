"""Laying the model out over the ranks with TorchRec: planned, sharded tables; data-parallel dense parameters.

Tables arrive on the meta device. Each rank allocates its own shards only and fills them with the table's initial
values at the shard's place, so that every plan and every number of ranks starts from the same numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed import DistributedModelParallel, dist_data
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.modules.table_names import feature_of_table
from generative_recommenders.train.config import HOST, ShardingConfig
from generative_recommenders.train.distributed import World
from generative_recommenders.train.hardware import DEVICE_KINDS, GIB
from generative_recommenders.train.plan import Load, Machine, Planner, Solution, tables_of
from generative_recommenders.train.plan_report import PlanReport, report
from generative_recommenders.train.spelling import nearest

# Writes the initial values of one shard: (table name, shard [rows, columns], first row, first column).
ShardInit = Callable[[str, torch.Tensor, int, int], None]

_WIRE = {"float16": CommType.FP16, "bfloat16": CommType.BF16}


def table_names(model: nn.Module) -> list[str]:
    """Names of all embedding tables, in order: those of their features, as people write them."""
    return [feature_of_table(config.name) for ec in _collections(model) for config in ec.embedding_configs()]


def table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights of all embedding tables (on the meta device before sharding)."""
    return [parameter for ec in _collections(model) for parameter in ec.parameters()]


def _collections(model: nn.Module) -> list[EmbeddingCollection]:
    return [module for module in model.modules() if isinstance(module, EmbeddingCollection)]


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """TorchRec's plan of all tables, and the same in figures."""

    plan: ShardingPlan
    report: PlanReport


def shard(
    model: nn.Module, config: ShardingConfig, world: World, init: ShardInit, planned: TablePlan | None = None
) -> DistributedModelParallel:
    """Shard and initialise; a collective call.

    Args:
        model: tables on the meta device, everything else with its initial values.
        init: fills one shard of one table in place.
        planned: what ``plan_tables`` made of it; ``None`` plans here, by the tables' sizes alone.

    Raises:
        UserError: an override names an unknown table, or the tables do not fit.
    """
    if config.dedup_indices and world.device.type == "cpu":
        raise UserError("sharding.dedup_indices = True: FBGEMM has no CPU kernel for it; use a GPU, or set it to False")
    for collection in _collections(model):
        for table in collection.embedding_configs():
            table.init_fn = _leave_as_is  # TorchRec would call it on a shard without saying which
    _keep_permutations()
    planned = planned or plan_tables(model, config, world)
    in_host = any(table.placement == HOST for table in planned.report.tables)
    sharded = DistributedModelParallel(
        module=model,
        device=world.device,
        plan=planned.plan,
        sharders=[make_sharder(config, world.size, in_host)],
        # A batch may take another path through the last layer than the one before it: no static graph.
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    _initialise_tables(sharded, init)
    return sharded


def _keep_permutations() -> None:
    """Let TorchRec make the order of features after an exchange once, not every step.

    It copies these few numbers from pageable host memory, for which the host waits until the device has done all that
    was queued. They follow from the layout and the ranks' batch sizes alone.
    """
    make = dist_data._get_recat
    if hasattr(make, "__wrapped__"):
        return

    @functools.lru_cache(maxsize=256)
    def kept(features: int, ranks: int, stagger: int, device: torch.device | None, sizes: tuple[int, ...] | None):
        return make(features, ranks, stagger, device, None if sizes is None else list(sizes))

    @functools.wraps(make)
    def remembered(local_split, num_splits, stagger=1, device=None, batch_size_per_rank=None):
        sizes = None if batch_size_per_rank is None else tuple(batch_size_per_rank)
        return kept(local_split, num_splits, stagger, device, sizes)

    dist_data._get_recat = remembered


def _leave_as_is(_weight: torch.Tensor) -> None:
    pass


def make_sharder(config: ShardingConfig, ranks: int, host_tables: bool = False) -> EmbeddingCollectionSharder:
    """How TorchRec shards the collection; ``host_tables``: whether any of its tables is in host memory."""
    codecs = None
    if config.wire_precision != "float32" and ranks > 1:
        wire = _WIRE[config.wire_precision]
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))
    fused: dict[str, object] = {"bounds_check_mode": BoundsCheckMode.FATAL}  # a wrong id is an error, not row 0
    if host_tables:  # page-locked memory: what the driver moves by itself can hang a shared card
        fused["uvm_host_mapped"] = True
    return EmbeddingCollectionSharder(
        fused_params=fused,
        qcomm_codecs_registry=codecs,
        use_index_dedup=config.dedup_indices,
    )


def plan_tables(model: nn.Module, config: ShardingConfig, world: World, load: Load | None = None) -> TablePlan:
    """The planner's choice under the overrides of ``config.tables``, the same on every rank; a collective call.

    Args:
        load: what a step asks of a rank; ``None`` plans by the tables' sizes alone and reserves nothing beside them.
    """
    check_names(config, model)
    tables, machine = tables_of(model), machine_of(config, world)
    # Rank 0 alone plans. What it cannot do it tells the others, who would wait for a plan.
    planner = Planner(tables, config, machine, load)
    mine = planner.solve(model, [make_sharder(config, world.size)]) if world.is_main else Solution(None)
    solution = world.gather(mine)[0]
    if solution.plan is None:
        smaller = "" if load is None or load.limit_option is None else f", hash crosses down with {load.limit_option}"
        raise UserError(
            f"the tables do not fit {world.size} x {world.device.type}: {solution.problem}; add devices, raise "
            f"sharding.hbm_cap_gb{smaller}, or see what would fit with --dry-run"
        )
    return TablePlan(solution.plan, report(solution.plan, tables, machine, load, solution.cache_share))


def check_names(config: ShardingConfig, model: nn.Module) -> None:
    """Raise ``UserError`` if ``config.tables`` names a table that the model does not have."""
    names = table_names(model)
    for name in config.tables:
        if name not in names:
            raise UserError(f"sharding.tables names {name!r}: no such table{nearest(name, names)}")


def check_host_memory(config: ShardingConfig, host_memory: int) -> None:
    """Raise ``UserError`` if a table is sent to host memory of which there is none."""
    sent = [name for name, where in config.tables.items() if where == HOST]
    if sent and not host_memory:
        raise UserError(
            f"sharding.tables sends {sent[0]!r} to host memory: say how much tables may take of it with "
            "sharding.host_memory_gb"
        )


def machine_of(config: ShardingConfig, world: World) -> Machine:
    """This run's devices as the planner sees them.

    Raises:
        UserError: host memory is asked for where tables are in host memory anyhow.
    """
    on_gpu = world.device.type == "cuda"
    for option, asked in (
        ("host_memory_gb", config.host_memory_gb > 0),
        ("tables", HOST in config.tables.values()),
    ):
        if asked and not on_gpu:
            raise UserError(f"sharding.{option} asks for tables in host memory, where a CPU's are; leave it out")
    cap = int(config.hbm_cap_gb * GIB) or _device_memory(world.device)
    headroom = min(int(config.headroom_gb * GIB), cap // 8) if on_gpu and cap is not None else 0
    local = settings.get("LOCAL_WORLD_SIZE") or world.size
    host = int(config.host_memory_gb * GIB)
    check_host_memory(config, host)
    kind = None
    if on_gpu:
        found = torch.cuda.get_device_name(world.device)
        kind = next((kind for kind in DEVICE_KINDS.values() if kind.name == found), None)
    return Machine(world.device.type, world.size, local, cap, host, headroom, kind)


def _device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory: the planner's own figure is a small constant. ``None`` leaves a CPU to the planner."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


@torch.no_grad()
def _initialise_tables(model: DistributedModelParallel, init: ShardInit) -> None:
    for key, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            continue
        table = feature_of_table(key.split(".embeddings.")[-1].removesuffix(".weight"))
        for local in value.local_shards():
            row, column = local.metadata.shard_offsets
            init(table, local.tensor, row, column)
