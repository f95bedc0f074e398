"""Seeds: the run seed decides the weights; the run seed and the rank decide dropout.

A rank has torch's CPU generator and its device's generator (STU layers draw their dropout seeds from it). Both are
saved per rank and restored per rank; nothing is re-derived in silence.
"""

from __future__ import annotations

import hashlib

import torch


def stream_seed(*parts: object) -> int:
    """A 62-bit seed that is a stable function of its parts (for example run seed, rank, purpose)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def seed_dropout(seed: int, rank: int, step: int = 0) -> None:
    """After the model is built: streams that differ by rank, and by the step at which other ranks take over a run."""
    torch.manual_seed(stream_seed(seed, rank, step, "dropout"))


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of this rank's streams."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(device: torch.device, state: dict[str, torch.Tensor]) -> None:
    """Put this rank's streams back. Raises ``KeyError`` if the state comes from another kind of device."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
