"""Laying the model out over the ranks with TorchRec: planned, sharded tables; data-parallel dense parameters.

Tables arrive on the meta device. Each rank allocates its own shards only and fills them with the table's initial
values at the shard's place, so that every plan and every number of ranks starts from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.modules.table_names import feature_of_table, table_name
from generative_recommenders.train.config import ShardingConfig
from generative_recommenders.train.distributed import World
from generative_recommenders.train.gin_files import nearest

# Writes the initial values of one shard: (table name, shard [rows, columns], first row, first column).
ShardInit = Callable[[str, torch.Tensor, int, int], None]

# What the planner chooses from. Column-wise shards split a row, and row-wise Adagrad then keeps a sum per piece.
UNASKED = ("row_wise", "table_wise")

_WIRE = {"float16": CommType.FP16, "bfloat16": CommType.BF16}


def table_names(model: nn.Module) -> list[str]:
    """Names of all embedding tables, in order: those of their features, as people write them."""
    return [feature_of_table(config.name) for ec in _collections(model) for config in ec.embedding_configs()]


def table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights of all embedding tables (on the meta device before sharding)."""
    return [parameter for ec in _collections(model) for parameter in ec.parameters()]


def _collections(model: nn.Module) -> list[EmbeddingCollection]:
    return [module for module in model.modules() if isinstance(module, EmbeddingCollection)]


def shard(model: nn.Module, config: ShardingConfig, world: World, init: ShardInit) -> DistributedModelParallel:
    """Plan, shard and initialise; a collective call.

    Args:
        model: tables on the meta device, everything else with its initial values.
        init: fills one shard of one table in place.

    Raises:
        UserError: an override names an unknown table, or the tables do not fit.
    """
    if config.dedup_indices and world.device.type == "cpu":
        raise UserError("sharding.dedup_indices = True: FBGEMM has no CPU kernel for it; use a GPU, or set it to False")
    for collection in _collections(model):
        for table in collection.embedding_configs():
            table.init_fn = _leave_as_is  # TorchRec would call it on a shard without saying which
    sharders = [_sharder(config, world)]
    plan = make_plan(model, config, world, sharders)
    sharded = DistributedModelParallel(
        module=model,
        device=world.device,
        plan=plan,
        sharders=sharders,
        # A batch may take another path through the last layer than the one before it: no static graph.
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    _initialise_tables(sharded, init)
    return sharded


def _leave_as_is(_weight: torch.Tensor) -> None:
    pass


def _sharder(config: ShardingConfig, world: World) -> EmbeddingCollectionSharder:
    codecs = None
    if config.wire_precision != "float32" and world.size > 1:
        wire = _WIRE[config.wire_precision]
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))
    return EmbeddingCollectionSharder(
        fused_params={"bounds_check_mode": BoundsCheckMode.FATAL},  # an id outside its table is an error, not row 0
        qcomm_codecs_registry=codecs,
        use_index_dedup=config.dedup_indices,
    )


def make_plan(model: nn.Module, config: ShardingConfig, world: World, sharders: list) -> ShardingPlan:
    """The planner's choice under the overrides of ``config.tables``, the same on every rank."""
    tables = table_names(model)
    for name in config.tables:
        if name not in tables:
            raise UserError(f"sharding.tables names {name!r}: no such table{nearest(name, tables)}")
    constraints = {
        table_name(name): ParameterConstraints(
            sharding_types=[config.tables[name]] if name in config.tables else list(UNASKED),
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        )
        for name in tables
    }
    cap = int(config.hbm_cap_gb * 2**30) or _device_memory(world.device)
    on_gpu = world.device.type == "cuda"
    topology = Topology(
        world_size=world.size,
        compute_device=world.device.type,
        hbm_cap=cap if on_gpu else None,
        ddr_cap=None if on_gpu else cap,
        local_world_size=settings.get("LOCAL_WORLD_SIZE") or world.size,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, storage_reservation=FixedPercentageStorageReservation(0.15)
    )
    try:
        return planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
    except PlannerError as exc:
        reason = str(exc).strip().splitlines()[0]
        raise UserError(
            f"the tables do not fit {world.size} x {world.device.type}: {reason}; add devices, raise "
            "sharding.hbm_cap_gb, or hash large tables down with model.table_rows_limit"
        ) from None


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
