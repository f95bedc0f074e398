"""Before any work: the ranks of a run find each other and compare what each of them was started with.

It goes through the launcher's key-value store, before there are communicators. Each rank leaves its statement, or the
problem it ends for; rank 0 reads them all and leaves a verdict. So a rank that cannot begin stops all of them at once,
and one that never comes stops them after ``HSTU_JOIN_SECONDS``.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.train.agreement import Statement, difference, ranks_in_words
from generative_recommenders.train.distributed import launched_size

#: What rank 0 gives the others beyond its own limit to hear its verdict, and they it to hear of theirs.
MARGIN_SECONDS = 10.0


class NotMet(UserError):
    """Rank 0 was not heard, so this rank must speak for itself."""


def meet(said: Statement, problem: str | None = None) -> dist.Store | None:
    """Compare ``said`` over all ranks, or tell them the ``problem`` for which this one ends; a collective call.

    Returns:
        The store on which to build the process group; ``None`` for a run of a single process.

    Raises:
        UserError: on every rank: a rank has a problem, was started with other settings, or did not come in time.
    """
    size = launched_size()
    if size == 1:
        if problem is not None:
            raise UserError(problem)
        return None
    rank, limit = settings.get("RANK"), settings.get("HSTU_JOIN_SECONDS")
    try:
        store = _find_store(rank, limit)
        store.set(f"statement/{rank}", json.dumps({"size": size, "problem": problem, "said": dict(said)}))
        if rank == 0:
            verdict = _judge(store, size, limit)
            store.set("verdict", json.dumps(verdict))
        else:
            store.wait(["verdict"], datetime.timedelta(seconds=limit + MARGIN_SECONDS))
            verdict = json.loads(store.get("verdict"))
            store.add("heard", 1)
    except (dist.DistError, RuntimeError) as exc:
        if problem is not None:
            raise NotMet(problem) from None
        place = f"{settings.get('MASTER_ADDR')}:{settings.get('MASTER_PORT')}"
        reason = str(exc).strip().splitlines()[0]
        raise NotMet(
            f"rank {rank} of {size}: did not meet rank 0 at {place} within {limit:g} s (HSTU_JOIN_SECONDS): see what "
            f"rank 0 said, or why it was not started ({reason[:200]})"
        ) from None
    if verdict is None:
        return store
    if rank == 0:
        _let_others_hear(store, size)
    raise UserError(verdict)


def _find_store(rank: int, limit: float) -> dist.Store:
    """The launcher's store, or one that rank 0 opens."""
    # The size only decides for how many rank 0 waits in here: for itself. _judge waits for all, and can name them.
    rendezvous = dist.rendezvous("env://", rank, 1, timeout=datetime.timedelta(seconds=limit))
    return dist.PrefixStore("meeting", next(rendezvous)[0])


def _judge(store: dist.Store, size: int, limit: float) -> str | None:
    """What stands against beginning, by all ranks' statements, or ``None``."""
    deadline = time.monotonic() + limit
    statements = []
    for rank in range(size):
        try:
            left = max(deadline - time.monotonic(), 0.01)
            store.wait([f"statement/{rank}"], datetime.timedelta(seconds=left))
        except dist.DistError:
            missing = [r for r in range(size) if not store.check([f"statement/{r}"])]
            return (
                f"{ranks_in_words(missing)} of {size} did not come within {limit:g} s (HSTU_JOIN_SECONDS): see what "
                "was said there, or why it was not started"
            )
        found = json.loads(store.get(f"statement/{rank}"))
        if found["size"] != size:
            return f"WORLD_SIZE = {size} on rank 0, {found['size']} on rank {rank}; start every rank with the same"
        statements.append(found)
    return _problem([found["problem"] for found in statements]) or _unlike([found["said"] for found in statements])


def _problem(problems: Sequence[str | None]) -> str | None:
    """The first problem, and whose it is unless every rank has it."""
    first = next((problem for problem in problems if problem is not None), None)
    ranks = [rank for rank, problem in enumerate(problems) if problem == first]
    return first if first is None or len(ranks) == len(problems) else f"{ranks_in_words(ranks)}: {first}"


def _unlike(statements: Sequence[Statement]) -> str | None:
    found = difference(statements)
    if found is None:
        return None
    return f"ranks were started with different settings: {found}; start every rank with the same command and code"


def _let_others_hear(store: dist.Store, size: int) -> None:
    """Wait a little: where rank 0 has opened the store itself, it goes when rank 0 does."""
    deadline = time.monotonic() + MARGIN_SECONDS
    came = sum(store.check([f"statement/{rank}"]) for rank in range(1, size))
    while store.add("heard", 0) < came and time.monotonic() < deadline:
        time.sleep(0.05)
