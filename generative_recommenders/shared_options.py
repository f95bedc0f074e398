"""Options that more than one room reads, each declared here alone: the ranker's, and what a variable sets elsewhere.

``modules`` builds its configuration on them, ``train`` its section ``model``, ``settings`` the environment variables.
Like ``options.py`` this loads nothing.
"""

from __future__ import annotations

import dataclasses

from generative_recommenders.options import OnResume, Variable, option

# FBGEMM's tables have rows of whole groups of four numbers.
TABLE_WIDTH_MULTIPLE = 4
BACKEND_NAMES = ("PYTORCH", "TRITON", "CUDNN")

HBM_CAP_GB = option(
    0.0,
    "memory per device that the planner may fill; 0: all of a GPU",
    low=0.0,
    on_resume=OnResume.FREE,
    variable=Variable(
        "HSTU_HBM_CAP_GB",
        "Memory per device, in GB, that the sharding planner may fill with tables (option sharding.hbm_cap_gb).",
        shows_default=False,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerOptions:
    """Sizes and switches of the DLRMv4 HSTU ranker; the defaults are the public benchmark's yambda-5b values."""

    hstu_embedding_dim: int = option(
        512, "model width D; a multiple of 4 unless embedding_dim is set", low=2, high=8192
    )
    embedding_dim: int | None = option(
        None, "width of the tables; None: D", low=TABLE_WIDTH_MULTIPLE, high=8192, multiple_of=TABLE_WIDTH_MULTIPLE
    )
    hstu_num_layers: int = option(3, "STU layers", low=0, high=64)
    hstu_num_heads: int = option(4, "attention heads H", low=1, high=128, changes_meaning=True)
    hstu_attn_qk_dim: int = option(128, "query and key width per head", low=1, high=1024, changes_meaning=True)
    hstu_attn_linear_dim: int = option(
        128, "value width per head; times hstu_num_heads a multiple of 8", low=1, high=1024, changes_meaning=True
    )
    max_seq_len: int | None = option(
        None,
        "longest sequence (context, history, candidate); None: what the data set needs",
        low=1,
        high=2**20,
        changes_meaning=True,
    )
    attn_norm: str = option(
        "max_seq_len", "divisor of attention", choices=("max_seq_len", "batch_max"), changes_meaning=True
    )
    input_dropout_ratio: float = option(0.2, "dropout on the encoded sequence", low=0.0, high=0.99)
    output_dropout_ratio: float = option(0.1, "dropout inside each STU layer", low=0.0, high=0.99)
    preprocessor_hidden_dim: int = option(256, "hidden width of the content and action MLPs", low=1, high=65536)
    item_tower_hidden_dim: int = option(512, "hidden width of the candidate's tower", low=1, high=65536)
    head_hidden_dim: int = option(512, "hidden width of each task's head", low=1, high=65536)
    action_dim: int = option(8, "embedding width per action bit", low=1, high=1024)
    num_position_buckets: int = option(8192, "rows of the position table", low=1, high=2**20)
    num_time_buckets: int = option(2048, "time table rows, less one", low=1, high=2**20)
    postprocessor: str = option(
        "timestamp",
        "of candidate rows after the stack",
        choices=("timestamp", "layer_norm", "l2_norm"),
        changes_meaning=True,
    )
    causal: bool = option(True, "a row sees earlier rows only", changes_meaning=True)
    target_aware: bool = option(True, "a candidate sees the history and itself only", changes_meaning=True)
    max_attn_len: int = option(
        0, "sliding window of attention in rows; 0: none", low=0, high=2**20, changes_meaning=True
    )
    contextual_seq_len: int = option(
        0,
        "rows at the start that attend both ways: 0, or the number of contextual features",
        low=0,
        high=2**20,
        changes_meaning=True,
    )
    use_group_norm: bool = option(False, "output statistics per head", changes_meaning=True)
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
        choices=BACKEND_NAMES,
        variable=Variable("HSTU_BACKEND", "Backend of every op that has no variable of its own."),
    )
    last_layer_targets_only: bool = option(
        False,
        "compute the last layer for candidate rows only",
        variable=Variable(
            "TRITON_HSTU_LAST_LAYER_TARGETS_ONLY", "Run the last layer for the candidate rows alone (exact)."
        ),
    )
    targets_only_eval: bool = option(
        True,
        "the same in evaluation",
        variable=Variable(
            "TRITON_HSTU_TARGETS_ONLY_EVAL", "Whether evaluation may use the targets-only last layer too."
        ),
    )
    targets_only_several_targets: bool = option(
        False,
        "the same for other than one candidate per sequence",
        variable=Variable(
            "TRITON_HSTU_TARGETS_ONLY_SEVERAL_TARGETS",
            "Admit batches with other than one target per sequence to the targets-only last layer.",
        ),
    )
    targets_only_computation: str = option(
        "auto",
        "how that layer attends",
        choices=("auto", "absorbed", "materialised"),
        variable=Variable(
            "TRITON_HSTU_TARGETS_ONLY_COMPUTATION",
            "How the targets-only layer attends: absorbed (no keys or values), materialised, or the faster that can "
            "serve.",
        ),
    )
