"""The typed configuration of a run: one frozen dataclass per section, each field with default, range and one line.

Sections are what gin files and ``--bind`` name (``train.batch_size = 64``). A section checks its own values when it is
built, so a value out of range stops the run before any work. ``gin_files.py`` reads files into these classes.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping

from generative_recommenders.errors import UserError

MODES = ("train", "eval", "train-eval", "streaming-train-eval")
# Binary tasks by name, and the bit of the candidate's action that is their label.
TASK_BITS = {"listen_plus": 1, "like": 2, "skip": 4}
# Regression tasks by name: the candidate's label, the unit it stands there in, and where predictions begin.
VALUE_TASKS = {"rating": ("item_rating", 0.01, 3.5)}
TASKS = (*TASK_BITS, *VALUE_TASKS)
# Whole numbers of options stay below it, so that sums of a few fit 64 bits.
LARGEST = 2**62
# FBGEMM's tables have rows of whole groups of four numbers; the LMSD op takes eight columns at a time.
TABLE_WIDTH_MULTIPLE, LMSD_WIDTH_MULTIPLE = 4, 8
# Layouts of a table over the devices; HOST leaves the layout to the planner and its rows in host memory.
HOST = "host"
SHARDINGS = ("row_wise", "table_wise", "column_wise", HOST)


def option(
    default: object,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    multiple_of: int | None = None,
    choices: tuple[str, ...] | None = None,
    environment: str | None = None,
) -> typing.Any:
    """A field of a section; ``environment`` names the knob that beats the gin file (``--bind`` beats both)."""
    about = {"doc": doc, "low": low, "high": high, "multiple_of": multiple_of, "choices": choices}
    about["environment"] = environment
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class Section:
    """Base of the sections: checks types, ranges and choices of its fields on construction."""

    NAME: typing.ClassVar[str]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = convert(f"{self.NAME}.{field.name}", getattr(self, field.name), hints[field.name], field.metadata)
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Conditions between fields; sections override it."""


def convert(name: str, value: typing.Any, hint: object, about: Mapping) -> object:
    """The value in the field's type, or ``UserError`` naming the field, the value and what it may be."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(k for k in kinds if k is not type(None))
    kind = typing.get_origin(kind) or kind
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < LARGEST else math.inf
    if kind is tuple and type(value) is list:
        value = tuple(value)
    if type(value) is not kind:
        raise UserError(f"{name} = {value!r}: expected {_describe(kind)}")
    low, high, choices = about["low"], about["high"], about["choices"]
    if choices is not None and value not in choices:
        raise UserError(f"{name} = {value!r}: expected one of {', '.join(choices)}")
    if kind in (int, float):
        if abs(value) >= LARGEST if kind is int else not math.isfinite(value):
            raise UserError(f"{name} = {value!r}: expected a finite number{' below 2**62' if kind is int else ''}")
        too_low, too_high = low is not None and value < low, high is not None and value > high
        multiple_of = about.get("multiple_of")
        if too_low or too_high or (multiple_of and value % multiple_of):
            raise UserError(f"{name} = {value!r}: expected a value in {bounds(about)}")
    return value


def _describe(kind: type) -> str:
    names = {
        int: "a whole number (digits only: 1000, not 1e3)",
        float: "a number",
        bool: "True or False",
        str: "a string in quotes",
        tuple: "a list in brackets",
        dict: "a dictionary in braces",
    }
    return names[kind]


def bounds(about: Mapping) -> str:
    """Range or choices of a field, for messages and the options listing."""
    if about["choices"] is not None:
        return ", ".join(about["choices"])
    low, high = about["low"], about["high"]
    if low is None and high is None:
        return ""
    multiple = f", a multiple of {about['multiple_of']}" if about.get("multiple_of") else ""
    return f"{'-inf' if low is None else low} to {'inf' if high is None else high}{multiple}"


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """What the run does, for how long, and what it must reach."""

    NAME: typing.ClassVar[str] = "train"

    mode: str = option("train-eval", "what the run does", choices=MODES)
    seed: int = option(1, "weights, and with the rank dropout and shuffling", low=0, high=2**31 - 1)
    batch_size: int = option(64, "samples per rank and step", low=1, high=2**20)
    eval_batch_size: int = option(0, "samples per rank in evaluation; 0: batch_size", low=0, high=2**20)
    epochs: int = option(1, "passes over the training windows", low=1, high=100_000)
    max_steps: int = option(0, "stop after so many steps; 0: no limit", low=0)
    shuffle: bool = option(True, "shuffle the training samples inside each window, seeded")
    eval_every_samples: int = option(0, "evaluate each time so many samples were trained; 0: off", low=0)
    eval_every_epochs: int = option(1, "evaluate after every n-th pass; 0: only at the end", low=0)
    eval_every_windows: int = option(0, "streaming: evaluate after every n-th window; 0: only at the end", low=0)
    log_every: int = option(20, "steps between two lines of metrics", low=1)
    target_auc: float = option(0.0, "fail unless the hold-out AUC reaches it; 0: no target", low=0.0, high=1.0)
    stop_at_target: bool = option(False, "stop training as soon as target_auc is reached")
    beat_baseline: bool = option(False, "fail unless the hold-out AUC beats the data set's baseline")
    max_gap_to_best: float = option(
        0.0, "fail unless the AUC comes so near to the best reachable one; 0: no check", low=0.0, high=1.0
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
        {}, "table → row_wise, table_wise, column_wise or host; tables not named: the planner's choice"
    )
    wire_precision: str = option("float32", "of the embedding all-to-all", choices=("float32", "float16", "bfloat16"))
    dedup_indices: bool = option(False, "look up each id of a batch once per rank")
    hbm_cap_gb: float = option(
        0.0, "memory per device that the planner may fill; 0: all of a GPU", low=0.0, environment="HSTU_HBM_CAP_GB"
    )
    headroom_gb: float = option(
        8.0, "of a GPU, left free for what the allocator cannot use; an eighth of a GPU at most", low=0.0
    )
    host_memory_gb: float = option(
        0.0, "host memory, per host, for tables that the GPUs do not hold; 0: none goes there by itself", low=0.0
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

    every_steps: int = option(0, "write each n steps; 0: off", low=0)
    every_windows: int = option(0, "streaming: write after every n-th window; 0: off", low=0)
    every_seconds: float = option(0.0, "write when so long has passed since the last one; 0: off", low=0.0)
    at_end: bool = option(False, "write one when training ends")
    keep: int = option(2, "newest checkpoints that stay", low=1)
    load: str = option("", "folder of a checkpoint (or of a run) whose weights the run starts from")
    match_ids: bool = option(False, "on loading, carry the tables' rows over by raw id: for data with other ids")
    load_optimizer: bool = option(False, "load Adam's moments and row-wise Adagrad's sums too: training goes on")
    partial: bool = option(False, "load what both have; tensors that only one side has are passed over, and said")

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
class ModelConfig(Section):
    """Sizes and switches of the DLRMv4 HSTU ranker; features and tables come from the data set."""

    NAME: typing.ClassVar[str] = "model"

    tasks: tuple = option(
        ("listen_plus",), "what to predict, first the one that counts: listen_plus, like, skip; rating"
    )
    hstu_embedding_dim: int = option(64, "model width D; a multiple of 4 unless embedding_dim is set", low=2, high=8192)
    embedding_dim: int | None = option(
        None, "width of the tables; None: D", low=TABLE_WIDTH_MULTIPLE, high=8192, multiple_of=TABLE_WIDTH_MULTIPLE
    )
    hstu_num_layers: int = option(2, "STU layers", low=0, high=64)
    hstu_num_heads: int = option(2, "attention heads H", low=1, high=128)
    hstu_attn_qk_dim: int = option(32, "query and key width per head", low=1, high=1024)
    hstu_attn_linear_dim: int = option(
        32, "value width per head; times hstu_num_heads a multiple of 8", low=1, high=1024
    )
    max_seq_len: int | None = option(
        None, "longest sequence (context, history, candidate); None: what the data set needs", low=1, high=2**20
    )
    attn_norm: str = option("max_seq_len", "divisor of attention", choices=("max_seq_len", "batch_max"))
    input_dropout_ratio: float = option(0.2, "dropout on the encoded sequence", low=0.0, high=0.99)
    output_dropout_ratio: float = option(0.1, "dropout inside each STU layer", low=0.0, high=0.99)
    preprocessor_hidden_dim: int = option(256, "hidden width of the content and action MLPs", low=1, high=65536)
    item_tower_hidden_dim: int = option(512, "hidden width of the candidate's tower", low=1, high=65536)
    head_hidden_dim: int = option(512, "hidden width of each task's head", low=1, high=65536)
    action_dim: int = option(8, "embedding width per action bit", low=1, high=1024)
    num_position_buckets: int = option(8192, "rows of the position table", low=1, high=2**20)
    num_time_buckets: int = option(2048, "time table rows, less one", low=1, high=2**20)
    postprocessor: str = option(
        "timestamp", "of candidate rows after the stack", choices=("timestamp", "layer_norm", "l2_norm")
    )
    causal: bool = option(True, "a row sees earlier rows only")
    target_aware: bool = option(True, "a candidate sees the history and itself only")
    max_attn_len: int = option(0, "sliding window of attention in rows; 0: none", low=0, high=2**20)
    contextual_seq_len: int = option(
        0, "rows at the start that attend both ways: 0, or the number of contextual features", low=0, high=2**20
    )
    use_group_norm: bool = option(False, "output statistics per head")
    recompute_normed_x: bool = option(True, "redo the input norm in the backward: less memory, more time")
    recompute_uvqk: bool = option(True, "redo the projection in the backward")
    recompute_y: bool = option(True, "redo the output norm in the backward")
    recompute_last_layer: bool | None = option(
        None, "all three on the last layer; None: as the others (targets-only wants True, and it costs nothing there)"
    )
    recompute_preprocessor: bool = option(False, "redo the MLPs over all rows in the backward")
    sort_by_length: bool = option(True, "lay out the longest sequences first")
    autocast: str = option(
        "auto", "dtype of the transducer; auto: bfloat16 on a GPU", choices=("auto", "bfloat16", "float32")
    )
    backend: str | None = option(
        None,
        "of all ops; None: automatic. An op's own variable beats it unless it is given with --bind",
        choices=("PYTORCH", "TRITON", "CUDNN"),
        environment="HSTU_BACKEND",
    )
    last_layer_targets_only: bool = option(
        False,
        "compute the last layer for candidate rows only",
        environment="TRITON_HSTU_LAST_LAYER_TARGETS_ONLY",
    )
    targets_only_eval: bool = option(True, "the same in evaluation", environment="TRITON_HSTU_TARGETS_ONLY_EVAL")
    targets_only_several_targets: bool = option(
        False,
        "the same for other than one candidate per sequence",
        environment="TRITON_HSTU_TARGETS_ONLY_SEVERAL_TARGETS",
    )
    targets_only_computation: str = option(
        "auto",
        "how that layer attends",
        choices=("auto", "absorbed", "materialised"),
        environment="TRITON_HSTU_TARGETS_ONLY_COMPUTATION",
    )

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
