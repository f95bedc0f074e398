"""Shared by the attention tests: seeded cases, and attention written out in float64 from the mask's definition."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Mask:
    """One line of the table of masks; ``targets`` is "none", "one", "many" or "all" candidates per sequence."""

    name: str
    targets: str = "none"
    window: int = 0
    context: int = 0
    causal: bool = True


MASKS = (
    Mask("causal"),
    Mask("one_target", "one"),
    Mask("many_targets", "many"),
    Mask("only_candidates", "all"),
    Mask("window", "none", window=5),
    Mask("window_targets", "many", window=9),
    Mask("contextual", "none", context=4),
    Mask("contextual_targets", "many", context=3),
    Mask("everything", "many", window=6, context=3),
    Mask("both_ways", "many", causal=False),
    Mask("both_ways_window", "one", window=4, causal=False),
)


@dataclasses.dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    offsets: torch.Tensor
    num_targets: torch.Tensor | None
    mask: Mask

    def mask_arguments(self) -> dict:
        return dict(
            num_targets=self.num_targets,
            causal=self.mask.causal,
            max_attn_len=self.mask.window,
            contextual_seq_len=self.mask.context,
        )

    @property
    def longest(self) -> int:
        return int(self.offsets.diff().max()) if self.offsets.numel() > 1 else 0


def targets_of(lengths: list[int], kind: str, context: int, generator: torch.Generator) -> torch.Tensor | None:
    """How many candidates each sequence ends with; contextual rows are never candidates."""
    if kind == "none":
        return None
    counts = []
    for length in lengths:
        room = max(length - context, 0)
        drawn = int(torch.randint(0, room + 1, (1,), generator=generator)) if kind == "many" else 1
        counts.append(length if kind == "all" else min(drawn, room))
    return torch.tensor(counts, dtype=torch.int64)


def make_case(lengths, heads, d_qk, d_v, dtype, mask, device="cpu", seed=0, fused=True) -> Case:
    """Random q, k, v (slices of one fused buffer unless told otherwise) that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    width = 2 * heads * (d_qk + d_v)
    buffer = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(device, dtype)
    dout = torch.randn(rows, heads, d_v, generator=generator, dtype=torch.float64).to(device, dtype)
    _, v, q, k = buffer.split([heads * d for d in (d_v, d_v, d_qk, d_qk)], dim=1)
    views = [t.unflatten(1, (heads, -1)) for t in (q, k, v)]
    if not fused:
        views = [t.contiguous() for t in views]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    targets = targets_of(lengths, mask.targets, mask.context, generator)
    return Case(
        *(t.detach().requires_grad_() for t in views),
        dout,
        offsets,
        None if targets is None else targets.to(device),
        mask,
    )


def sees(i: int, j: int, length: int, candidates: int, mask: Mask) -> bool:
    """The mask's definition, one pair of rows at a time."""
    c = mask.context
    id_max = (length - c + 1 if c > 0 else length) - candidates
    number = lambda r: min(max(r - c + 1, 0) if c > 0 else r, id_max)  # noqa: E731
    a, b = number(i), number(j)
    if i == j:
        return True
    if c > 0 and a == 0 and b < id_max:
        return True
    distance = a - b if mask.causal else abs(a - b)
    return distance > 0 and (mask.window == 0 or distance <= mask.window)


def visible(length: int, candidates: int, mask: Mask) -> torch.Tensor:
    """bool [length, length]; vectorised form of ``sees`` (the tests hold the two together)."""
    c, rows = mask.context, torch.arange(length)
    id_max = (length - c + 1 if c > 0 else length) - candidates
    ids = torch.minimum((rows - c + 1).clamp(min=0) if c > 0 else rows, torch.tensor(id_max))
    a, b = ids[:, None], ids[None, :]
    seen = a > b if mask.causal else a != b
    if mask.window > 0:
        seen = seen & ((a - b).abs() <= mask.window)
    if c > 0:
        seen = seen | ((a == 0) & (b < id_max))
    return seen | (rows[:, None] == rows[None, :])


def attention_by_rows(case: Case, alpha: float, norm: float) -> torch.Tensor:
    """float64 attention, sequence by sequence and head by head, differentiable in the case's q, k, v."""
    q, k, v = (t.double() for t in (case.q, case.k, case.v))
    outputs = [case.v.double()[:0]]
    bounds = case.offsets.tolist()
    for index, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        candidates = 0 if case.num_targets is None else int(case.num_targets[index])
        keep = visible(end - start, candidates, case.mask).to(q.device)
        heads = []
        for h in range(q.shape[1]):
            x = alpha * (q[start:end, h] @ k[start:end, h].T)
            weights = torch.where(keep, x / (1 + torch.exp(-x)) / norm, 0.0)
            heads.append(weights @ v[start:end, h])
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)
