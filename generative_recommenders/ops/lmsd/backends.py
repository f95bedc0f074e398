"""The backends of LMSD behind one call shape, and the one place that imports its kernels."""

from __future__ import annotations

import functools

import torch

from generative_recommenders.ops.dispatch import Backend, BackendUnavailable, Implementation, Op, never, why_not_triton
from generative_recommenders.ops.lmsd import cudnn, reference
from generative_recommenders.ops.lmsd.contract import LmsdConfig, LmsdShape

Tensors = tuple[torch.Tensor | None, ...]


@functools.cache
def kernels():
    """The launches; imported on first use, since Triton is optional."""
    from generative_recommenders.ops.lmsd import launch

    return launch


def _why_not_triton(call: LmsdShape) -> str | None:
    reason = why_not_triton(call.device, call.dtype, *call.parameter_dtypes)
    width = call.columns // call.cfg.num_groups
    if reason is None and width % 8:
        reason = f"a group of {width} columns is no multiple of 8"
    if reason is None and width > 65536:
        reason = f"{width} columns do not fit one program (65536 at most)"
    return reason


def _pytorch_forward(x, u, weight, bias, seed, row_indices, cfg: LmsdConfig) -> Tensors:
    """``reference.forward`` with the mask drawn here."""
    mask = None
    if cfg.dropout_ratio > 0:
        rows = torch.arange(x.shape[0], device=x.device) if row_indices is None else row_indices.long()
        mask = reference.draw_mask(rows, x.shape[1], seed, cfg.dropout_ratio, cfg.concat_u, cfg.concat_x)
    flags = (cfg.apply_u_silu, cfg.concat_u, cfg.concat_x, cfg.num_groups)
    y, mean, rstd = reference.forward(x, u, weight, bias, mask, cfg.eps, cfg.dropout_ratio, *flags)
    return y, mean, rstd, mask


def _pytorch_backward(
    dy, x, u, weight, bias, mean, rstd, mask, cfg: LmsdConfig, compute_dweight: bool, owned: Tensors = (None,) * 4
) -> Tensors:
    """``reference.backward``, written to the caller's buffers where there are any."""
    flags = (cfg.apply_u_silu, cfg.concat_u, cfg.concat_x, cfg.num_groups)
    dx, du, dweight, dbias = reference.backward(dy, x, u, weight, bias, mean, rstd, mask, cfg.dropout_ratio, *flags)
    pairs = zip((dx, du, dweight if compute_dweight else None, dbias), owned, strict=True)
    return tuple(grad if buffer is None or grad is None else buffer.copy_(grad) for grad, buffer in pairs)


#: ``explicit.py`` documents what they compute: ``forward(x, u, weight, bias, seed, row_indices, cfg) -> (y, mean, rstd,
#: mask)``; ``backward(dy, x, u, weight, bias, mean, rstd, mask, cfg, compute_dweight, owned) -> (dx, du, dweight,
#: dbias)``, where ``owned`` holds the four caller-owned buffers or ``None``. All but PYTORCH need rows as
#: ``contract.why_unaligned`` wants. PYTORCH serves every call, so CUDNN, listed after it, is taken by name only.
LMSD = Op(
    "lmsd",
    {
        Backend.TRITON: Implementation(
            _why_not_triton,
            lambda *call: kernels().forward(*call),
            lambda *call: kernels().backward(*call),
        ),
        Backend.PYTORCH: Implementation(never, _pytorch_forward, _pytorch_backward),
        Backend.CUDNN: Implementation(cudnn.why_not, cudnn.forward, cudnn.backward),
    },
)


def choose(requested: Backend | str | None, *call, **options) -> tuple[Implementation, bool]:
    """The implementation for ``LmsdShape.of(*call, **options)``, and whether it needs aligned rows."""
    backend = LMSD.choose(LmsdShape.of(*call, **options), requested)
    return LMSD.backends[backend], backend is not Backend.PYTORCH


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
    call = LmsdShape(torch.device(device), torch.float32, (), 1, 8, LmsdConfig(0.0, True, True, True), indexed=True)
    try:
        LMSD.choose(call, backend)
    except BackendUnavailable:
        return False
    return True
