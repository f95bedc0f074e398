"""First values of embedding tables: a pure function of (seed, table name, row, column).

A value does not depend on who asks for it or in which order, so every sharding plan, device and rank count starts from
the same table, and a rank fills only the rows (and columns) that it owns.

The random number of element ``i = row · columns + column`` is word i of the SplitMix64 sequence of the table's seed
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): the seed plus i + 1 times the golden gamma,
mixed. Its top 24 bits make a uniform multiple of 2⁻²³ in [−1, 1).
"""

from __future__ import annotations

import hashlib
import math

import torch

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
CHUNK_ELEMENTS = 1 << 22  # temporary int64 memory of one step: 32 MiB


def table_seed(seed: int, table_name: str) -> int:
    """The table's own 64-bit seed: a stable hash of the run's seed and the name (the same in every process)."""
    digest = hashlib.blake2b(f"{seed}/{table_name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def fill_table_rows_(
    out: torch.Tensor,
    seed: int,
    table_name: str,
    num_rows: int,
    num_columns: int | None = None,
    first_row: int = 0,
    first_column: int = 0,
) -> torch.Tensor:
    """Fill a block of a table with its first values, in place: U(±1/sqrt(num_rows)).

    Args:
        out: ``[rows, columns]``, the block, any float dtype and device (values are computed in fp32, then cast).
        seed: the run's seed.
        table_name: the table's name.
        num_rows: rows of the whole table.
        num_columns: columns of the whole table; ``None`` if the block has all of them.
        first_row, first_column: where the block starts.

    Returns:
        ``out``.

    Raises:
        ValueError: the block does not lie inside the table.
    """
    num_columns = out.shape[1] if num_columns is None else num_columns
    last_row, last_column = first_row + out.shape[0], first_column + out.shape[1]
    if not (0 <= first_row <= last_row <= num_rows and 0 <= first_column <= last_column <= num_columns):
        raise ValueError(
            f"table {table_name!r} is {num_rows} x {num_columns}: rows {first_row}..{last_row}, columns "
            f"{first_column}..{last_column} are not inside it"
        )
    bound = 1.0 / math.sqrt(num_rows)
    base = table_seed(seed, table_name)
    columns = torch.arange(first_column, last_column, device=out.device)
    step = max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    with torch.no_grad():
        for start in range(0, out.shape[0], step):
            stop = min(start + step, out.shape[0])
            rows = torch.arange(first_row + start, first_row + stop, device=out.device)
            out[start:stop] = uniform_at(base, rows[:, None] * num_columns + columns) * bound
    return out


def uniform_at(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Words ``index`` (int64, any shape) of the SplitMix64 sequence of ``seed``, as fp32 in [−1, 1)."""
    z = (index + 1) * _signed(GOLDEN_GAMMA) + _signed(seed)  # int64 products wrap, as the generator wants
    for shift, factor in MIX:
        z = (z ^ _shift_right(z, shift)) * _signed(factor)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 40).float() * 2.0**-23 - 1.0


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
