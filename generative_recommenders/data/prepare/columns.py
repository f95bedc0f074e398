"""Columns on disk: ``.npy`` files that are appended to, cut back after a kill, and sealed with their final length."""

from __future__ import annotations

import hashlib
import os
import pathlib

import numpy as np

from generative_recommenders.errors import UserError

#: Every column's header has this size, so that its length can be filled in at the end.
HEADER_BYTES = 128
_PREFIX = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")


class ColumnWriter:
    """Appends values to a ``.npy`` file. ``keep`` values that an earlier run has written are kept, the rest is cut."""

    def __init__(self, path: pathlib.Path, dtype: np.dtype | type, keep: int = 0) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype), keep
        size = HEADER_BYTES + keep * self.dtype.itemsize
        if keep and (not path.exists() or path.stat().st_size < size):
            raise UserError(f"{path} lost values that were written before: delete {path.parent} and prepare again")
        self._file = open(path, "r+b" if keep else "wb", buffering=0)
        self._file.truncate(size)
        self._file.seek(size)

    def append(self, values: np.ndarray) -> None:
        """Write values of the column's own type at the end."""
        data = np.ascontiguousarray(values, dtype=self.dtype).data.cast("B")
        while data:
            data = data[self._file.write(data) :]
        self.length += len(values)

    def flush(self) -> None:
        """Put everything written so far onto the disk."""
        os.fsync(self._file.fileno())

    def seal(self) -> None:
        """Write the header with the final length and flush."""
        self._file.seek(0)
        self._file.write(_header(self.dtype, self.length))
        self.flush()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def __enter__(self) -> ColumnWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_column(path: pathlib.Path, values: np.ndarray) -> None:
    """Write a whole column."""
    with ColumnWriter(path, values.dtype) as writer:
        writer.append(values)
        writer.seal()


def read_values(path: pathlib.Path, dtype: np.dtype | type, start: int, stop: int) -> np.ndarray:
    """Values [start, stop) by plain reads: a mapped file would count as resident memory."""
    dtype = np.dtype(dtype)
    found = np.fromfile(path, dtype, count=stop - start, offset=HEADER_BYTES + start * dtype.itemsize)
    if len(found) != stop - start:
        raise UserError(f"{path} ends before value {stop}: delete {path.parent} and prepare again")
    return found


def sha256(path: pathlib.Path) -> str:
    """Checksum of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(dtype: np.dtype, length: int) -> bytes:
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}".encode()
    return _PREFIX + text.ljust(HEADER_BYTES - len(_PREFIX) - 1) + b"\n"
