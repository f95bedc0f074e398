"""Yambda's names: sizes, files and folders. Needs nothing but Python, so that a prepared cache opens without DuckDB."""

from __future__ import annotations

import pathlib

from generative_recommenders.errors import UserError
from generative_recommenders.paths import user_path

SIZES = ("50m", "500m", "5b")
#: Event types in their content order.
EVENT_TYPES = ("listen", "like", "dislike", "unlike", "undislike")
#: min_history of each size: a history of 4,086 events is full in the largest, the small ones keep most listens.
MIN_HISTORY = {"50m": 50, "500m": 50, "5b": 4086}
#: Attribute → mapping file in the data set's folder; its column has the attribute's name.
MAPPINGS = {"artist_id": "artist_item_mapping.parquet", "album_id": "album_item_mapping.parquet"}


def require_size(size: str) -> str:
    """The size itself; ``UserError`` if Yambda has none of that name."""
    if size not in SIZES:
        raise UserError(f"Yambda has no size {size!r}: choose one of {', '.join(SIZES)}")
    return size


def cache_folder(path: str | pathlib.Path, size: str) -> pathlib.Path:
    """Where the prepared cache of a size lies by default: ``<path>/cache/<size>``."""
    return user_path(path) / "cache" / require_size(size)


def events_path(path: str | pathlib.Path, size: str) -> pathlib.Path:
    """``<path>/flat/<size>/multi_event.parquet``, or the folder ``multi_event`` beside it if the file was split."""
    folder = user_path(path) / "flat" / require_size(size)
    return folder / "multi_event" if (folder / "multi_event").is_dir() else folder / "multi_event.parquet"
