"""What somebody may have meant who wrote a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """`` (did you mean X?)`` or nothing."""
    valid = list(valid)
    elsewhere = [v for v in valid if v.split(".")[-1] == name.split(".")[-1]]  # the right option of another section
    close = elsewhere[:1] or difflib.get_close_matches(name, valid, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
