"""From the resolved configuration to the things a run is made of: data set, model on all ranks, optimizers."""

from __future__ import annotations

import dataclasses
import functools

import torch

from generative_recommenders import disk
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig, TaskConfig
from generative_recommenders.modules.table_init import fill_table_rows_
from generative_recommenders.ops.dispatch import Preference
from generative_recommenders.train import agreement, randomness, sharding, workload
from generative_recommenders.train.config import TASK_BITS, VALUE_TASKS, ModelConfig
from generative_recommenders.train.datasets import FACTORIES
from generative_recommenders.train.distributed import World
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.memory_model import StepShape
from generative_recommenders.train.optimizers import Optimizers, fuse_sparse_optimizer
from generative_recommenders.train.plan import WIRE_BYTES, Load
from generative_recommenders.train.plan_report import PlanReport
from generative_recommenders.train.workload import Workload


def open_dataset(config: RunConfig, world: World) -> RankingDataset:
    """Open (and where needed prepare) the data set. Rank 0 goes first, so that it prepares and the others find it.

    Raises:
        UserError: on every rank, what the data set's factory said on any, or that the ranks found different data.
    """
    dataset: RankingDataset | None = None
    for turn in (True, False):
        problem = None
        if world.is_main == turn:
            dataset, problem = _open(config)
        problems = world.gather(problem)
        ranks = [rank for rank, found in enumerate(problems) if found is not None]
        if ranks:
            where = f"{agreement.ranks_in_words(ranks)}: " if world.size > 1 and not turn else ""
            raise UserError(where + problems[ranks[0]])
    assert dataset is not None  # one of the two turns was this rank's
    differs = agreement.difference(world.gather(agreement.data_statement(dataset)))
    if differs is not None:
        raise UserError(f"ranks found different data: {differs}; give every rank the same prepared data")
    if config.train.mode != "train" and dataset.holdout.num_samples == 0:
        raise UserError(f"data set {dataset.name}: the hold-out window is empty; check the split options")
    if config.train.mode != "eval" and sum(window.num_samples for window in dataset.windows) == 0:
        raise UserError(f"data set {dataset.name}: the training windows hold no sample; check the split options")
    return dataset


def _open(config: RunConfig) -> tuple[RankingDataset | None, str | None]:
    """The data set, or ``None`` and why not."""
    try:
        return FACTORIES[config.data.dataset](**config.dataset_options), None
    except UserError as exc:
        return None, str(exc)
    except OSError as exc:
        if disk.is_full(exc):
            reason = f"no space left on its disk ({exc}); free some and run again"
        elif exc.filename is None:
            raise
        else:
            reason = f"{exc.filename}: {exc.strerror}; check the path and permissions"
        return None, f"data set {config.data.dataset}: {reason}"


def model_config(config: ModelConfig, dataset: RankingDataset | Workload) -> DlrmHSTUConfig:
    """The ranker for this data set: its features and tables, the configuration's sizes."""
    schema = dataset.schema
    known = {field.name for field in dataclasses.fields(DlrmHSTUConfig)} - {"tasks"}
    options = {k: v for k, v in dataclasses.asdict(config).items() if k in known}
    needed = dataset.history_length + len(schema.contextual_features) + 1
    if config.max_seq_len is None:
        options["max_seq_len"] = needed
    elif config.max_seq_len < needed:
        raise UserError(
            f"model.max_seq_len = {config.max_seq_len}: a sample can have {needed} rows ({dataset.history_length} of "
            f"history, {len(schema.contextual_features)} of context, the candidate); raise it, or shorten the history"
        )
    try:
        return DlrmHSTUConfig(
            table_rows=dict(schema.table_rows),
            item_feature_names=schema.item_features,
            contextual_feature_names=schema.contextual_features,
            tasks=tuple(_task(name, dataset) for name in config.tasks),
            **options,
        )
    except ValueError as exc:
        raise UserError(_of_model(exc)) from None


def _of_model(exc: ValueError) -> str:
    """What the ranker says of one of its sizes, under the option's name."""
    option = str(exc).split("=")[0]
    is_option = option in {field.name for field in dataclasses.fields(ModelConfig)}
    return f"model.{exc}" if is_option else f"model: {exc}"


def _task(name: str, dataset: RankingDataset | Workload) -> TaskConfig:
    if name in TASK_BITS:
        return TaskConfig(name, label_bit=TASK_BITS[name])
    label, scale, center = VALUE_TASKS[name]
    if label not in dataset.schema.label_features:
        raise UserError(f"model.tasks names {name!r}: data set {dataset.name} has no label {label}; MovieLens has")
    return TaskConfig(name, "regression", label, label_scale=scale, label_center=center)


def build_model(
    config: RunConfig, dataset: RankingDataset, world: World
) -> tuple[torch.nn.Module, Optimizers, PlanReport]:
    """The sharded model, its optimizers and the plan of its tables; weights depend on ``train.seed`` alone.

    A collective call.
    """
    sizes = run_sizes(config, dataset)
    seed = randomness.stream_seed(config.train.seed, "weights")
    try:
        model = DlrmHSTU(sizes, device=world.device, embedding_device="meta", seed=seed)
    except ValueError as exc:
        raise UserError(_of_model(exc)) from None
    fuse_sparse_optimizer(sharding.table_parameters(model), config.optimizer)
    init = functools.partial(_init_shard, sizes=sizes, seed=seed)
    work, dense = workload.of_dataset(dataset), dense_parameters(model)
    load = step_load(config, sizes, work, dense, world.size, world.device.type)
    planned = sharding.plan_tables(model, config.sharding, world, load)
    sharded = sharding.shard(model, config.sharding, world, init, planned)
    return sharded, Optimizers(sharded, config.optimizer), planned.report


def run_sizes(config: RunConfig, dataset: RankingDataset | Workload) -> DlrmHSTUConfig:
    """``model_config`` of a run: ``model.backend`` beats every variable where ``--bind`` says it, else none."""
    sizes = model_config(config.model, dataset)
    if sizes.backend is None or config.sources.get("model.backend") == "--bind":
        return sizes
    return dataclasses.replace(sizes, backend=Preference(sizes.backend, "option model.backend"))


def dense_parameters(model: DlrmHSTU) -> int:
    """Elements of all parameters but the tables."""
    tables = {id(parameter) for parameter in model.embedding_collection.parameters()}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)


def step_load(config: RunConfig, sizes: DlrmHSTUConfig, work: Workload, dense: int, ranks: int, device: str) -> Load:
    """What a training step of this run asks of a rank; ``dense``: elements of everything but the tables."""
    samples = config.train.batch_size
    shape = StepShape(
        model=sizes,
        samples=samples,
        rows=work.batch_rows(samples),
        dense_parameters=dense,
        ranks=ranks,
        wire_bytes=WIRE_BYTES[config.sharding.wire_precision],
        half=sizes.autocast == "bfloat16" or (sizes.autocast == "auto" and device == "cuda"),
    )
    limit = "table_rows_limit" in config.dataset_options
    return Load(work, shape, f"{config.data.dataset}.table_rows_limit" if limit else None)


def _init_shard(table: str, shard: torch.Tensor, row: int, column: int, *, sizes: DlrmHSTUConfig, seed: int) -> None:
    fill_table_rows_(shard, seed, table, sizes.table_rows[table], sizes.table_dim, row, column)
