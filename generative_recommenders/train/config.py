"""The typed configuration of a run: one frozen dataclass per section, each field with default, range and one line.

Sections are what gin files and ``--bind`` name (``train.batch_size = 64``). A section checks its own values when it is
built, so a value out of range stops the run before any work. ``gin_files.py`` reads files into these classes.
"""

from __future__ import annotations

import dataclasses
import typing

from generative_recommenders.errors import UserError
from generative_recommenders.options import OnResume, Option, convert, declared, option, options_of, with_default
from generative_recommenders.shared_options import HBM_CAP_GB, MOST_TABLE_WIDTH, TABLE_WIDTH_MULTIPLE, RankerOptions

FREE, ASKS = OnResume.FREE, OnResume.ASKS

MODES = ("train", "eval", "train-eval", "streaming-train-eval")
# Binary tasks by name, and the bit of the candidate's action that is their label.
TASK_BITS = {"listen_plus": 1, "like": 2, "skip": 4}
# Regression tasks by name: the candidate's label, the unit it stands there in, and where predictions begin.
VALUE_TASKS = {"rating": ("item_rating", 0.01, 3.5)}
TASKS = (*TASK_BITS, *VALUE_TASKS)
# The LMSD op takes eight columns at a time.
LMSD_WIDTH_MULTIPLE = 8
# Layouts of a table over the devices; HOST leaves the layout to the planner and its rows in host memory.
HOST = "host"
SHARDINGS = ("row_wise", "table_wise", "column_wise", HOST)


@dataclasses.dataclass(frozen=True)
class Section:
    """Base of the sections: checks types, ranges and choices of its fields on construction."""

    NAME: typing.ClassVar[str]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = convert(f"{self.NAME}.{field.name}", getattr(self, field.name), hints[field.name], declared(field))
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Conditions between fields; sections override it."""


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """What the run does, for how long, and what it must reach."""

    NAME: typing.ClassVar[str] = "train"

    mode: str = option("train-eval", "what the run does", choices=MODES, on_resume=ASKS)
    seed: int = option(1, "weights, and with the rank dropout and shuffling", low=0, high=2**31 - 1)
    batch_size: int = option(64, "samples per rank and step", low=1, high=2**20)
    eval_batch_size: int = option(0, "samples per rank in evaluation; 0: batch_size", low=0, high=2**20, on_resume=FREE)
    epochs: int = option(1, "passes over the training windows", low=1, high=100_000, on_resume=ASKS)
    max_steps: int = option(0, "stop after so many steps; 0: no limit", low=0, on_resume=ASKS)
    shuffle: bool = option(True, "shuffle the training samples inside each window, seeded")
    eval_every_samples: int = option(0, "evaluate each time so many samples were trained; 0: off", low=0)
    eval_every_epochs: int = option(1, "evaluate after every n-th pass; 0: only at the end", low=0)
    eval_every_windows: int = option(0, "streaming: evaluate after every n-th window; 0: only at the end", low=0)
    log_every: int = option(20, "steps between two lines of metrics", low=1, on_resume=FREE)
    target_auc: float = option(
        0.0, "fail unless the hold-out AUC reaches it; 0: no target", low=0.0, high=1.0, on_resume=ASKS
    )
    stop_at_target: bool = option(False, "stop training as soon as target_auc is reached", on_resume=ASKS)
    beat_baseline: bool = option(False, "fail unless the hold-out AUC beats the data set's baseline", on_resume=ASKS)
    max_gap_to_best: float = option(
        0.0,
        "fail unless the AUC comes so near to the best reachable one; 0: no check",
        low=0.0,
        high=1.0,
        on_resume=ASKS,
    )

    def check(self) -> None:
        if self.stop_at_target and not self.target_auc:
            raise UserError("train.stop_at_target = True: needs train.target_auc above 0")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section):
    """Adam for the dense parameters, fused row-wise Adagrad for the embedding tables."""

    NAME: typing.ClassVar[str] = "optimizer"

    dense_lr: float = option(1e-3, "base learning rate of Adam", low=0.0, high=10.0)
    sparse_lr: float = option(0.02, "base learning rate of row-wise Adagrad", low=0.0, high=10.0)
    beta1: float = option(0.95, "Adam's first beta", low=0.0, high=0.999999)
    beta2: float = option(0.999, "Adam's second beta", low=0.0, high=0.99999999)
    eps: float = option(1e-8, "of both optimizers (at 0 a gradient of 0 would make 0 / 0)", low=1e-15, high=1.0)
    clip_norm: float = option(1.0, "largest norm of the dense gradient; 0: no clipping", low=0.0)
    weight_decay: float = option(0.0, "decoupled decay of the dense weights (AdamW) where above 0", low=0.0, high=1.0)
    warmup_steps: int = option(0, "steps of linear warm-up, of both optimizers", low=0)
    warmup_start: float = option(0.0, "share of the base learning rate at step 0 of the warm-up", low=0.0, high=1.0)
    decay_until_step: int = option(0, "step at which a linear decay after the warm-up ends; 0: no decay", low=0)
    decay_end: float = option(0.0, "share of the base learning rate at the end of the decay", low=0.0, high=1.0)

    def check(self) -> None:
        if self.decay_until_step and self.decay_until_step <= self.warmup_steps:
            raise UserError(
                f"optimizer.decay_until_step = {self.decay_until_step}: must lie after optimizer.warmup_steps = "
                f"{self.warmup_steps}, or be 0"
            )


@dataclasses.dataclass(frozen=True)
class ShardingConfig(Section):
    """How TorchRec lays out the tables over the ranks."""

    NAME: typing.ClassVar[str] = "sharding"

    tables: dict = option(
        {}, "table → row_wise, table_wise, column_wise or host; tables not named: the planner's choice", on_resume=FREE
    )
    wire_precision: str = option("float32", "of the embedding all-to-all", choices=("float32", "float16", "bfloat16"))
    dedup_indices: bool = option(False, "look up each id of a batch once per rank")
    hbm_cap_gb: float = HBM_CAP_GB
    headroom_gb: float = option(
        8.0,
        "of a GPU, left free for what the allocator cannot use; an eighth of a GPU at most",
        low=0.0,
        on_resume=FREE,
    )
    host_memory_gb: float = option(
        0.0,
        "host memory, per host, for tables that the GPUs do not hold; 0: none goes there by itself",
        low=0.0,
        on_resume=FREE,
    )

    def check(self) -> None:
        for table, sharding in self.tables.items():
            if not isinstance(table, str):
                raise UserError(f"sharding.tables names {table!r}: expected the name of a table in quotes")
            if sharding not in SHARDINGS:
                raise UserError(f"sharding.tables[{table!r}] = {sharding!r}: expected one of {', '.join(SHARDINGS)}")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
    """When checkpoints are written and how many stay."""

    NAME: typing.ClassVar[str] = "checkpoint"

    every_steps: int = option(0, "write each n steps; 0: off", low=0, on_resume=FREE)
    every_windows: int = option(0, "streaming: write after every n-th window; 0: off", low=0, on_resume=FREE)
    every_seconds: float = option(
        0.0, "write when so long has passed since the last one; 0: off", low=0.0, on_resume=FREE
    )
    at_end: bool = option(False, "write one when training ends", on_resume=FREE)
    keep: int = option(2, "newest checkpoints that stay", low=1, on_resume=FREE)
    load: str = option("", "folder of a checkpoint (or of a run) whose weights the run starts from", on_resume=ASKS)
    match_ids: bool = option(
        False, "on loading, carry the tables' rows over by raw id: for data with other ids", on_resume=FREE
    )
    load_optimizer: bool = option(
        False, "load Adam's moments and row-wise Adagrad's sums too: training goes on", on_resume=FREE
    )
    partial: bool = option(
        False, "load what both have; tensors that only one side has are passed over, and said", on_resume=FREE
    )

    def check(self) -> None:
        for name in ("match_ids", "load_optimizer", "partial"):
            if getattr(self, name) and not self.load:
                raise UserError(f"checkpoint.{name} = True: needs checkpoint.load, the checkpoint to start from")

    @property
    def enabled(self) -> bool:
        """Whether the run writes any checkpoint."""
        return bool(self.every_steps or self.every_windows or self.every_seconds or self.at_end)


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """Which data set is read; its own options are bound under its name (``movielens_small.path = "..."``)."""

    NAME: typing.ClassVar[str] = "data"

    dataset: str = option("synthetic_yambda", "name of the data set")


@dataclasses.dataclass(frozen=True)
class _Tasks(Section):
    """What stands before the ranker's own options."""

    tasks: tuple = option(
        ("listen_plus",), "what to predict, first the one that counts: listen_plus, like, skip; rating"
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig(RankerOptions, _Tasks):
    """Sizes and switches of the DLRMv4 HSTU ranker; features and tables come from the data set.

    The options are ``RankerOptions``; those below begin with values that suit a small machine.
    """

    NAME: typing.ClassVar[str] = "model"

    hstu_embedding_dim: int = with_default(RankerOptions, "hstu_embedding_dim", 64)
    hstu_num_layers: int = with_default(RankerOptions, "hstu_num_layers", 2)
    hstu_num_heads: int = with_default(RankerOptions, "hstu_num_heads", 2)
    hstu_attn_qk_dim: int = with_default(RankerOptions, "hstu_attn_qk_dim", 32)
    hstu_attn_linear_dim: int = with_default(RankerOptions, "hstu_attn_linear_dim", 32)

    def check(self) -> None:
        if not self.tasks:
            raise UserError(f"model.tasks = (): expected one or more of {', '.join(TASKS)}")
        for task in self.tasks:
            if task not in TASKS:  # a tuple compares, a dictionary would hash: the value may be a list
                raise UserError(f"model.tasks names {task!r}: expected one or more of {', '.join(TASKS)}")
        if self.tasks[0] in VALUE_TASKS:
            raise UserError(
                f"model.tasks begins with {self.tasks[0]!r}: the first task's AUC is what counts, so begin with one of "
                f"{', '.join(TASK_BITS)}"
            )
        self._check_widths()

    def _check_widths(self) -> None:
        if self.use_group_norm and self.hstu_num_heads == 1:
            raise UserError(
                "model.use_group_norm = True: needs model.hstu_num_heads of 2 or more (the statistics of one head are "
                "the layer's own)"
            )
        if self.embedding_dim is None and self.hstu_embedding_dim % TABLE_WIDTH_MULTIPLE:
            above = -(-self.hstu_embedding_dim // TABLE_WIDTH_MULTIPLE) * TABLE_WIDTH_MULTIPLE
            raise UserError(
                f"model.hstu_embedding_dim = {self.hstu_embedding_dim}: is the width of the tables too, which must be "
                f"a multiple of {TABLE_WIDTH_MULTIPLE}; give model.embedding_dim = {above} beside it, or take {above}"
            )
        if self.embedding_dim is None and self.hstu_embedding_dim > MOST_TABLE_WIDTH:
            raise UserError(
                f"model.hstu_embedding_dim = {self.hstu_embedding_dim}: is the width of the tables too, which end at "
                f"{MOST_TABLE_WIDTH}; give model.embedding_dim = {MOST_TABLE_WIDTH} beside it"
            )
        value_width = self.hstu_num_heads * self.hstu_attn_linear_dim
        if self.hstu_num_layers and value_width % LMSD_WIDTH_MULTIPLE:
            raise UserError(
                f"model.hstu_attn_linear_dim = {self.hstu_attn_linear_dim}: times model.hstu_num_heads = "
                f"{self.hstu_num_heads} it must be a multiple of {LMSD_WIDTH_MULTIPLE}, and {value_width} is none"
            )


@dataclasses.dataclass(frozen=True)
class MlperfConfig(Section):
    """MLPerf Training events and schedule of the dlrmv4 benchmark, computed from the global batch size."""

    NAME: typing.ClassVar[str] = "mlperf"

    enabled: bool = option(False, "write mlperf.log, evaluate on the benchmark's schedule, stop at its target AUC")
    target_auc: float = option(0.75, "hold-out AUC that ends the run with success", low=0.5, high=1.0)
    first_eval_samples: int = option(0, "samples before the first evaluation; 0: computed", low=0)
    eval_interval_samples: int = option(0, "samples between evaluations; 0: computed", low=0)


SECTIONS: dict[str, type[Section]] = {
    section.NAME: section
    for section in (
        TrainConfig,
        DataConfig,
        ModelConfig,
        OptimizerConfig,
        ShardingConfig,
        CheckpointConfig,
        MlperfConfig,
    )
}


def section_options() -> dict[str, Option]:
    """Full option name → what is declared of it, of all sections."""
    return {f"{name}.{own}": about for name, section in SECTIONS.items() for own, about in options_of(section).items()}
