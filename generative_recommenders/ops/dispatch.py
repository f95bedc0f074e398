"""Which backend an op runs on: explicit argument > environment > an argument that is a preference > automatic choice.

Every op has one table (``Op``) of its backends in order of automatic preference, each with a check that says why it
cannot serve a call (or ``None`` if it can). An explicit or environment choice that cannot serve raises and repeats that
reason; the automatic choice takes the first backend that can. ``explain`` says what would run, and why not the better.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from generative_recommenders import compile_caches, settings


class Backend(str, enum.Enum):
    """A family of implementations of an op."""

    PYTORCH = "PYTORCH"
    TRITON = "TRITON"
    CUDNN = "CUDNN"


class BackendUnavailable(ValueError):
    """A backend was asked for by name and cannot serve the call; the message says why."""


class Preference(str):
    """A backend's name, as an argument that every variable beats: what a configuration file asks for.

    Args:
        name: as in ``Backend``, in any case.
        said_by: who asks, for messages.
    """

    said_by: str

    def __new__(cls, name: str, said_by: str) -> Preference:
        preference = super().__new__(cls, name)
        preference.said_by = said_by
        return preference

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # __new__ has one more than str's
        """For copies."""
        return str(self), self.said_by


def pack(request: Backend | str | None) -> str:
    """What a call asks for as a plain string, which is all that an operator's arguments can be."""
    name = "" if request is None else str(getattr(request, "value", request))
    return f"{name}\n{request.said_by}" if isinstance(request, Preference) else name


def unpack(text: str) -> str | None:
    """The inverse of ``pack``."""
    name, _, said_by = text.partition("\n")
    return Preference(name, said_by) if said_by else name or None


def parse_backend(value: Backend | str | None) -> Backend | None:
    """``None``, a ``Backend`` or its name in any case; anything else raises ``ValueError`` listing the names.

    A preference names nothing: ``None``.
    """
    if isinstance(value, Preference):
        return None
    if value is None or isinstance(value, Backend):
        return value
    try:
        return Backend(value.upper())
    except (ValueError, AttributeError):
        names = ", ".join(b.value for b in Backend)
        raise ValueError(f"backend {value!r} is not known: use one of {names}") from None


def _composed_by_its_caller(*_: Any) -> Any:
    raise TypeError("this table only says which backend serves: its functions compute")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One backend of an op.

    Attributes:
        why_not: from the op's description of a call (``device`` and what else decides; no tensors) to the reason why
            this backend cannot serve it, or ``None``.
        forward: the computation, in a form that all backends of the op share; left out by a family of functions that
            only ask which backend serves.
        backward: its gradient; ``None`` where autograd differentiates ``forward``.
    """

    why_not: Callable[[Any], str | None]
    forward: Callable[..., Any] = _composed_by_its_caller
    backward: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What would run, and why not a better one.

    Attributes:
        backend: what would run, or ``None``.
        source: who chose, in words.
        reasons: why each backend that the op prefers would not run, or the one asked for cannot.
    """

    op: str
    backend: Backend | None
    source: str
    reasons: Mapping[Backend, str]

    def __str__(self) -> str:
        runs = "nothing can run" if self.backend is None else self.backend.value
        refused = [f"not {backend.value}: {reason}" for backend, reason in self.reasons.items()]
        return "; ".join([f"{self.op}: {runs} ({self.source})", *refused])


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op's table of backends, best first; ``settings.py`` declares its variable, ``HSTU_<NAME>_BACKEND``."""

    name: str
    backends: Mapping[Backend, Implementation]

    def __post_init__(self) -> None:
        if self.variable not in settings.knobs():
            raise RuntimeError(f"op {self.name!r} has no variable: declare {self.variable} in settings.py")

    @property
    def variable(self) -> str:
        """The environment variable that chooses a backend for this op alone."""
        return f"HSTU_{self.name.upper()}_BACKEND"

    def choose(self, call: Any, requested: Backend | str | None = None) -> Backend:
        """What ``explain`` says would run.

        Raises:
            BackendUnavailable: the explicit or environment choice cannot serve, or none can.
        """
        choice = explain(self, call, requested)
        if choice.backend is None:
            refused = (
                f"backend {backend.value} (from {choice.source}) is unavailable: {reason}"
                for backend, reason in choice.reasons.items()
            )
            usable = ", ".join(backend.value for backend in self.backends)
            raise BackendUnavailable(f"{self.name}: {'; '.join(refused)}; backends of this op: {usable}")
        return choice.backend


def explain(op: Op, call: Any, requested: Backend | str | None = None) -> Choice:
    """What ``op`` would run for a call, and why not what is better; runs nothing.

    Args:
        call: the op's description of a call, which holds no tensors: the GPU it names need not be there.
        requested: the caller's explicit choice, or ``None``: the environment's, else the first of the table that can.
            A ``Preference`` comes between these two.
    """
    asked, source = _asked_for(op, requested)
    if asked is not None:
        reason = op.backends[asked].why_not(call) if asked in op.backends else "this op has no such backend"
        if reason is not None:
            return Choice(op.name, None, source, {asked: reason})
        better = itertools.takewhile(lambda backend: backend is not asked, op.backends)
        return Choice(op.name, asked, source, dict.fromkeys(better, f"{asked.value} is asked for"))
    reasons: dict[Backend, str] = {}
    for backend, implementation in op.backends.items():
        reason = implementation.why_not(call)
        if reason is None and backend is Backend.TRITON and call.device.type != "cuda":
            reason = "on a CPU its interpreter is for debugging: ask for it by name"
        if reason is None:
            return Choice(op.name, backend, source, reasons)
        reasons[backend] = reason
    return Choice(op.name, None, source, reasons)


def _asked_for(op: Op, requested: Backend | str | None) -> tuple[Backend | None, str]:
    """The choice by name, if there is one, and who made it."""
    choice = parse_backend(requested)
    if choice is not None:
        return choice, "the backend argument"
    for name in (op.variable, "HSTU_BACKEND"):
        value = settings.get(name)
        if value is not None:
            return parse_backend(value), f"environment variable {name}"
    if isinstance(requested, Preference):
        return parse_backend(str(requested)), requested.said_by
    return None, "the automatic choice"


def never(_: Any) -> None:
    """``why_not`` of a backend that serves every call."""


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


def why_not_triton(device: torch.device, dtype: torch.dtype, *others: torch.dtype) -> str | None:
    """Why Triton kernels cannot serve there, or ``None``: they need a GPU, or the interpreter on a CPU.

    Args:
        dtype: what they compute in. others: further dtypes that they read.
    """
    missing = triton_import_error()
    if missing is not None:
        return missing
    if device.type != "cuda" and not triton_interpreted():
        return f"tensors are on {device}: Triton needs a GPU (or TRITON_INTERPRET=1 for debugging on a CPU)"
    if device.type != "cuda" and torch.bfloat16 in (dtype, *others):
        return "bfloat16 is computed wrongly by Triton's interpreter: use float32 or float16 on a CPU"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {dtype} has no kernel: use float32, float16 or bfloat16"
    return None
