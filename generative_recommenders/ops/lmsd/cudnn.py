"""The CuTe DSL kernels of the public ``cudnn`` package (nvidia-cudnn-frontend 1.32) as an optional backend.

Not yet run on hardware: the package serves SM10x GPUs only. So the automatic choice never takes it; it must be asked
for by name (``backend="CUDNN"`` or ``HSTU_LMSD_BACKEND=CUDNN``), and the first call of each configuration compares the
mask and the result of a small problem with the PyTorch reference before the real one runs.
"""

from __future__ import annotations

import functools

import torch

from generative_recommenders.ops.lmsd import reference
from generative_recommenders.ops.lmsd.contract import LmsdConfig, LmsdShape, aligned

MAX_ELEMENTS = 2**31
MAX_COLUMNS = 1024  # exclusive
_PROBE_ROWS = 70
_PROBE_SEED = 0x0123_4567_89AB_CDEF
_PROBE_TOLERANCE = 1e-2  # relative norm; bf16 rounding alone is near 2e-3


@functools.lru_cache(maxsize=1)
def import_error() -> str | None:
    """Why the package's LMSD functions cannot be imported, or ``None``."""
    try:
        from cudnn import hstu_lmsd_backward, hstu_lmsd_forward  # noqa: F401
    except Exception as exc:  # a half-installed CUDA stack raises more than ImportError
        return f"cudnn.hstu_lmsd_forward cannot be imported ({exc}); pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32'"
    return None


def why_not(call: LmsdShape) -> str | None:
    """Why the package cannot take this call, or ``None``. Cheap reasons first; nothing is imported before they pass."""
    if call.device.type != "cuda":
        return f"tensors are on {call.device}: it needs an SM10x GPU"
    if not torch.cuda.is_available():  # a call that is only asked about
        return why_not_this_call(call) or "it needs an SM10x GPU; this machine has no GPU"
    capability = torch.cuda.get_device_capability(call.device)
    if capability[0] != 10:
        return f"it needs an SM10x GPU; this one is SM{capability[0]}{capability[1]}"
    return why_not_this_call(call) or import_error()


def why_not_this_call(call: LmsdShape) -> str | None:
    """The refusals that do not depend on the device."""
    dtypes, rows, columns = (call.dtype, *call.parameter_dtypes), call.rows, call.columns
    if {*dtypes} != {torch.bfloat16}:
        return f"x, weight and bias must be bfloat16, not {', '.join(map(str, dtypes))}"
    if columns >= MAX_COLUMNS or columns % 8:
        return f"D={columns} must be a multiple of 8 below {MAX_COLUMNS}"
    if not 1 <= rows <= MAX_ELEMENTS // columns:
        return f"N={rows} must be in [1, {MAX_ELEMENTS // columns}] for D={columns}"
    if call.cfg.num_groups != 1:
        return "it has no group norm (num_groups must be 1)"
    if call.indexed:
        return "it has no row_indices"
    if call.seed_on_device:
        return "its seed must be a Python integer, not a tensor"
    return None


def forward(x, u, weight, bias, seed, row_indices, cfg: LmsdConfig):
    """``(y, mean, rstd, mask)``; ``row_indices`` is ``None`` here (``why_not`` refuses others)."""
    _verify_once(x.device, x.shape[1], cfg)
    return _call_forward(x, u, weight, bias, seed, cfg)


def backward(
    dy, x, u, weight, bias, mean, rstd, mask, cfg: LmsdConfig, compute_dweight: bool, owned: tuple = (None,) * 4
):
    """``(dx, du, dweight, dbias)``, into the caller's buffers where there are any."""
    from cudnn import hstu_lmsd_backward

    dx, du, dweight, dbias = owned
    grads = hstu_lmsd_backward(
        aligned(dy),
        x,
        u,
        weight.contiguous(),
        bias.contiguous(),
        mean,
        rstd,
        mask,
        dropout_ratio=cfg.dropout_ratio,
        dx_tensor=dx,
        du_tensor=du,
        dweight_tensor=dweight,
        dbias_tensor=dbias,
        compute_dweight=compute_dweight,
        **_flags(cfg),
    )
    return grads["dx_tensor"], grads["du_tensor"], grads["dweight_tensor"], grads["dbias_tensor"]


def _flags(cfg: LmsdConfig) -> dict[str, bool]:
    return {"apply_u_silu": cfg.apply_u_silu, "concat_u": cfg.concat_u, "concat_x": cfg.concat_x}


def _call_forward(x, u, weight, bias, seed: int, cfg: LmsdConfig):
    from cudnn import hstu_lmsd_forward

    saved = hstu_lmsd_forward(
        x,
        u,
        weight.contiguous(),
        bias.contiguous(),
        eps=cfg.eps,
        dropout_ratio=cfg.dropout_ratio,
        seed=seed,
        **_flags(cfg),
    )
    return saved["y_tensor"], saved["mean_tensor"], saved["rstd_tensor"], saved["mask_tensor"]


@functools.cache
def _verify_once(device: torch.device, columns: int, cfg: LmsdConfig) -> None:
    """Hold the package to the reference on a small problem. Raises ``RuntimeError`` if mask or result differ."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((_PROBE_ROWS, columns), (_PROBE_ROWS, columns), (columns,), (columns,))
    x, u, weight, bias = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16() for shape in shapes
    )
    y, _, _, mask = _call_forward(x, u, weight, bias, _PROBE_SEED, cfg)
    expected = None
    if cfg.dropout_ratio > 0:
        rows = torch.arange(_PROBE_ROWS, device=device)
        expected = reference.draw_mask(rows, columns, _PROBE_SEED, cfg.dropout_ratio, cfg.concat_u, cfg.concat_x)
        if not torch.equal(mask, expected):
            count = int((mask != expected).sum())
            raise RuntimeError(f"lmsd: backend CUDNN draws another mask ({count} bytes differ): use backend TRITON")
    flags = (cfg.apply_u_silu, cfg.concat_u, cfg.concat_x)
    oracle = reference.forward(x, u, weight, bias, expected, cfg.eps, cfg.dropout_ratio, *flags)[0].float()
    error = float((y.float() - oracle).norm() / oracle.norm())
    if not error < _PROBE_TOLERANCE:
        raise RuntimeError(f"lmsd: backend CUDNN is off by {error:.1e} (relative norm): use backend TRITON")
