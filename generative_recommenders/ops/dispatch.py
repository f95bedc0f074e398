"""Which backend an op runs on: explicit argument > environment > a gin file's ``model.backend`` > automatic choice.

Every op package lists its backends in order of automatic preference, each with a check that says why it cannot serve
this call (or ``None`` if it can). An explicit or environment choice that cannot serve raises and repeats that reason;
the automatic choice takes the first backend that can.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping

import torch

from generative_recommenders import compile_caches, settings


class Backend(str, enum.Enum):
    """A family of implementations of an op."""

    PYTORCH = "PYTORCH"
    TRITON = "TRITON"
    CUDNN = "CUDNN"


class BackendUnavailable(ValueError):
    """A backend was asked for by name and cannot serve the call; the message says why."""


def parse_backend(value: Backend | str | None) -> Backend | None:
    """``None``, a ``Backend`` or its name in any case; anything else raises ``ValueError`` listing the names."""
    if value is None or isinstance(value, Backend):
        return value
    try:
        return Backend(value.upper())
    except (ValueError, AttributeError):
        names = ", ".join(b.value for b in Backend)
        raise ValueError(f"backend {value!r} is not known: use one of {names}") from None


def choose_backend(
    op: str,
    requested: Backend | str | None,
    checks: Mapping[Backend, Callable[[], str | None]],
) -> Backend:
    """Pick the backend for one call of ``op``.

    Args:
        op: the op's short name; ``HSTU_<OP>_BACKEND`` is its environment variable.
        requested: the caller's explicit choice, or ``None``.
        checks: backend → function returning ``None`` (can serve) or the reason it cannot, best first.

    Raises:
        BackendUnavailable: the explicit or environment choice cannot serve, or none can.
    """
    choice, source = parse_backend(requested), "the backend argument"
    if choice is None:
        for name in (f"HSTU_{op.upper()}_BACKEND", "HSTU_BACKEND"):
            value = settings.get(name)
            if value is not None:
                choice, source = parse_backend(value), settings.source(name)
                break
    if choice is not None:
        reason = checks[choice]() if choice in checks else "this op has no such backend"
        if reason is not None:
            usable = ", ".join(b.value for b in checks)
            raise BackendUnavailable(
                f"{op}: backend {choice.value} (from {source}) is unavailable: {reason}; backends of this op: {usable}"
            )
        return choice
    reasons = []
    for backend, check in checks.items():
        reason = check()
        if reason is None:
            return backend
        reasons.append(f"{backend.value}: {reason}")
    raise BackendUnavailable(f"{op}: no backend can serve this call ({'; '.join(reasons)})")


def always() -> str | None:
    """The check of a backend that serves every call."""
    return None


@functools.lru_cache(maxsize=1)
def triton_import_error() -> str | None:
    """Why Triton cannot be imported, or ``None``; where it can, it gets a place for what it compiles."""
    try:
        import triton
    except Exception as exc:  # missing, or of another release than torch or the driver expect
        reason = " ".join(f"{type(exc).__name__}: {exc}".split())
        return f"triton cannot be imported ({reason}); install the release that requirements/ names for this torch"
    if not triton.knobs.runtime.interpret:
        compile_caches.give_triton_a_cache()
    return None


def triton_interpreted() -> bool:
    """Whether Triton kernels run in the interpreter (``TRITON_INTERPRET=1`` at import of Triton)."""
    if triton_import_error() is not None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def why_not_triton(*tensors: torch.Tensor) -> str | None:
    """Why Triton kernels cannot take these tensors, or ``None``: they need a GPU, or the interpreter on a CPU."""
    missing = triton_import_error()
    if missing is not None:
        return missing
    for tensor in tensors:
        if tensor.device.type == "cuda":
            continue
        if not triton_interpreted():
            return f"tensors are on {tensor.device}: Triton needs a GPU (or TRITON_INTERPRET=1 for debugging on a CPU)"
        if tensor.dtype == torch.bfloat16:
            return "bfloat16 is computed wrongly by Triton's interpreter: use float32 or float16 on a CPU"
    return None
