"""What the fused functions on Triton share: the U, V, Q, K projection, attention on it, and the way back."""

from __future__ import annotations

import dataclasses

import torch

from generative_recommenders.ops.attention.attention import checked_call
from generative_recommenders.ops.attention.backends import kernels
from generative_recommenders.ops.attention.call import AttentionCall, AttentionShape
from generative_recommenders.ops.checks import matrix, vector


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype products run in: autocast's where it is on, else that of x."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


@dataclasses.dataclass(frozen=True)
class UvqkParameters:
    """Parameters of LayerNorm → U, V, Q, K.

    Attributes:
        norm_weight, norm_bias: [D].
        weight: [D, H * (2 * d_v + 2 * d_qk)], columns in the order U, V, Q, K, each head after head.
        bias: one entry per column of ``weight``.
    """

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    def __iter__(self):
        return iter((self.norm_weight, self.norm_bias, self.weight, self.bias))

    def checked(self, x: torch.Tensor, columns: int) -> UvqkParameters:
        """These, with contiguous vectors. Raises ``ValueError`` where they do not fit x [T, D] and the columns."""
        if x.dim() != 2:
            raise ValueError(f"x must be [T, D]: got {tuple(x.shape)}")
        weight = matrix("uvqk_weight", self.weight, columns, x.shape[1])
        norm_weight = vector("norm_weight", self.norm_weight, x.shape[1])
        norm_bias = vector("norm_bias", self.norm_bias, x.shape[1])
        return UvqkParameters(norm_weight, norm_bias, weight, vector("uvqk_bias", self.bias, columns))


@dataclasses.dataclass(frozen=True)
class Projection:
    """Sizes and options of LayerNorm → U, V, Q, K → attention, the same for every batch of a layer.

    The gradients of U, V, Q and K are written straight into one buffer ``grad`` [T, 2 (d_v + d_qk) H], which the two
    products of the projection's backward read.

    Attributes:
        heads: H. d_qk, d_v: widths of a head's queries and keys, and of its values.
        eps: added to the norm's variance.
        recompute_normed_x, recompute_uvqk: redo the normalised input and the projection in the backward instead of
            keeping them (Triton backend; the PyTorch backend keeps what autograd keeps).
    """

    heads: int
    d_qk: int
    d_v: int
    eps: float = 1e-6
    recompute_normed_x: bool = True
    recompute_uvqk: bool = True

    @property
    def u_columns(self) -> int:
        """H * d_v: where the columns of V, Q and K begin."""
        return self.heads * self.d_v

    @property
    def columns(self) -> int:
        """Columns of U, V, Q and K."""
        return 2 * self.heads * (self.d_v + self.d_qk)

    def shape(self, x: torch.Tensor) -> AttentionShape:
        """What decides which backend attends to rows that are projected from those of x."""
        return AttentionShape(x.device, x.dtype, self.d_qk, self.d_v, compute_dtype(x))

    def checked_call(self, x: torch.Tensor, call: AttentionCall) -> AttentionCall:
        """The kernels' view of a call on q, k and v that will be made from the rows of x [T, D]."""
        q = x[:, :1, None].expand(-1, self.heads, self.d_qk)
        return checked_call(q, q, x[:, :1, None].expand(-1, self.heads, self.d_v), call)

    def project(self, normed, weight, bias) -> tuple[torch.Tensor, torch.Tensor]:
        """U and the columns V, Q, K: views of one buffer, or two of their own if V, Q and K are not to be kept."""
        weight, bias, cut = weight.to(normed.dtype), bias.to(normed.dtype), self.u_columns
        if self.recompute_uvqk:
            return torch.addmm(bias[:cut], normed, weight[:, :cut]), self.project_vqk(normed, weight, bias)
        uvqk = torch.addmm(bias, normed, weight)
        return uvqk[:, :cut], uvqk[:, cut:]

    def project_vqk(self, normed, weight, bias) -> torch.Tensor:
        """The columns V, Q, K alone."""
        cut = self.u_columns
        return torch.addmm(bias.to(normed.dtype)[cut:], normed, weight.to(normed.dtype)[:, cut:])

    def attend(self, vqk: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Attention output [T, H * d_v]."""
        out = torch.empty(vqk.shape[0], self.heads, self.d_v, device=vqk.device, dtype=vqk.dtype)
        kernels().forward_into(*self.split(vqk), out, call)
        return out.flatten(1)

    def attend_backward(self, d_out, vqk: torch.Tensor, grad: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Write the gradients of V, Q and K into ``grad`` beside U's; returns their column sums, fp32."""
        d_out = d_out.to(vqk.dtype).unflatten(1, (self.heads, self.d_v))
        dq, dk, dv = self.split(grad[:, self.u_columns :])
        kernels().backward_into(d_out, *self.split(vqk), dq, dk, dv, call)
        return torch.cat([kernels().sum_columns(t.flatten(1)) for t in (dv, dq, dk)])

    def split(self, vqk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) views [T, H, d] of the columns V, Q, K."""
        v, q, k = vqk.split([self.heads * d for d in (self.d_v, self.d_qk, self.d_qk)], dim=1)
        return tuple(t.unflatten(1, (self.heads, -1)) for t in (q, k, v))
