"""The processes of a run: who this one is, its device, and the few exchanges the trainer makes itself.

There is always a process group, also for a single process, so that TorchRec takes one path. Tensors on the device go
through NCCL (gloo on CPUs); Python objects and metrics on the host go through a gloo group of their own.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from generative_recommenders import settings
from generative_recommenders.errors import UserError

#: How long an exchange waits for the other ranks.
TIMEOUT = datetime.timedelta(minutes=30)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the others: ``rank`` of ``size`` on ``device``; ``host_group`` exchanges host memory."""

    rank: int
    size: int
    device: torch.device
    host_group: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.host_group)

    def gather(self, value: object) -> list:
        """Every rank's (picklable) value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """Do some work on every rank; what stops one stops all. A collective call.

        Raises:
            UserError, OSError: on every rank, that of the first rank that raised one.
        """
        results: list[T] = []
        problem: UserError | OSError | None = None
        try:
            results.append(work())
        except (UserError, OSError) as exc:
            problem = exc
        problems = [exc for exc in self.gather(problem) if exc is not None]
        if problems:
            raise problems[0]
        return results[0]

    def sum_on_host(self, *values: int) -> list[int]:
        """Each value summed over the ranks, through host memory (no device synchronisation)."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(sums, group=self.host_group)
        return sums.tolist()

    def concatenate(self, tensor: torch.Tensor) -> torch.Tensor:
        """One-dimensional host tensors of all ranks (any lengths), joined in rank order, on every rank."""
        if self.size == 1:
            return tensor
        lengths = self.gather(tensor.numel())
        padded = torch.zeros(max(lengths), dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.host_group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def launched_rank() -> int:
    """This process's rank as the launcher says, before any group exists (0 without a launcher)."""
    return settings.get("RANK") or 0


def launched_size() -> int:
    """How many processes the launcher says there are (1 without a launcher).

    Raises:
        UserError: the launcher's variables do not fit together.
    """
    rank, size = settings.get("RANK"), settings.get("WORLD_SIZE")
    if (rank is None) != (size is None):
        raise UserError("RANK and WORLD_SIZE: only one of them is set; start with torchrun, or unset it")
    if rank is None:
        return 1
    if rank >= size:
        raise UserError(f"RANK={rank}: must be below WORLD_SIZE={size}; start with torchrun, or unset both")
    if not settings.is_set("MASTER_ADDR") or not settings.is_set("MASTER_PORT"):
        raise UserError("RANK and WORLD_SIZE are set, MASTER_ADDR or MASTER_PORT is not; start with torchrun, or unset")
    return size


def choose_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` → this process's device.

    Raises:
        UserError: unknown name, or CUDA asked for where there is none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name!r}: expected auto, cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count == 0:
        build = "this torch build has no CUDA" if torch.version.cuda is None else "no GPU is visible"
        raise UserError(f"--device cuda: not available, {build}; use --device cpu, or install requirements/gpu.txt")
    if name == "cpu" or count == 0:
        return torch.device("cpu")
    local_rank = settings.get("LOCAL_RANK") or 0
    if local_rank >= count:
        raise UserError(f"LOCAL_RANK={local_rank}: this host shows {count} GPUs; start at most {count} processes on it")
    return torch.device("cuda", local_rank)


def join(device: torch.device, store: dist.Store | None = None) -> World:
    """Join the process group that the launcher set up (over ``store``, if given), or make one of this process."""
    rank, size = launched_rank(), launched_size()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None and settings.get("RANK") is None:
        store = dist.HashStore()
    if store is not None:
        store.set_timeout(TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    host_group: Any = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=TIMEOUT)
    return World(rank, size, device, host_group)


def leave(world: World) -> None:
    """Leave the group together. Callers drop model and optimizers first.

    Their communicators must be gone before the group is, or an interpreter may abort at exit.
    """
    gc.collect()
    if world.size > 1:
        world.barrier()
    dist.destroy_process_group()
