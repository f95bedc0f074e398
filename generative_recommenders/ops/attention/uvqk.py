"""What the fused functions on Triton share: the U, V, Q, K projection, attention on it, and the way back."""

from __future__ import annotations

import dataclasses

import torch

from generative_recommenders.ops.attention.backends import kernels
from generative_recommenders.ops.attention.call import AttentionCall, AttentionShape


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype products run in: autocast's where it is on, else that of x."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


@dataclasses.dataclass(frozen=True)
class Projection:
    """Sizes and options of one LayerNorm → U, V, Q, K → attention.

    The gradients of U, V, Q and K are written straight into one buffer ``grad`` [T, 2 (d_v + d_qk) H], which the two
    products of the projection's backward read.
    """

    heads: int
    d_qk: int
    d_v: int
    eps: float
    dtype: torch.dtype
    call: AttentionCall
    recompute_normed_x: bool
    recompute_uvqk: bool

    @staticmethod
    def shape(x: torch.Tensor, d_qk: int, d_v: int) -> AttentionShape:
        """What decides which backend attends to rows that are projected from those of x."""
        return AttentionShape(x.device, x.dtype, d_qk, d_v, compute_dtype(x))

    @property
    def u_columns(self) -> int:
        """H * d_v: where the columns of V, Q and K begin."""
        return self.heads * self.d_v

    def project(self, normed, weight, bias) -> tuple[torch.Tensor, torch.Tensor]:
        """U and the columns V, Q, K: views of one buffer, or two of their own if V, Q and K are not to be kept."""
        weight, bias, cut = weight.to(self.dtype), bias.to(self.dtype), self.u_columns
        if self.recompute_uvqk:
            return torch.addmm(bias[:cut], normed, weight[:, :cut]), self.project_vqk(normed, weight, bias)
        uvqk = torch.addmm(bias, normed, weight)
        return uvqk[:, :cut], uvqk[:, cut:]

    def project_vqk(self, normed, weight, bias) -> torch.Tensor:
        """The columns V, Q, K alone."""
        cut = self.u_columns
        return torch.addmm(bias.to(self.dtype)[cut:], normed, weight.to(self.dtype)[:, cut:])

    def attend(self, vqk: torch.Tensor) -> torch.Tensor:
        """Attention output [T, H * d_v]."""
        out = torch.empty(vqk.shape[0], self.heads, self.d_v, device=vqk.device, dtype=vqk.dtype)
        kernels().forward_into(*self._split(vqk), out, self.call)
        return out.flatten(1)

    def attend_backward(self, d_out: torch.Tensor, vqk: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Write the gradients of V, Q and K into ``grad`` beside U's; returns their column sums, fp32."""
        d_out = d_out.to(self.dtype).unflatten(1, (self.heads, self.d_v))
        dq, dk, dv = self._split(grad[:, self.u_columns :])
        kernels().backward_into(d_out, *self._split(vqk), dq, dk, dv, self.call)
        return torch.cat([kernels().sum_columns(t.flatten(1)) for t in (dv, dq, dk)])

    def _split(self, vqk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) views [T, H, d] of the columns V, Q, K."""
        v, q, k = vqk.split([self.heads * d for d in (self.d_v, self.d_qk, self.d_qk)], dim=1)
        return tuple(t.unflatten(1, (self.heads, -1)) for t in (q, k, v))
