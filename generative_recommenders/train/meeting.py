"""Before any work: the ranks of a run find each other and compare what each of them was started with.

It goes through the launcher's key-value store, before there are communicators. Each rank leaves its statement, or the
problem it ends for; rank 0 reads them all and leaves a verdict. So a rank that cannot begin stops all of them at once,
and one that never comes stops them after ``HSTU_JOIN_SECONDS``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
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
    own = {"size": size, "problem": problem, "said": dict(said), "nonce": secrets.token_hex(8)}
    try:
        store = _find_store(rank, limit)
        token, verdict = _lead(store, own, limit) if rank == 0 else _follow(store, rank, own, limit + MARGIN_SECONDS)
    except (dist.DistError, RuntimeError) as exc:
        if problem is not None:
            raise NotMet(problem) from None
        place = f"{settings.get('MASTER_ADDR')}:{settings.get('MASTER_PORT')}"
        reason = str(exc).strip().splitlines()[0]
        raise NotMet(
            f"rank {rank} of {size}: did not meet rank 0 at {place} within {limit:g} s (HSTU_JOIN_SECONDS): see what "
            f"rank 0 said, or why it was not started ({reason[:200]})"
        ) from None
    if verdict is not None:
        raise UserError(verdict)
    return dist.PrefixStore(token, store)


def _find_store(rank: int, limit: float) -> dist.Store:
    """The launcher's store, or one that rank 0 opens."""
    # The size only decides for how many rank 0 waits in here: for itself. _judge waits for all, and can name them.
    rendezvous = dist.rendezvous("env://", rank, 1, timeout=datetime.timedelta(seconds=limit))
    return next(rendezvous)[0]


def _lead(store: dist.Store, own: dict, limit: float) -> tuple[str, str | None]:
    """Rank 0's part: a new token for this attempt, everyone's statement, a verdict (``None``: begin)."""
    # An elastic launcher's store outlives the processes: what an earlier attempt left in it must not be taken for news.
    token = secrets.token_hex(8)
    store.set("round", token)
    store.set(f"{token}/statement/0", json.dumps(own))
    statements, verdict = _judge(store, token, own["size"], limit)
    nonces = [found["nonce"] for found in statements]
    store.set(f"{token}/verdict", json.dumps({"verdict": verdict, "nonces": nonces}))
    deadline = time.monotonic() + MARGIN_SECONDS
    if verdict is not None:  # where rank 0 has opened the store itself, it goes when rank 0 does
        while store.add(f"{token}/heard", 0) < len(statements) - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    return token, verdict


def _follow(store: dist.Store, rank: int, own: dict, limit: float) -> tuple[str, str | None]:
    """Another rank's part: token and verdict of the attempt in which rank 0 has heard this very process."""
    deadline, token = time.monotonic() + limit, None
    while True:
        left = max(deadline - time.monotonic(), 0.01)
        store.wait(["round"], datetime.timedelta(seconds=left))
        current = store.get("round").decode()
        if current != token:
            token = current
            store.set(f"{token}/statement/{rank}", json.dumps(own))
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{token}/verdict"], datetime.timedelta(seconds=min(left, 1.0)))
            found = json.loads(store.get(f"{token}/verdict"))
            if own["nonce"] in found["nonces"]:
                store.add(f"{token}/heard", 1)
                return token, found["verdict"]
            time.sleep(0.1)  # an earlier attempt's: rank 0 has not begun this one yet
        if time.monotonic() > deadline:
            raise RuntimeError("no answer")


def _judge(store: dist.Store, token: str, size: int, limit: float) -> tuple[list[dict], str | None]:
    """The ranks' statements, and what stands against beginning, or ``None``."""
    deadline = time.monotonic() + limit
    statements: list[dict] = []
    for rank in range(size):
        try:
            left = max(deadline - time.monotonic(), 0.01)
            store.wait([f"{token}/statement/{rank}"], datetime.timedelta(seconds=left))
        except dist.DistStoreError:
            there = [store.check([f"{token}/statement/{r}"]) for r in range(size)]
            missing = ranks_in_words([r for r in range(size) if not there[r]])
            came = [json.loads(store.get(f"{token}/statement/{r}")) for r in range(size) if there[r]]
            return came, (
                f"{missing} of {size} did not come within {limit:g} s (HSTU_JOIN_SECONDS): see what was said there, or "
                "why it was not started"
            )
        statements.append(json.loads(store.get(f"{token}/statement/{rank}")))
    sizes = [str(found["size"]) for found in statements]
    differs = difference([{"WORLD_SIZE": size} for size in sizes])
    if differs is not None:
        return statements, f"{differs}; start every rank with the same number of ranks"
    problem = _problem([found["problem"] for found in statements])
    return statements, problem or _unlike([found["said"] for found in statements])


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
