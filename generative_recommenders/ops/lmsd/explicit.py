"""The explicit pair: a forward that returns what the backward needs, and a backward into caller-owned gradients.

Names, argument order and results follow the public ``cudnn.hstu_lmsd_forward`` / ``hstu_lmsd_backward``, so that either
can stand for the other; ``row_indices``, ``num_groups`` and ``backend`` are additions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from generative_recommenders.ops.dispatch import Backend
from generative_recommenders.ops.lmsd import backends, contract
from generative_recommenders.ops.lmsd.contract import LmsdBackward, LmsdConfig, LmsdForward


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream | int | None, device: torch.device):
    """Make the device and ``stream`` (``torch.cuda.Stream`` or handle; ``None``: the current one) current."""
    if device.type != "cuda":
        if stream is not None:
            raise ValueError(f"lmsd: stream={stream!r} given for tensors on {device}: pass None")
        yield
        return
    if isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream, device=device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def hstu_lmsd_forward(
    x_tensor: torch.Tensor,
    u_tensor: torch.Tensor,
    weight_tensor: torch.Tensor,
    bias_tensor: torch.Tensor,
    eps: float = 1e-6,
    dropout_ratio: float = 0.1,
    seed: int | torch.Tensor = 0,
    stream: torch.cuda.Stream | int | None = None,
    apply_u_silu: bool = True,
    concat_u: bool = True,
    concat_x: bool = True,
    row_indices: torch.Tensor | None = None,
    num_groups: int = 1,
    backend: Backend | str | None = None,
) -> LmsdForward:
    """``y = [dropout(a), dropout(x), dropout(LN(x) * a)]`` with ``a = SiLU(u)``, and what the backward needs.

    Not differentiable: call ``hstu_lmsd_backward`` with the results, or use ``hstu_lmsd``.

    Args:
        x_tensor, u_tensor: ``[N, D]``, one dtype of float32, float16, bfloat16 (float64 on the PyTorch backend). D is a
            multiple of 8. Row strides are free; on a GPU kernel each row must be 16-byte aligned.
        weight_tensor, bias_tensor: ``[D]``, or ``[H]`` with ``num_groups`` = H > 1; any of these dtypes.
        eps: added to the variance.
        dropout_ratio: in [0, 1); kept values are scaled by 1 / (1 - ratio). At 0 nothing is drawn.
        seed: signed 64-bit integer, or an int64 tensor of one element on the device, which a captured CUDA graph reads
            anew at each replay.
        stream: ``torch.cuda.Stream`` or handle on which to allocate and run; ``None`` is the current one.
        apply_u_silu: multiply by SiLU(u) instead of u.
        concat_u, concat_x: whether the first two segments are made.
        row_indices: int64 or int32 ``[N]``: row i draws the mask of row number ``row_indices[i]`` instead of i.
        num_groups: statistics over H blocks of D/H columns instead of the row (group norm per head).
        backend: ``PYTORCH``, ``TRITON`` or ``CUDNN``; ``None`` follows the environment, then the best that can serve.

    Returns:
        ``LmsdForward``: y_tensor, mean_tensor, rstd_tensor, mask_tensor, by key, attribute or unpacking.

    Raises:
        TypeError, ValueError: a dtype, shape, device, alignment or ratio that cannot be served.
        BackendUnavailable: the backend asked for cannot serve the call.
    """
    cfg = LmsdConfig(dropout_ratio, apply_u_silu, concat_u, concat_x, num_groups, eps)
    contract.check_inputs(x_tensor, u_tensor, weight_tensor, bias_tensor, cfg)
    contract.check_seed(seed, x_tensor)
    contract.check_row_indices(row_indices, x_tensor)
    with torch.no_grad(), _on_stream(stream, x_tensor.device):
        call, aligned = backends.choose(backend, x_tensor, weight_tensor, bias_tensor, cfg, row_indices, seed)
        if aligned:
            contract.check_aligned(x_tensor=x_tensor, u_tensor=u_tensor)
        y, mean, rstd, mask = call.forward(x_tensor, u_tensor, weight_tensor, bias_tensor, seed, row_indices, cfg)
    return LmsdForward(y, mean, rstd, mask)


def hstu_lmsd_backward(
    dy_tensor: torch.Tensor,
    x_tensor: torch.Tensor,
    u_tensor: torch.Tensor,
    weight_tensor: torch.Tensor,
    bias_tensor: torch.Tensor,
    mean_tensor: torch.Tensor,
    rstd_tensor: torch.Tensor,
    mask_tensor: torch.Tensor | None,
    dropout_ratio: float | None = None,
    stream: torch.cuda.Stream | int | None = None,
    dx_tensor: torch.Tensor | None = None,
    du_tensor: torch.Tensor | None = None,
    dweight_tensor: torch.Tensor | None = None,
    dbias_tensor: torch.Tensor | None = None,
    apply_u_silu: bool | None = None,
    concat_u: bool | None = None,
    concat_x: bool | None = None,
    compute_dweight: bool = True,
    num_groups: int = 1,
    backend: Backend | str | None = None,
) -> LmsdBackward:
    """Gradients of ``hstu_lmsd_forward``.

    ``dropout_ratio``, ``apply_u_silu``, ``concat_u`` and ``concat_x`` must be given and be forward's: y carries no
    hidden metadata. Others are forward's inputs and results.

    Args:
        dy_tensor: ``[N, D * segments]`` in x's dtype; strides are free (an expanded gradient is copied first).
        dx_tensor, du_tensor: optional buffers ``[N, D]`` to write; may be column blocks of one wider buffer.
        dweight_tensor, dbias_tensor: optional buffers shaped as the parameters, in their dtypes.
        compute_dweight: ``False`` skips the weight's gradient; the result's ``dweight_tensor`` is then ``None``.

    Returns:
        ``LmsdBackward``: dx_tensor, du_tensor, dweight_tensor, dbias_tensor. Weight gradients are summed in a fixed
        order: equal inputs give equal bits on one device.

    Raises:
        TypeError, ValueError: dtypes, shapes, saved tensors or alignment that do not fit, forward configuration that is
            missing (the message names it), an output that overlaps an input or another output.
    """
    flags = dict(apply_u_silu=apply_u_silu, concat_u=concat_u, concat_x=concat_x)
    cfg = _forward_config(num_groups, dropout_ratio=dropout_ratio, **flags)
    contract.check_inputs(x_tensor, u_tensor, weight_tensor, bias_tensor, cfg)
    contract.check_saved(dy_tensor, x_tensor, mean_tensor, rstd_tensor, mask_tensor, cfg)
    owned = dict(dx_tensor=dx_tensor, du_tensor=du_tensor, dweight_tensor=dweight_tensor, dbias_tensor=dbias_tensor)
    _check_buffers(owned, (x_tensor, u_tensor, weight_tensor, bias_tensor), compute_dweight)
    inputs = dict(x_tensor=x_tensor, u_tensor=u_tensor, weight_tensor=weight_tensor, bias_tensor=bias_tensor)
    saved = dict(dy_tensor=dy_tensor, mean_tensor=mean_tensor, rstd_tensor=rstd_tensor, mask_tensor=mask_tensor)
    contract.check_overlap(owned, {**inputs, **saved})
    with torch.no_grad(), _on_stream(stream, x_tensor.device):
        call, aligned = backends.choose(backend, x_tensor, weight_tensor, bias_tensor, cfg)
        if aligned:
            contract.check_aligned(x_tensor=x_tensor, u_tensor=u_tensor, dx_tensor=dx_tensor, du_tensor=du_tensor)
        assert call.backward is not None
        grads = call.backward(
            dy_tensor, x_tensor, u_tensor, weight_tensor, bias_tensor, mean_tensor, rstd_tensor, mask_tensor,
            cfg, compute_dweight, tuple(owned.values()),
        )  # fmt: skip
    return LmsdBackward(*grads)


def _forward_config(num_groups: int, **given) -> LmsdConfig:
    """Forward's configuration, all of it given by name: nothing is guessed."""
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(f"hstu_lmsd_backward: pass forward's {', '.join(missing)} explicitly")
    return LmsdConfig(num_groups=num_groups, **given)


def _check_buffers(owned: dict[str, torch.Tensor | None], like: Iterable[torch.Tensor], compute_dweight: bool) -> None:
    if owned["dweight_tensor"] is not None and not compute_dweight:
        raise ValueError("lmsd: dweight_tensor is given but compute_dweight is False: drop one of them")
    for (name, tensor), twin in zip(owned.items(), like, strict=True):
        contract.check_owned(name, tensor, twin)
