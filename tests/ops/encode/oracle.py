"""Problems for ops.encode and their float64 answers, written row by row from the definition."""

import dataclasses
import math

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Norm of the difference over the norm of the truth: a few roundings of the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
EPS = 1e-5


def relative_error(value, truth) -> float:
    """Norm of the difference over the norm of the truth; NaN counts as infinite, two empties as equal."""
    assert value.shape == truth.shape
    error = (value.detach().double().cpu() - truth.detach().cpu()).norm() / truth.detach().cpu().norm().clamp_min(1e-12)
    return float(torch.nan_to_num(error, nan=float("inf")))


@dataclasses.dataclass
class Problem:
    """Leaves of one call (fp32 parameters, rows in ``dtype``) and what is not differentiated."""

    leaves: dict
    places: torch.Tensor
    patterns: torch.Tensor
    positions: torch.Tensor
    times: torch.Tensor
    dtype: torch.dtype


def make_problem(events, context, width, dtype, attributes=True, patterns=9, positions=40, times=30, seed=0):
    """Random rows, joined in random order; N = events, K = context."""
    g = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE)  # noqa: E731
    pick = lambda high, n: torch.randint(high, (n,), generator=g).to(DEVICE)  # noqa: E731
    leaves = dict(content=random(events, width).to(dtype), weight=random(width), bias=random(width))
    if attributes:
        rows = (2 * random(events, width) + 1).to(dtype)
        leaves |= dict(attributes=rows, a_weight=random(width), a_bias=random(width))
    leaves |= dict(action=random(patterns, width).to(dtype))
    if context:
        leaves |= dict(context=random(context, width).to(dtype))
    leaves |= dict(position=random(positions, width), time=random(times, width))
    total = events + context
    return Problem(
        {name: tensor.requires_grad_() for name, tensor in leaves.items()},
        torch.randperm(total, generator=g).to(DEVICE),
        pick(patterns, events),
        pick(positions, total),
        pick(times, total),
        dtype,
    )


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def encode(problem, keep, ratio):
    """float64 leaves and x ``[T, D]``; ``keep`` bool ``[T, D]`` are the dropout decisions (``None``: no dropout)."""
    leaves = {k: t.detach().double().requires_grad_() for k, t in problem.leaves.items()}
    rows = layer_norm(leaves["content"], leaves["weight"], leaves["bias"])
    if "attributes" in leaves:
        rows = rows + layer_norm(leaves["attributes"], leaves["a_weight"], leaves["a_bias"])
    rows = rows + leaves["action"][problem.patterns]
    rows = torch.cat([rows, leaves["context"]]) if "context" in leaves else rows
    joined = rows[problem.places.argsort()]
    x = math.sqrt(rows.shape[1]) * joined + leaves["position"][problem.positions] + leaves["time"][problem.times]
    return leaves, x if keep is None else torch.where(keep, x / (1 - ratio), 0.0)
