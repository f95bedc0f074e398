"""Raw ids of a prepared cache: which file has those of a space, read only when they are asked for."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from generative_recommenders.data.identity import PIECE, Vocabulary
from generative_recommenders.errors import UserError

if TYPE_CHECKING:
    import pyarrow

USER_IDS = "user_ids.npy"


def vocabulary_file(space: str) -> str:
    """File of a space's raw ids within the cache's folder; numbers of users are in ``USER_IDS`` alone."""
    return f"vocabulary_{space}.parquet"


def vocabularies_of(folder: pathlib.Path, manifest: Mapping) -> dict[str, Vocabulary]:
    """Space → its raw ids. Fingerprints are the manifest's; one of before it had them is taken from the files later."""
    recorded, files, found = manifest.get("fingerprints", {}), manifest.get("vocabularies", {}), {}
    for space, rows in manifest["vocab"].items():
        if vocabulary_file(space) in files:
            pieces = _of_parquet(folder / vocabulary_file(space))
        elif space == "uid":
            pieces = _of_column(folder / USER_IDS)
        else:
            continue
        found[space] = Vocabulary(rows, pieces, recorded.get(space))
    return found


def _of_parquet(file: pathlib.Path) -> Callable[[], Iterator[pyarrow.Array]]:
    def pieces() -> Iterator[pyarrow.Array]:
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(PIECE, columns=["original"]):
                    yield batch.column(0)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{file} cannot be read ({str(error).splitlines()[0]}): prepare the cache again") from None

    return pieces


def _of_column(file: pathlib.Path) -> Callable[[], Iterator[pyarrow.Array]]:
    def pieces() -> Iterator[pyarrow.Array]:
        import pyarrow

        try:
            ids = np.load(file, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}): prepare the cache again") from None
        for start in range(0, len(ids), PIECE):
            yield pyarrow.array(np.asarray(ids[start : start + PIECE]))

    return pieces
