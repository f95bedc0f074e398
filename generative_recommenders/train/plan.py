"""Where each table goes: TorchRec's planner, told what a step looks up, exchanges, and needs beside the tables.

The planner weighs speed by the mean sample's look-ups and memory by those of the fullest batch to expect
(``workload.py``). What is no table is reserved in bytes: the step's peak by ``memory_model.py`` and the headroom.
Tables that the devices do not hold go to host memory where there is some, the least looked-up first, with a cache of
rows on the device.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardEstimator, Storage
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from generative_recommenders.train.config import HOST, ShardingConfig
from generative_recommenders.train.hardware import GIB, NETWORK, DeviceKind
from generative_recommenders.train.memory_model import EXCHANGE_COPIES, FP32, Moment, StepShape, peak
from generative_recommenders.train.workload import Workload

# What the planner chooses from. Column-wise shards split a row, and row-wise Adagrad then keeps a sum per piece.
UNASKED = ("row_wise", "table_wise")
WIRE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Share of a host table's rows that its cache on the device holds: what it begins with, and at most.
LEAST_CACHE, MOST_CACHE = 0.02, 0.2
#: Host memory that stays with the processes, the batches and the files' pages.
HOST_RESERVE = 32 * GIB


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices to plan for.

    Attributes:
        device: ``cuda`` or ``cpu``. ranks: one device each. ranks_per_host: of them on one host.
        device_memory: bytes of a device, ``None`` for the planner's own figure (CPUs).
        host_memory: bytes per host that tables may take; 0 for none.
        headroom: bytes of a device that no plan fills: what the allocator cannot use for being in pieces.
        kind: the accelerator, where it is known.
    """

    device: str
    ranks: int
    ranks_per_host: int
    device_memory: int | None
    host_memory: int = 0
    headroom: int = 0
    kind: DeviceKind | None = None

    @property
    def known_memory(self) -> int:
        """``device_memory`` of a device that it is known of, as of every GPU."""
        assert self.device_memory is not None
        return self.device_memory

    @property
    def host_memory_per_rank(self) -> int:
        """Bytes of host memory that a rank's tables may take."""
        return max(self.host_memory - HOST_RESERVE, 0) // min(self.ranks_per_host, self.ranks)

    def topology(self) -> Topology:
        """As TorchRec wants it; its rates are bytes per millisecond."""
        on_gpu = self.device == "cuda"
        rates = {}
        if self.kind is not None:
            rates = {"hbm_mem_bw": self.kind.bandwidth / 1e3, "intra_host_bw": self.kind.link / 1e3}
            rates["inter_host_bw"] = NETWORK / 1e3
        return Topology(
            world_size=self.ranks,
            compute_device=self.device,
            hbm_cap=self.device_memory if on_gpu else None,
            ddr_cap=self.host_memory_per_rank if on_gpu else self.device_memory,
            local_world_size=min(self.ranks_per_host, self.ranks),
            **rates,
        )


@dataclasses.dataclass(frozen=True)
class Load:
    """What a step asks of every rank.

    Attributes:
        workload: the data. shape: the step at ``workload.batch_rows``, for memory.
        limit_option: the data set's option that makes tables smaller, if it has one.
    """

    workload: Workload
    shape: StepShape
    limit_option: str | None = None

    @property
    def reserved(self) -> Moment:
        """The step's peak beside the tables."""
        return peak(self.shape)

    def lookups(self, table: EmbeddingConfig, rows: float) -> list[float]:
        """Look-ups per sample of ``rows`` rows, by feature of the table."""
        return self.workload.lookups(rows)[table.feature_names[0]]


class StepReservation(FixedPercentageStorageReservation):
    """So many bytes of every device are not for tables (the base class with 0 %: TorchRec's messages read that)."""

    def __init__(self, reserved: float) -> None:
        super().__init__(0.0)
        self.reserved = math.ceil(reserved)

    def reserve(self, topology, *args, **kwargs):
        """The topology with less memory on every device."""
        left = copy.deepcopy(super().reserve(topology, *args, **kwargs))
        for device in left.devices:
            device.storage.hbm = max(device.storage.hbm - self.reserved, 0)
        self._last_reserved_topology = left
        return left


class TableStorage(ShardEstimator):
    """Bytes of a shard: rows, row-wise Adagrad's sum per row, a host table's cache.

    A shard with every rank's look-ups of its table also counts what it holds of other ranks' rows while they travel;
    an even share of them is in the step's own figure.
    """

    def __init__(self, tables: Sequence[EmbeddingConfig], machine: Machine, load: Load | None) -> None:
        self.tables, self.machine, self.load = {table.name: table for table in tables}, machine, load

    def estimate(self, sharding_options, *args, **kwargs) -> None:
        """Write ``storage`` of every shard of every option."""
        for option in sharding_options:
            for shard in option.shards:
                rows, columns = shard.size
                weights = rows * (columns + 1) * FP32
                travelling = 0 if option.sharding_type == "row_wise" else self._travelling(option.name, columns)
                if self.machine.device != "cuda":
                    shard.storage = Storage(hbm=0, ddr=weights)
                elif option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
                    cache = cache_bytes(rows, columns, option.cache_params.load_factor)
                    shard.storage = Storage(hbm=math.ceil(cache + travelling), ddr=weights)
                else:
                    shard.storage = Storage(hbm=math.ceil(weights + travelling), ddr=0)

    def _travelling(self, name: str, columns: int) -> float:
        if self.load is None:
            return 0.0
        shape = self.load.shape
        rows = shape.samples * sum(self.load.lookups(self.tables[name], shape.rows))
        return (self.machine.ranks - 1) * EXCHANGE_COPIES * rows * columns * FP32


def cache_bytes(rows: int, columns: int, share: float) -> int:
    """Device memory of a host table's cache: rows, their numbers and times of use, and a map of all rows."""
    kept = math.ceil(rows * share)
    return kept * (columns * FP32 + 16) + rows * 4


@dataclasses.dataclass(frozen=True)
class Solution:
    """A plan, the tables in host memory and the share of their rows that is cached; or why there is none."""

    plan: ShardingPlan | None
    host: tuple[str, ...] = ()
    cache_share: float = 0.0
    problem: str = ""


class Planner:
    """Plans the tables of one model on one machine.

    Args:
        tables: of the model's embedding collection. config: overrides per table.
        load: what a step asks; ``None`` if nobody knows, and then nothing is reserved.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], config: ShardingConfig, machine: Machine, load: Load | None
    ) -> None:
        self.tables, self.config, self.machine, self.load = list(tables), config, machine, load

    def solve(self, module: nn.Module, sharders: list) -> Solution:
        """All tables on the devices, or else as few as possible in host memory, in the order of ``host_order``."""
        asked = [table.name for table in self.tables if self.config.tables.get(feature_of(table)) == HOST]
        further = [name for name in self.host_order() if name not in asked] if self.machine.host_memory else []
        problem = ""
        for count in range(len(further) + 1):
            host = (*asked, *further[:count])
            plan, said = self._try(module, sharders, host, LEAST_CACHE)
            problem = problem or said
            if plan is not None:
                return self._with_larger_cache(module, sharders, host, plan)
        return Solution(None, problem=problem)

    def host_order(self) -> list[str]:
        """Tables that may go to host memory, the least looked-up per row first: those with one look-up a sample."""
        if self.load is None:
            return []
        seldom = [table for table in self.tables if self.load.lookups(table, self.load.shape.rows) == [1.0]]
        seldom = [table for table in seldom if feature_of(table) not in self.config.tables]
        return [table.name for table in sorted(seldom, key=lambda table: -table.num_embeddings)]

    def _with_larger_cache(self, module, sharders, host: tuple[str, ...], plan: ShardingPlan) -> Solution:
        """The largest cache of 20, 10, 5 or 2 % that fits."""
        if not host:
            return Solution(plan)
        for share in (MOST_CACHE, 0.1, 0.05):
            larger, _ = self._try(module, sharders, host, share)
            if larger is not None:
                return Solution(larger, host, share)
        return Solution(plan, host, LEAST_CACHE)

    def _try(self, module, sharders, host: tuple[str, ...], share: float) -> tuple[ShardingPlan | None, str]:
        topology = self.machine.topology()
        mean = None if self.load is None else self.load.workload.mean_rows
        constraints = {table.name: self._constraint(table, mean, table.name in host, share) for table in self.tables}
        samples = None if self.load is None else self.load.shape.samples
        estimators = [
            EmbeddingPerfEstimator(topology=topology, constraints=constraints),
            TableStorage(self.tables, self.machine, self.load),
        ]
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=samples,
            constraints=constraints,
            enumerator=EmbeddingEnumerator(topology, samples or 1, constraints, estimators),
            # A grid of all proposals finds the same and takes seconds at many ranks.
            proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()],
            storage_reservation=StepReservation(self.reserved),
        )
        try:
            return planner.plan(module, sharders), ""
        except PlannerError as exc:
            return None, str(exc).strip().splitlines()[0].rstrip(" .")

    @property
    def reserved(self) -> float:
        """Bytes of every device that are not for tables; on a CPU nothing is."""
        if self.load is None or self.machine.device != "cuda":
            return 0.0
        return self.load.reserved.total + self.machine.headroom

    @property
    def _layouts(self) -> list[str]:
        """What the planner chooses from. On one GPU whole tables: TorchRec deals rows out by waiting for the device."""
        alone = self.machine.device == "cuda" and self.machine.ranks == 1
        return ["table_wise"] if alone else list(UNASKED)

    def _constraint(self, table: EmbeddingConfig, rows: float | None, host: bool, share: float) -> ParameterConstraints:
        asked = self.config.tables.get(feature_of(table))
        kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING if host else EmbeddingComputeKernel.FUSED
        lookups = [1.0] * len(table.feature_names)
        if rows is not None and self.load is not None:
            lookups = self.load.lookups(table, rows)
        return ParameterConstraints(
            sharding_types=self._layouts if asked in (None, HOST) else [asked],
            compute_kernels=[kernel.value],
            pooling_factors=lookups,
            cache_params=CacheParams(load_factor=share) if host else None,
        )


def feature_of(table: EmbeddingConfig) -> str:
    """The name that people know a table by: that of its first feature."""
    return table.feature_names[0]


def tables_of(module: nn.Module) -> list[EmbeddingConfig]:
    """Configurations of all embedding tables, in order."""
    collections = [part for part in module.modules() if isinstance(part, EmbeddingCollection)]
    return [table for collection in collections for table in collection.embedding_configs()]
