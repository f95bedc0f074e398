"""The part of an attention call that is not rows: offsets, normaliser and mask."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Everything of an attention call but its tensors of rows; ``hstu_mha`` says what the fields mean."""

    seq_offsets: torch.Tensor
    max_seq_len: int
    alpha: float
    attn_norm: float | torch.Tensor
    num_targets: torch.Tensor | None = None
    causal: bool = True
    max_attn_len: int = 0
    contextual_seq_len: int = 0

    @property
    def batch(self) -> int:
        return self.seq_offsets.numel() - 1

    def on(self, device: torch.device) -> AttentionCall:
        """The kernels' view of the call: small tensors contiguous and on the device, numbers of one type each."""

        def placed(value: torch.Tensor) -> torch.Tensor:
            return value.to(device).contiguous()

        norm = placed(self.attn_norm) if isinstance(self.attn_norm, torch.Tensor) else float(self.attn_norm)
        targets = None if self.num_targets is None else placed(self.num_targets)
        return AttentionCall(
            placed(self.seq_offsets), int(self.max_seq_len), float(self.alpha), norm, targets,
            bool(self.causal), int(self.max_attn_len), int(self.contextual_seq_len),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """What decides which backend serves a call: device and dtype of the rows, d_qk, d_v, and the products' dtype."""

    device: torch.device
    dtype: torch.dtype
    d_qk: int
    d_v: int
    product_dtype: torch.dtype
