"""Checks that ops share: shapes, and numbers that say where rows are.

Kernels read vectors without strides and trust sizes, offsets, counts and indices, so all of them are settled before. On
a CPU numbers are read and the error names the entry. On a GPU reading them would wait for the device: an assertion on
the device stops the stream before anything is read with them, in eager code and in a captured graph alike.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch

WHOLE_NUMBERS = (torch.int64, torch.int32)
_settled = contextvars.ContextVar("counts_settled", default=False)


def vector(name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor ``[size]`` with its elements side by side.

    Raises:
        ValueError: another shape.
    """
    if tuple(tensor.shape) != (size,):
        raise ValueError(f"{name} must be [{size}]: got {tuple(tensor.shape)}")
    return tensor.contiguous()


def matrix(name: str, tensor: torch.Tensor, columns: int, rows: int | None = None) -> torch.Tensor:
    """A tensor ``[rows, columns]`` (any number of rows for ``None``), as it came.

    Raises:
        ValueError: another shape.
    """
    if tensor.dim() != 2 or tensor.shape[1] != columns or rows not in (None, tensor.shape[0]):
        want = f"[{'*' if rows is None else rows}, {columns}]"
        raise ValueError(f"{name} must be {want}: got {tuple(tensor.shape)}")
    return tensor


def whole_numbers(name: str, tensor: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """A vector of whole numbers, ``[size]`` (any number of entries for ``None``), as it came.

    Raises:
        ValueError: another shape, or a dtype other than int64 and int32.
    """
    if tensor.dim() != 1 or size not in (None, tensor.numel()):
        want = "a vector" if size is None else f"[{size}]"
        raise ValueError(f"{name} must be {want}: got {tuple(tensor.shape)}")
    if tensor.dtype not in WHOLE_NUMBERS:
        raise ValueError(f"{name} must be int64: got {tensor.dtype}")
    return tensor


@contextlib.contextmanager
def counts_settled() -> Iterator[None]:
    """Inside, nothing is asserted on a device: for a caller that made all offsets, counts and indices from numbers that
    it has asserted itself, so that a model pays once per batch and not once per op. Hosts go on checking."""
    token = _settled.set(True)
    try:
        yield
    finally:
        _settled.reset(token)


def is_settled() -> bool:
    """Whether the caller has settled what would be asserted on a device."""
    return not torch.compiler.is_compiling() and _settled.get()  # a compiled graph may be called from anywhere


def assert_on_device(ok: torch.Tensor, message: str) -> None:
    """Stop the device's stream if ``ok``, one truth value on it, is false; the host goes on at once.

    The message goes to stderr, and the host's next look at the device raises. Nothing behind it on the stream runs.
    """
    if ok.device.type != "meta":
        torch._assert_async(ok, message)


def check_sequences(
    offsets: torch.Tensor,
    rows: int | None,
    longest: int | None = None,
    num_targets: torch.Tensor | None = None,
    prefix: int = 0,
    name: str = "seq_offsets",
) -> None:
    """Offsets, and candidates at the ends of the sequences, must be of T rows.

    Args:
        offsets: int64 ``[B + 1]``, rising from 0 to ``rows``.
        rows: T, ``None`` if unknown. longest: most rows of a sequence, ``None`` for any number.
        num_targets: int64 ``[B]``, from 0 to what the sequence has behind its prefix; ``None`` for none.
        prefix: contextual rows at the start of every sequence (a sequence that is shorter consists of them).
        name: of the offsets, for messages.

    Raises:
        ValueError: shapes and dtypes; on a host also numbers that do not fit.
    """
    batch = whole_numbers(name, offsets).numel() - 1
    if batch < 0:
        raise ValueError(f"{name} must be [B + 1]: got no entry")
    if num_targets is not None:
        whole_numbers("num_targets", num_targets, batch)
    if _on_host(offsets) and (num_targets is None or _on_host(num_targets)):
        _check_sequences_on_host(offsets, rows, longest, num_targets, prefix, name)
    elif not is_settled():
        _assert_sequences(offsets, rows, longest, num_targets, prefix, name)


def check_counts(name: str, counts: torch.Tensor) -> None:
    """Counts ``[n]`` must be whole numbers, none below 0."""
    if _on_host(whole_numbers(name, counts)):
        _name_first(counts < 0, counts, name, "a count is 0 or more")
    elif counts.numel() and not is_settled():
        assert_on_device(counts.min() >= 0, f"{name}: a count is below 0")


def check_indices(name: str, indices: torch.Tensor, end: int | None = None) -> None:
    """Whole numbers ``[n]`` must lie from 0 up to ``end`` - 1 (any number up from 0 for ``None``)."""
    limit = "0 or more" if end is None else f"0 or more and below {end}"
    if _on_host(whole_numbers(name, indices)):
        bad = indices < 0 if end is None else (indices < 0) | (indices >= end)
        _name_first(bad, indices, name, f"it must be {limit}")
    elif indices.numel() and not is_settled():
        least, most = indices.aminmax()
        assert_on_device(least >= 0 if end is None else (least >= 0) & (most < end), f"{name} must be {limit}")


def check_permutation(name: str, indices: torch.Tensor, size: int) -> None:
    """Whole numbers ``[size]`` must hold each of 0 … ``size`` - 1 exactly once."""
    check_indices(name, whole_numbers(name, indices, size), size)
    check_distinct(name, indices, size, f"{name} must hold each of 0 … {size - 1} exactly once")


def check_distinct(name: str, indices: torch.Tensor, end: int, message: str | None = None) -> None:
    """Indices below ``end`` (``check_indices``) must be distinct."""
    on_host = _on_host(indices)
    if not on_host and is_settled():
        return
    times = torch.zeros(end, dtype=torch.int32, device=indices.device)
    times.index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))
    ok, message = (times <= 1).all(), message or f"{name} must be distinct"
    if not on_host:
        assert_on_device(ok, message)
    elif not ok:
        raise ValueError(message)


def _on_host(*tensors: torch.Tensor) -> bool:
    """Whether the values can be read without waiting for a device."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _name_first(bad: torch.Tensor, values: torch.Tensor, name: str, rule: str) -> None:
    """Raise for the first entry that is bad."""
    if bool(bad.any()):
        number = int(bad.int().argmax())
        raise ValueError(f"{name}[{number}] is {int(values[number])}: {rule}")


def _check_sequences_on_host(offsets, rows, longest, num_targets, prefix, name) -> None:
    lengths = offsets.diff()
    rows = int(offsets[-1]) if rows is None else rows
    if int(offsets[0]) != 0 or int(offsets[-1]) != rows or bool((lengths < 0).any()):
        raise ValueError(f"{name} must rise from 0 to the number of rows ({rows}): got {_begin(offsets)}")
    most = int(lengths.max()) if lengths.numel() else 0
    if longest is not None and most > longest:
        raise ValueError(f"max_seq_len={longest} is shorter than the longest sequence ({most}); raise it")
    if num_targets is None:
        return
    bad = (num_targets < 0) | (num_targets > (lengths - prefix).clamp_min(0))
    if not bool(bad.any()):
        return
    number = int(bad.int().argmax())
    length = int(lengths[number])
    has = f"{length} row{'s' * (length != 1)}" + (f", {prefix} of them contextual" if prefix else "")
    raise ValueError(
        f"num_targets[{number}] is {int(num_targets[number])} but sequence {number} has {has}: "
        f"0 to {max(length - prefix, 0)} candidates fit"
    )


def _begin(values: torch.Tensor) -> str:
    return f"{values.tolist()[:8]}{'...' if values.numel() > 8 else ''}"


def _assert_sequences(offsets, rows, longest, num_targets, prefix, name) -> None:
    """What the host would have read, in few launches: every term of ``room`` must be 0 or more."""
    ends = offsets[0] == 0
    if rows is not None:
        ends = ends & (offsets[-1] == rows)
    assert_on_device(ends, f"{name} must rise from 0 to the number of rows ({rows})")
    if offsets.numel() == 1:
        return
    lengths = offsets.diff()
    room = [lengths]
    if num_targets is not None:
        num_targets = num_targets.to(offsets.device)
        behind = (lengths - prefix).clamp_min(0) if prefix else lengths
        room += [num_targets, behind - num_targets]
    if longest is not None:
        room.append(longest - lengths)
    message = (
        f"{name} fall, or a sequence has more than {longest} rows, or num_targets does not fit its sequence behind "
        f"{prefix} contextual rows"
    )
    assert_on_device(torch.cat(room).min() >= 0, message)
