"""Device memory of a training step beside the tables: arithmetic over sizes, read off the code of each stage.

A step holds most in one of a few *moments*: while looked-up rows travel, while they are joined, in the backward of one
of the layers, or in the preprocessor's. For each the tensors alive are added up; the step's peak is the largest. What
stage keeps what for its backward is written where it is kept: ``ops/stu/layer.py``, ``ops/encode``,
``ops/candidate_attention``, ``modules/preprocessor.py``. The figures are those of the fused GPU kernels.

T joined rows of D columns, N of them events (history and candidates), F item features E wide, 2 bytes an element under
bf16. At 1,024 samples of 2,663 rows the sums stand within 1 % of the peaks that ``benchmarks/train_step.py`` measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from generative_recommenders.modules.dlrm_config import DlrmHSTUConfig
from generative_recommenders.modules.stu import STULayerConfig

FP32, INT64 = 4, 8
#: Tiles of 64 x 64 slopes that the warp-specialised attention's backward keeps at least room for, if the batch has
#: so many (``ops/attention/hopper_launch.py``), in bytes a tile.
SLOPE_TILES, TILE_BYTES = 2**31 // (64 * 64 * 2), 64 * 64 * 2
#: Parameter, gradient (a view of the all-reduce's bucket) and Adam's two moments, fp32 each.
BYTES_PER_DENSE_PARAMETER = 4 * FP32
#: Batches on the device at once: the step's, and the one that is being copied.
BATCHES = 2
#: int64 columns of T: places, positions and times of rows, in joined and in source order, their timestamps.
LAYOUT_COLUMNS = 8
#: int64 per looked-up id while it travels: sent, received, its place, the order in which rows are updated.
ID_COLUMNS = 4
#: Whole copies of all looked-up rows alive while they travel: of sent, received and reordered always two.
EXCHANGE_COPIES = 2
#: What no tensor shows: the driver's context, the libraries' workspaces, compiled kernels; with several ranks NCCL's.
CONTEXT_BYTES, NCCL_BYTES = 2**30, 2**30


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment of the step, and the bytes alive in it by kind."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class StepShape:
    """A step of one rank.

    Attributes:
        model: sizes and recompute options.
        samples: of the rank's batch, one candidate each. rows: joined rows per sample.
        dense_parameters: elements of everything but the tables.
        ranks: of the run. wire_bytes: of an embedding's element on the wire.
        half: whether the transducer runs in 2-byte elements.
        slope_buffer: whether attention's backward keeps its slopes (warp-specialised kernels).
    """

    model: DlrmHSTUConfig
    samples: int
    rows: float
    dense_parameters: int
    ranks: int = 1
    wire_bytes: int = FP32
    half: bool = True
    slope_buffer: bool = True

    @property
    def element(self) -> int:
        """Bytes of an element inside the transducer."""
        return 2 if self.half else FP32

    @property
    def joined(self) -> float:
        """T."""
        return self.samples * self.rows

    @property
    def events(self) -> float:
        """N."""
        return max(self.joined - self.samples * len(self.model.contextual_feature_names), 0.0)

    @property
    def looked_up(self) -> float:
        """Rows of all tables that the rank's batch looks up."""
        return self.events * len(self.model.item_feature_names) + self.joined - self.events


def standing_bytes(shape: StepShape) -> dict[str, float]:
    """What is there in every moment: parameters, batches, ids and layout, and what no tensor shows."""
    ids = shape.events * (len(shape.model.item_feature_names) + 2)
    return {
        "dense parameters": float(shape.dense_parameters * BYTES_PER_DENSE_PARAMETER),
        "batches": INT64 * (BATCHES * ids + ID_COLUMNS * shape.looked_up + LAYOUT_COLUMNS * shape.joined),
        "context and libraries": float(CONTEXT_BYTES + (NCCL_BYTES if shape.ranks > 1 else 0)),
    }


def moments(shape: StepShape) -> list[Moment]:
    """Every moment that can be the peak, with ``standing_bytes`` in each."""
    standing, before = standing_bytes(shape), preprocessor_bytes(shape)
    kept = [layer_bytes(shape, number) for number in range(shape.model.hstu_num_layers)]
    found = [_exchange(shape), _join(shape), _preprocessor_backward(shape)]
    for number in range(len(kept)):
        parts = {"kept by the preprocessor": before, "kept by layers": sum(kept[:number])}
        for working in _layer_backward(shape, number):
            found.append(Moment(f"backward of layer {number + 1}", {**parts, "working memory": working}))
    return [Moment(moment.name, {**standing, **moment.parts}) for moment in found]


def peak(shape: StepShape) -> Moment:
    """The moment that holds most."""
    return max(moments(shape), key=lambda moment: moment.total)


def exchange_bytes(shape: StepShape, rows: float) -> float:
    """Device memory of ``rows`` looked-up rows while they travel."""
    return EXCHANGE_COPIES * rows * shape.model.table_dim * FP32


def layer_bytes(shape: StepShape, number: int) -> float:
    """What layer ``number`` (from 0) keeps for its backward, its input included."""
    if _targets_only(shape, number):
        return sum(_targets_only_layer(shape))
    layer = shape.model.layer_config(number)
    mask = layer.output_dim if layer.output_dropout_ratio > 0 else 0
    elements = layer.embedding_dim + 2 * layer.output_dim  # x, U, attention
    elements += 0 if layer.recompute_normed_x else layer.embedding_dim
    elements += 0 if layer.recompute_uvqk else layer.uvqk_dim - layer.output_dim
    elements += 0 if layer.recompute_y else 3 * layer.output_dim
    return shape.joined * (shape.element * elements + mask + 4 * FP32)


def preprocessor_bytes(shape: StepShape) -> float:
    """What the preprocessor keeps until its backward, the stack's input not included."""
    model, element = shape.model, shape.element
    inputs = len(model.item_feature_names) * model.table_dim
    if model.recompute_preprocessor:
        return shape.events * element * inputs
    return shape.events * element * inputs + _between_bytes(shape)


def _between_bytes(shape: StepShape) -> float:
    """Hidden rows of the MLPs before and after their norm, the rows before the last norms, and how they were joined."""
    model, mlps = shape.model, min(len(shape.model.item_feature_names), 2)
    per_event = mlps * (shape.element * (2 * model.preprocessor_hidden_dim + model.hstu_embedding_dim) + 4 * FP32)
    mask = model.hstu_embedding_dim // 4 if model.input_dropout_ratio > 0 else 0
    return shape.events * per_event + shape.joined * mask


def _targets_only(shape: StepShape, number: int) -> bool:
    return shape.model.last_layer_targets_only and number == shape.model.hstu_num_layers - 1


def _targets_only_layer(shape: StepShape) -> tuple[float, float]:
    """Bytes of a targets-only layer's input, and of what else it keeps."""
    layer = shape.model.layer_config(shape.model.hstu_num_layers - 1)
    if shape.model.targets_only_computation != "materialised":
        return shape.joined * shape.element * layer.embedding_dim, shape.joined * 2 * FP32
    keys = layer.num_heads * (layer.attention_dim + layer.hidden_dim)
    kept = shape.element * (layer.embedding_dim + keys) + 2 * FP32
    return shape.joined * shape.element * layer.embedding_dim, shape.joined * kept


def _layer_backward(shape: StepShape, number: int) -> list[float]:
    """Bytes in the two fullest places of a layer's backward: in LMSD's and in attention's."""
    layer = shape.model.layer_config(number)
    width, per = layer.embedding_dim, shape.joined * shape.element
    if _targets_only(shape, number):
        gradients = 1 if shape.model.targets_only_computation != "materialised" else 3
        return [layer_bytes(shape, number) + per * gradients * width]
    out, vqk = layer.output_dim, layer.uvqk_dim - layer.output_dim
    # The gradients of the output, of U, V, Q and K in one buffer, and of attention's output.
    in_all: float = per * (width + layer.uvqk_dim + out)
    y = 0 if layer.recompute_y else 3 * out  # gone by then
    upstream = 0 if vqk >= 3 * out else 3 * out  # LMSD's upstream gradient takes the place of V's, Q's and K's
    in_lmsd = layer_bytes(shape, number) + in_all + per * (upstream - y)
    u = 0 if layer.recompute_uvqk else out  # gone, unless it shares V's, Q's and K's buffer
    in_attention = per * (width + width + vqk + u) + in_all + slope_bytes(shape, layer)  # x, normed x, V, Q, K
    return [in_lmsd, in_attention]


def slope_bytes(shape: StepShape, layer: STULayerConfig) -> float:
    """The buffer that the warp-specialised attention's backward writes its slopes to; others recompute them."""
    if not shape.slope_buffer:
        return 0.0
    longest = -(-layer.max_seq_len // 64)
    most = layer.num_heads * longest * (longest + 1) // 2
    bound = layer.num_heads * (int(shape.joined * (layer.max_seq_len + 190)) // (2 * 64 * 64) + 2 * shape.samples)
    return TILE_BYTES * min(bound, most * shape.samples, max(SLOPE_TILES, 2 * most))


def _exchange(shape: StepShape) -> Moment:
    return Moment("exchange of looked-up rows", {"looked-up rows": exchange_bytes(shape, shape.looked_up)})


def _join(shape: StepShape) -> Moment:
    width = shape.model.table_dim
    joined = shape.events * len(shape.model.item_feature_names) * width * shape.element
    return Moment("join of looked-up rows", {"looked-up rows": shape.looked_up * width * FP32, "joined rows": joined})


def _preprocessor_backward(shape: StepShape) -> Moment:
    model = shape.model
    inputs = shape.events * shape.element * len(model.item_feature_names) * model.table_dim
    mlps = min(len(model.item_feature_names), 2)
    row = shape.element * model.hstu_embedding_dim
    # The gradient of the stack's input, that input again if it is recomputed, and the gradients of what it was made of.
    working = shape.joined * row * (2 if model.recompute_preprocessor else 1) + shape.events * row * mlps
    return Moment(
        "backward of the preprocessor",
        {"kept by the preprocessor": inputs + _between_bytes(shape), "working memory": working},
    )
