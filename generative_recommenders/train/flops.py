"""FLOPs of an HSTU ranker's layers: what a batch fills, what was executed, and the shares of the device's peak.

Per sample of S rows and layer, forward and backward (D width of a row, H heads, d_qk and d_v per head):

    UVQK        3 · 2 · S · D · H (2 d_qk + 2 d_v)
    attention   2 · (S² / 2) · H (4 d_qk + 3 d_v)     causal half; two products forward, five backward
    output      3 · 2 · S · 3 H d_v · D

At S = 4096, D = 512, H = 4, d = 128, 3 layers and 1024 samples: 323.26 TFLOP. Recomputed projections are not counted.

- *fill*: FLOPs of the batch's real lengths over those of the dense shape (every sample of ``max_seq_len`` rows).
- *exec*: the same with the last layer counted as it really ran: less than fill only where it ran targets-only.
- *HFU* divides executed FLOPs by time × peak; *MFU* the dense shape's, whatever was padding or skipped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

MFU_NOTE = (
    "MFU counts the dense shape (every sample of max_seq_len rows, every layer in full): it rises when the "
    "targets-only last layer is on and must not be read as better utilisation; HFU and ms/step say that."
)

#: Dense peak in TFLOP/s by the name the driver gives the device (vendor data sheets, without sparsity).
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA A100-SXM4-40GB": {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
    "NVIDIA A100-SXM4-80GB": {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
    "NVIDIA A100-PCIE-40GB": {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
    "NVIDIA A100 80GB PCIe": {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
    "NVIDIA H100 PCIe": {"bfloat16": 756.0, "float16": 756.0, "float32": 51.0},
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989.4, "float16": 989.4, "float32": 67.0},
    "NVIDIA H200": {"bfloat16": 989.4, "float16": 989.4, "float32": 67.0},
    "NVIDIA B200": {"bfloat16": 2250.0, "float16": 2250.0, "float32": 75.0},
    "AMD Instinct MI300X": {"bfloat16": 1307.4, "float16": 1307.4, "float32": 163.4},
    "AMD Instinct MI325X": {"bfloat16": 1307.4, "float16": 1307.4, "float32": 163.4},
    "AMD Instinct MI350X": {"bfloat16": 2306.9, "float16": 2306.9, "float32": 144.2},
    "AMD Instinct MI355X": {"bfloat16": 2516.6, "float16": 2516.6, "float32": 157.3},
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """What MFU and HFU divide by: dense TFLOP/s of one device at a dtype."""

    tflops_per_second: float
    dtype: str
    device: str

    @property
    def in_words(self) -> str:
        """For people."""
        return f"{self.tflops_per_second:g} TFLOP/s per {self.device} ({self.dtype}, dense, of its data sheet)"


def peak_tflops(device_name: str, dtype: torch.dtype) -> tuple[float | None, str | None]:
    """Dense peak of a device in TFLOP/s and ``None``, or ``None`` and why there is none. Never another device's."""
    name = str(dtype).removeprefix("torch.")
    if device_name not in PEAK_TFLOPS:
        return (
            None,
            f"no peak is known for device {device_name!r}: no MFU or HFU (add it to PEAK_TFLOPS in train/flops.py)",
        )
    if name not in PEAK_TFLOPS[device_name]:
        return None, f"no {name} peak is known for device {device_name!r}: no MFU or HFU"
    return PEAK_TFLOPS[device_name][name], None


@dataclasses.dataclass(frozen=True)
class LayerFlops:
    """FLOPs of layers by part, float or float64 scalar tensors."""

    uvqk: float | torch.Tensor
    attention: float | torch.Tensor
    output: float | torch.Tensor

    @property
    def total(self) -> Any:
        """All parts; float or float64 scalar tensor, as they are."""
        return self.uvqk + self.attention + self.output


@dataclasses.dataclass(frozen=True)
class StackShape:
    """Sizes that FLOPs depend on: D, H, d_qk, d_v, layers, and the dense shape's rows per sample."""

    embedding_dim: int
    num_heads: int
    attention_dim: int
    hidden_dim: int
    num_layers: int
    max_seq_len: int

    def layer(self, rows: float | torch.Tensor, pairs: float | torch.Tensor) -> LayerFlops:
        """One full layer on ``rows`` rows in all with ``pairs`` (query, key) pairs in all."""
        return LayerFlops(
            uvqk=self._projection(rows),
            attention=self._attention(pairs, self.attention_dim, self.hidden_dim),
            output=self._output(rows),
        )

    def targets_only_layer(self, rows, candidates, pairs, computation: str) -> LayerFlops:
        """The last layer for ``candidates`` rows alone, of sequences of ``rows`` rows in all.

        ``pairs``: (candidate, row it sees) pairs. *Materialised*: keys and values of all rows, U and Q of candidates.
        *Absorbed*: projections of candidates only, but attention D wide on both sides.
        """
        if computation == "materialised":
            half = self._projection(1) / 2  # K and V are half the columns, and so are U and Q
            projection = half * (rows + candidates)
            attention = self._attention(pairs, self.attention_dim, self.hidden_dim)
        elif computation == "absorbed":
            projection = self._projection(1) * candidates
            attention = self._attention(pairs, self.embedding_dim, self.embedding_dim)
        else:
            raise ValueError(f"computation={computation!r} is not known: use absorbed or materialised")
        return LayerFlops(projection, attention, self._output(candidates))

    def _projection(self, rows):
        return 3 * 2 * rows * self.embedding_dim * self.num_heads * 2 * (self.attention_dim + self.hidden_dim)

    def _attention(self, pairs, key_dim: int, value_dim: int):
        return 2 * pairs * self.num_heads * (4 * key_dim + 3 * value_dim)

    def _output(self, rows):
        return 3 * 2 * rows * 3 * self.num_heads * self.hidden_dim * self.embedding_dim


@dataclasses.dataclass(frozen=True)
class BatchFlops:
    """FLOPs of one batch, forward and backward: the dense shape's, the real lengths', and those executed.

    ``filled`` and ``executed`` are float64 scalars on the lengths' device: nothing waits for it until they are read.
    """

    dense: float
    filled: torch.Tensor
    executed: torch.Tensor

    @property
    def fill(self) -> torch.Tensor:
        """What the real lengths fill of the dense shape, 0 … 1 (0 for an empty batch)."""
        return self.filled / max(self.dense, 1.0)

    @property
    def exec(self) -> torch.Tensor:
        """The executed share of the dense shape: ``fill`` unless the last layer ran targets-only."""
        return self.executed / max(self.dense, 1.0)


def batch_flops(
    shape: StackShape,
    seq_lengths: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    computation: str = "full",
) -> BatchFlops:
    """Count one batch.

    Args:
        shape: the model's sizes.
        seq_lengths: int ``[B]``, rows of every sequence.
        num_targets: int ``[B]``, needed if the last layer ran targets-only.
        computation: of the decision actually taken for this batch (``LastLayerDecision.computation``): ``"full"``,
            ``"absorbed"`` or ``"materialised"``.

    Raises:
        ValueError: an unknown computation, or targets-only without ``num_targets``.
    """
    lengths = seq_lengths.double()
    rows, pairs = lengths.sum(), lengths.square().sum() / 2
    full = shape.layer(rows, pairs).total
    samples, longest = seq_lengths.numel(), shape.max_seq_len
    dense = shape.num_layers * shape.layer(samples * longest, samples * longest**2 / 2).total
    filled = shape.num_layers * full
    if computation == "full":
        return BatchFlops(dense, filled, filled)
    if num_targets is None:
        raise ValueError(f"computation={computation!r} needs num_targets: give the batch's candidates per sequence")
    targets = num_targets.to(lengths)
    seen = targets * (lengths - targets + 1)  # the history and the candidate itself
    last = shape.targets_only_layer(rows, targets.sum(), seen.sum(), computation).total
    return BatchFlops(dense, filled, (shape.num_layers - 1) * full + last)


def utilisation(flops: float, seconds: float, devices: int, peak: float) -> float:
    """FLOPs over time × peak: HFU for executed FLOPs, MFU for the dense shape's (see ``MFU_NOTE``).

    Args:
        flops: of all devices together in ``seconds`` of training steps (no evaluation, checkpoint or compilation time).
        peak: TFLOP/s of one device.
    """
    return flops / (seconds * devices * peak * 1e12)
