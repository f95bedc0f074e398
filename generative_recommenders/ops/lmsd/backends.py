"""The backends of LMSD behind one call shape, and the choice among them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from generative_recommenders.ops.dispatch import Backend, BackendUnavailable, always, choose_backend, why_not_triton
from generative_recommenders.ops.lmsd import cudnn, reference
from generative_recommenders.ops.lmsd.contract import LmsdConfig

Tensors = tuple[torch.Tensor | None, ...]


@dataclasses.dataclass(frozen=True)
class LmsdBackend:
    """A forward and a backward of one family; ``explicit.py`` documents what they compute.

    ``forward(x, u, weight, bias, seed, row_indices, cfg) -> (y, mean, rstd, mask)``;
    ``backward(dy, x, u, weight, bias, mean, rstd, mask, cfg, compute_dweight, owned) -> (dx, du, dweight, dbias)``,
    where ``owned`` holds the four caller-owned buffers or ``None``.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    needs_aligned_rows: bool


def pytorch_forward(x, u, weight, bias, seed, row_indices, cfg: LmsdConfig) -> Tensors:
    """``reference.forward`` with the mask drawn here."""
    mask = None
    if cfg.dropout_ratio > 0:
        rows = torch.arange(x.shape[0], device=x.device) if row_indices is None else row_indices.long()
        mask = reference.draw_mask(rows, x.shape[1], seed, cfg.dropout_ratio, cfg.concat_u, cfg.concat_x)
    flags = (cfg.apply_u_silu, cfg.concat_u, cfg.concat_x, cfg.num_groups)
    y, mean, rstd = reference.forward(x, u, weight, bias, mask, cfg.eps, cfg.dropout_ratio, *flags)
    return y, mean, rstd, mask


def pytorch_backward(
    dy, x, u, weight, bias, mean, rstd, mask, cfg: LmsdConfig, compute_dweight: bool, owned: Tensors = (None,) * 4
) -> Tensors:
    """``reference.backward``, written to the caller's buffers where there are any."""
    flags = (cfg.apply_u_silu, cfg.concat_u, cfg.concat_x, cfg.num_groups)
    grads = list(reference.backward(dy, x, u, weight, bias, mean, rstd, mask, cfg.dropout_ratio, *flags))
    if not compute_dweight:
        grads[2] = None
    return tuple(grad if buffer is None else buffer.copy_(grad) for grad, buffer in zip(grads, owned, strict=True))


_PYTORCH = LmsdBackend(pytorch_forward, pytorch_backward, needs_aligned_rows=False)


def _triton():
    from generative_recommenders.ops.lmsd import launch  # imports Triton, which is optional

    return launch


@functools.lru_cache(maxsize=1)
def _triton_backend() -> LmsdBackend:
    return LmsdBackend(_triton().forward, _triton().backward, needs_aligned_rows=True)


_CUDNN = LmsdBackend(cudnn.forward, cudnn.backward, needs_aligned_rows=True)


def choose_name(
    requested: Backend | str | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    cfg: LmsdConfig,
    row_indices: torch.Tensor | None = None,
    seed: int | torch.Tensor = 0,
) -> Backend:
    """The backend that serves this call: argument, then environment, then the best that can.

    PYTORCH serves every call, so CUDNN, listed after it, is taken by name only.
    """
    checks = {
        Backend.TRITON: lambda: why_not_triton(x, weight, bias) or _triton().why_not_this_shape(x, cfg),
        Backend.PYTORCH: always,
        Backend.CUDNN: lambda: cudnn.why_not(x, weight, bias, cfg, row_indices, seed),
    }
    if x.device.type != "cuda":  # on a CPU Triton's interpreter is for debugging, so it must be asked for
        checks = {backend: checks[backend] for backend in (Backend.PYTORCH, Backend.TRITON, Backend.CUDNN)}
    return choose_backend("lmsd", requested, checks)


def choose(requested: Backend | str | None, *call, **options) -> LmsdBackend:
    """The implementation of ``choose_name(requested, *call, **options)``."""
    chosen = choose_name(requested, *call, **options)
    if chosen is Backend.TRITON:
        return _triton_backend()
    return _CUDNN if chosen is Backend.CUDNN else _PYTORCH


def supports_indexed_output_dropout(
    backend: Backend | str | None = None, device: torch.device | str | None = None
) -> bool:
    """Whether calls that would use this backend can take ``row_indices``.

    Args:
        backend: as in a call; ``None`` follows the environment, then the best that can serve.
        device: where the tensors would be; ``None`` is the GPU if there is one, else the CPU.

    Raises:
        ValueError: the backend's name is not known.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    anything = torch.empty(0, device=device)
    checks = {Backend.TRITON: lambda: why_not_triton(anything), Backend.PYTORCH: always, Backend.CUDNN: always}
    try:
        return choose_backend("lmsd", backend, checks) is not Backend.CUDNN
    except BackendUnavailable:
        return False
