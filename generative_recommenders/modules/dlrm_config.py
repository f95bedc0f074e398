"""The sizes and choices of a DLRM-HSTU ranker."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from generative_recommenders.modules.multitask import TaskConfig
from generative_recommenders.modules.stu import STULayerConfig
from generative_recommenders.options import options_of, with_default
from generative_recommenders.shared_options import RankerOptions

AUTOCAST_CHOICES = options_of(RankerOptions)["autocast"].choices or ()
RECOMPUTE_OPTIONS = ("recompute_normed_x", "recompute_uvqk", "recompute_y")


def candidate_name(item_feature: str) -> str:
    """The candidate's name of a history feature: ``item_id`` → ``item_candidate_id``, f → ``item_candidate_<f>``."""
    return "item_candidate_id" if item_feature == "item_id" else f"item_candidate_{item_feature}"


@dataclasses.dataclass(frozen=True)
class DlrmHSTUConfig(RankerOptions):
    """A ranker: ``RankerOptions``, where each option has its line, and what follows from the data or is not set there.

    Attributes:
        table_rows: rows of each feature's embedding table, by feature name.
        item_feature_names: per-event features; the first is the item's id, the others are its attributes (if any).
        contextual_feature_names: features with one value per sample, one row each at the start of the sequence.
        tasks: what to predict.
        max_seq_len: the longest joined sequence (context + history + candidates); the attention divisor by default.
        hstu_embedding_dim: D. embedding_dim: width of the tables, ``None`` for D.
        hstu_num_heads, hstu_attn_qk_dim, hstu_attn_linear_dim: H, d_qk, d_v.
        action_weights, action_dim: see ``ActionEncoder``.
        num_position_buckets, num_time_buckets: see ``PositionalEncoder``.
        full_turn: angle of one period in the timestamp postprocessor (2π; 2 · 3.14 to match the public weights).
        attn_norm, attn_alpha, is_inference, recompute_*, sort_by_length, backend: see ``STULayerConfig``.
            Recomputation saves memory and costs time: a CPU run is faster without.
        contextual_seq_len: 0 or the number of contextual features.
        return_full_embeddings: also return every row of the stack's output.
        last_layer_targets_only, targets_only_*: see ``TargetsOnlyGate``.
        autocast: the item tower, the heads and the losses are always fp32.
    """

    table_rows: Mapping[str, int]  # type: ignore[misc]  # what is inherited is given by name alone
    item_feature_names: tuple[str, ...] = ("item_id", "artist_id", "album_id")
    contextual_feature_names: tuple[str, ...] = ()
    tasks: tuple[TaskConfig, ...] = (TaskConfig("listen_plus"),)
    max_seq_len: int = with_default(RankerOptions, "max_seq_len", 4096)
    action_weights: tuple[int, ...] = (1, 2, 4)
    full_turn: float = 2 * math.pi
    attn_alpha: float | None = None
    is_inference: bool = False
    return_full_embeddings: bool = False

    def __post_init__(self) -> None:
        # Lists are what configuration files give; the dataclass is frozen, so this is the place to settle the types.
        for name in ("item_feature_names", "contextual_feature_names", "tasks", "action_weights"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.item_feature_names:
            raise ValueError("item_feature_names is empty: the first name is the item's id")
        names = self.item_feature_names + self.contextual_feature_names
        if len(set(names)) != len(names):
            raise ValueError(f"feature names must differ, got {', '.join(names)}")
        for name in names:
            if name not in self.table_rows:
                raise ValueError(f"feature {name!r} has no table: give table_rows[{name!r}]")
            if self.table_rows[name] < 1:
                raise ValueError(f"table_rows[{name!r}]={self.table_rows[name]}: a table needs at least one row")
        if self.contextual_seq_len not in (0, len(self.contextual_feature_names)):
            raise ValueError(
                f"contextual_seq_len={self.contextual_seq_len}: must be 0 (contextual rows are ordinary rows) or the "
                f"number of contextual features, {len(self.contextual_feature_names)}, each of which is one row"
            )
        if self.hstu_num_layers < 0:
            raise ValueError(f"hstu_num_layers={self.hstu_num_layers}: must not be negative")
        for name in ("num_position_buckets", "num_time_buckets", "action_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 <= self.input_dropout_ratio < 1:
            raise ValueError(f"input_dropout_ratio={self.input_dropout_ratio}: must be in [0, 1)")
        if self.autocast not in AUTOCAST_CHOICES:
            raise ValueError(f"autocast={self.autocast!r} is not known: use {', '.join(AUTOCAST_CHOICES)}")

    @property
    def table_dim(self) -> int:
        """E, width of the embedding tables."""
        return self.hstu_embedding_dim if self.embedding_dim is None else self.embedding_dim

    @property
    def candidate_feature_names(self) -> tuple[str, ...]:
        """Candidate names of the item features, in their order."""
        return tuple(candidate_name(name) for name in self.item_feature_names)

    def layer_config(self, number: int = 0) -> STULayerConfig:
        """The configuration of STU layer ``number`` (from 0)."""
        own, of_layer = ({field.name for field in dataclasses.fields(cls)} for cls in (DlrmHSTUConfig, STULayerConfig))
        options = {name: getattr(self, name) for name in own & of_layer - {"embedding_dim"}}  # here the tables'
        if number == self.hstu_num_layers - 1 and self.recompute_last_layer is not None:
            options |= dict.fromkeys(RECOMPUTE_OPTIONS, self.recompute_last_layer)
        return STULayerConfig(
            embedding_dim=self.hstu_embedding_dim,
            num_heads=self.hstu_num_heads,
            hidden_dim=self.hstu_attn_linear_dim,
            attention_dim=self.hstu_attn_qk_dim,
            **options,
        )
