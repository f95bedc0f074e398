"""``@compiled``: numba's ``njit`` that keeps the machine code for the next process where it can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import NullCache

from generative_recommenders.compile_caches import say_compiled_anew


def compiled(function: Callable) -> Callable:
    """Compile a loop at its first call, without the interpreter lock.

    numba's own ``cache=True`` raises when the function is defined if neither the package's ``__pycache__`` nor a folder
    of the user can be written, and when it is called if the disk is full or a cached file is damaged.
    """
    loop: Any = numba.njit(nogil=True)(function)
    try:
        loop.enable_caching()
    except RuntimeError:
        loop._cache = _Nowhere()
    else:
        _make_optional(loop._cache)
    return loop


def _say(reason: str) -> None:
    say_compiled_anew("numba's machine code of the data loops", "NUMBA_CACHE_DIR", reason)


class _Nowhere(NullCache):
    """No cache, which is said when something is compiled."""

    def save_overload(self, sig: object, data: object) -> None:
        _say("neither the package's nor the user's folder can be written")


def _make_optional(cache: Any) -> None:
    """Let an entry that cannot be read be compiled again, and one that cannot be written be forgotten."""
    load, save = cache.load_overload, cache.save_overload

    def load_overload(sig: object, target_context: object) -> object | None:
        try:
            return load(sig, target_context)
        except OSError:  # of another user
            return None
        except Exception:  # whatever the unpickler makes of a file that a kill cut off
            with contextlib.suppress(OSError):
                cache.flush()
            return None

    def save_overload(sig: object, data: object) -> None:
        try:
            save(sig, data)
        except OSError as error:
            _say(f"{cache.cache_path}: {error.strerror}")

    cache.load_overload, cache.save_overload = load_overload, save_overload
