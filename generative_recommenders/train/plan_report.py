"""A plan in figures and words: per table its place, size, look-ups and traffic; per rank its memory and its links."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig

from generative_recommenders.data.crosses import is_cross
from generative_recommenders.train.config import HOST
from generative_recommenders.train.hardware import GIB, gib
from generative_recommenders.train.memory_model import FP32, INT64
from generative_recommenders.train.plan import Load, Machine, cache_bytes, feature_of

DEVICE = "device"


@dataclasses.dataclass(frozen=True)
class TablePlace:
    """One table of a plan; lists have an entry per rank of the run.

    Attributes:
        name, rows, columns: of the table. kind: item, user or cross.
        placement: ``device`` or ``host``. layout: row_wise, table_wise or column_wise.
        device_bytes, host_bytes: rows, optimizer's sums and caches.
        mean_lookups, most_lookups: of one rank's batch, in the mean and at most (0 if nobody knows).
        sent, received: bytes of embeddings that a rank sends and receives in the forward of the mean step; in the
            backward their gradients travel the other way.
        ids: bytes of ids that a rank sends.
    """

    name: str
    kind: str
    rows: int
    columns: int
    placement: str
    layout: str
    device_bytes: list[float]
    host_bytes: list[float]
    mean_lookups: float
    most_lookups: float
    sent: list[float]
    received: list[float]
    ids: list[float]

    @property
    def ranks(self) -> list[int]:
        """Ranks that hold rows of it."""
        both = zip(self.device_bytes, self.host_bytes, strict=True)
        return [rank for rank, (device, host) in enumerate(both) if device or host]

    @property
    def exchanged(self) -> float:
        """Bytes that all ranks together send for it in a step, forward and backward."""
        return 2 * sum(self.sent) + sum(self.ids)


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A whole plan on one machine; ``load`` is ``None`` where nobody knows what a step asks."""

    tables: list[TablePlace]
    machine: Machine
    load: Load | None
    cache_share: float = 0.0

    def table_bytes(self, placement: str = DEVICE) -> list[float]:
        """Bytes of all tables (and caches) in device or host memory, by rank."""
        columns = [table.device_bytes if placement == DEVICE else table.host_bytes for table in self.tables]
        return [sum(values) for values in zip(*columns, strict=True)]

    def memory(self) -> dict[str, float]:
        """Device memory of the fullest rank at the step's peak, by kind."""
        parts = {} if self.load is None else dict(self.load.reserved.parts)
        return {"tables and caches": max(self.table_bytes()), **parts}

    @property
    def free(self) -> float | None:
        """Bytes that the fullest rank has left at the step's peak, headroom included."""
        if self.machine.device_memory is None or self.load is None:
            return None
        return self.machine.device_memory - sum(self.memory().values())

    def link_bytes(self) -> float:
        """Bytes that the busiest rank sends (or receives, if that is more) in a step: embeddings, gradients, ids, and
        its part of the all-reduce of dense gradients."""
        ranks = self.machine.ranks
        if ranks == 1:
            return 0.0
        sent, received, ids = (
            [sum(values) for values in zip(*(getattr(table, name) for table in self.tables), strict=True)]
            for name in ("sent", "received", "ids")
        )
        dense = 0 if self.load is None else self.load.shape.dense_parameters * FP32
        # What a rank sends forward it receives backward.
        busiest = max(s + r for s, r in zip(sent, received, strict=True))
        return busiest + max(ids) + 2 * dense * (ranks - 1) / ranks


def report(
    plan: ShardingPlan, tables: Sequence[EmbeddingConfig], machine: Machine, load: Load | None, cache_share: float = 0.0
) -> PlanReport:
    """Read TorchRec's plan back into figures."""
    found = {name: parameter for module in plan.plan.values() for name, parameter in module.items()}
    return PlanReport([_place(table, found[table.name], machine, load) for table in tables], machine, load, cache_share)


def _place(table: EmbeddingConfig, parameter, machine: Machine, load: Load | None) -> TablePlace:
    """One table's figures, shard by shard."""
    ranks, in_host = machine.ranks, parameter.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    device, host, sent, received, ids = ([0.0] * ranks for _ in range(5))
    mean, most = _lookups(table, load)
    wire = FP32 if load is None else load.shape.wire_bytes
    for shard in parameter.sharding_spec.shards:
        owner, (rows, columns) = shard.placement.rank(), shard.shard_sizes
        weights = rows * (columns + 1) * FP32
        if in_host:
            host[owner] += weights
            device[owner] += cache_bytes(rows, columns, parameter.cache_params.load_factor)
        else:
            device[owner] += weights
        share = rows / table.num_embeddings  # of a rank's look-ups, ids being spread evenly
        for rank in range(ranks):
            if rank != owner:
                sent[owner] += mean * share * columns * wire
                received[rank] += mean * share * columns * wire
                ids[rank] += mean * share * INT64
    feature = feature_of(table)
    kind = "cross" if is_cross(feature) else "item" if len(table.feature_names) > 1 else "context"
    return TablePlace(
        feature, kind, table.num_embeddings, table.embedding_dim, HOST if in_host else DEVICE,
        parameter.sharding_type, device, host, mean, most, sent, received, ids,
    )  # fmt: skip


def _lookups(table: EmbeddingConfig, load: Load | None) -> tuple[float, float]:
    if load is None:
        return 0.0, 0.0
    samples = load.shape.samples
    mean, most = (samples * sum(load.lookups(table, rows)) for rows in (load.workload.mean_rows, load.shape.rows))
    return mean, most


HEADINGS = ("table", "kind", "rows", "place", "layout", "ranks", "GiB per rank", "look-ups", "at most", "MB exchanged")


def table_lines(plan: PlanReport) -> list[str]:
    """The plan as a text table, a line a table; look-ups are a rank's, bytes exchanged those of all ranks in a step."""
    cells = [HEADINGS]
    for table in plan.tables:
        size = max(table.host_bytes if table.placement == HOST else table.device_bytes) / GIB
        ranks = f"{len(table.ranks)}" if len(table.ranks) > 1 else f"rank {table.ranks[0]}"
        cells.append(
            (table.name, table.kind, f"{table.rows:,}", table.placement, table.layout, ranks, f"{size:,.2f}",
             f"{table.mean_lookups:,.0f}", f"{table.most_lookups:,.0f}", f"{table.exchanged / 1e6:,.1f}")
        )  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    words = (0, 1, 3, 4)
    return [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def compact_lines(plan: PlanReport) -> list[str]:
    """The plan in two or three lines, for the start of a run."""
    places: dict[tuple[str, str], list[str]] = {}
    for table in plan.tables:
        where = "" if len(table.ranks) > 1 or plan.machine.ranks == 1 else f" on rank {table.ranks[0]}"
        places.setdefault((table.placement, table.layout + where), []).append(table.name)
    listed = "; ".join(f"{place}, {layout}: {', '.join(names)}" for (place, layout), names in places.items())
    lines = [f"plan of {len(plan.tables)} tables, {gib(max(plan.table_bytes()))} per rank at most: {listed}"]
    if plan.load is not None:
        work = plan.load.workload
        exchanged = sum(table.exchanged for table in plan.tables) / 1e6
        lines.append(
            f"rows of a sample: {work.mean_rows:,.0f} in the mean, {plan.load.shape.rows:,.0f} in the fullest batch to "
            f"expect, {work.most_rows:,} at most; {exchanged:,.1f} MB exchanged per step"
        )
    if plan.free is not None and plan.load is not None and plan.machine.device == "cuda":
        peak = plan.load.reserved
        lines.append(
            f"memory of a GPU: {gib(plan.machine.known_memory)}, tables {gib(max(plan.table_bytes()))}, the step's "
            f"peak beside them {gib(peak.total)} ({peak.name}), {gib(plan.free)} free"
        )
    return lines
