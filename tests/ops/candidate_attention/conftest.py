"""Cases and an independent float64 oracle: the whole HSTU attention layer front on all rows, sequence by sequence."""

import dataclasses

import pytest
import torch

from generative_recommenders.ops.attention import Projection

NAMES = ("own", "u", "attention", "dx", "d_norm_weight", "d_norm_bias", "d_weight", "d_bias")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call: lengths and candidates per sequence, D, H, d_qk, d_v."""

    lengths: tuple
    targets: tuple
    width: int = 32
    heads: int = 2
    qk: int = 8
    v: int = 16
    norm: float = 40.0

    def inputs(self, dtype=torch.float64, seed=0):
        """x, offsets, targets, the four parameters, and output gradients; row means far from zero."""
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
        columns, rows, count = 2 * self.heads * (self.qk + self.v), sum(self.lengths), sum(self.targets)
        x = draw(rows, self.width) + 0.7
        parameters = [
            1 + 0.2 * draw(self.width),
            0.2 * draw(self.width),
            draw(self.width, columns) * self.width**-0.5,
            0.2 * draw(columns),
        ]
        grads = [draw(count, self.width), draw(count, self.heads * self.v), 10 * draw(count, self.heads * self.v)]
        offsets = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()] if self.lengths else [0])
        cast = lambda tensors: [t.to(dtype) for t in tensors]  # noqa: E731
        return x.to(dtype), offsets, torch.tensor(self.targets, dtype=torch.int64), cast(parameters), cast(grads)

    @property
    def shape(self):
        """The op's arguments behind the parameters."""
        return Projection(self.heads, self.qk, self.v), self.qk**-0.5, self.norm


def oracle(case, x, offsets, targets, parameters):
    """Every row of the layer, with the dense causal target-aware mask; then the candidates' rows."""
    norm_weight, norm_bias, weight, bias = parameters
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).square().mean(1, keepdim=True)
    n = (x - mean) / (variance + 1e-6).sqrt() * norm_weight + norm_bias
    h = case.heads
    u, v, q, k = (n @ weight + bias).split([h * case.v, h * case.v, h * case.qk, h * case.qk], dim=1)
    attention, rows = [], []
    for b, (length, count) in enumerate(zip(case.lengths, case.targets, strict=True)):
        at = slice(int(offsets[b]), int(offsets[b]) + length)
        qs, ks, vs = (t[at].unflatten(1, (h, -1)).transpose(0, 1) for t in (q, k, v))
        scores = qs @ ks.transpose(1, 2) * case.qk**-0.5
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = (j <= i) & ((j < length - count) | (i == j))
        a = scores * torch.sigmoid(scores) / case.norm * seen
        attention.append((a @ vs).transpose(0, 1).flatten(1))
        rows += range(at.stop - count, at.stop)
    rows = torch.tensor(rows, dtype=torch.int64)
    out = torch.cat(attention) if attention else u
    return x[rows], u[rows], out[rows]


def outputs_and_gradients(function, x, parameters, grads):
    """Outputs of ``function(x, parameters)`` and gradients of x and the parameters, all float64."""
    x = x.detach().clone().requires_grad_()
    parameters = [p.detach().clone().requires_grad_() for p in parameters]
    outputs = function(x, parameters)
    torch.autograd.backward(outputs, grads)
    return [t.detach().double() for t in outputs] + [t.grad.double() for t in (x, *parameters)]


def relative_errors(got, want):
    """Name → ‖got − want‖ / ‖want‖; NaN where anything is not finite."""
    errors = {}
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.shape == b.shape, name
        errors[name] = ((a - b).norm() / b.norm().clamp_min(1e-30)).item() if torch.isfinite(a).all() else float("nan")
    return errors


CASES = {
    "one target": Case((5, 33, 1, 20), (1, 1, 1, 1)),
    "no history": Case((1, 1, 1), (1, 1, 1)),
    "several": Case((9, 4, 30, 3, 17), (2, 0, 5, 3, 11)),
    "all candidates": Case((4, 7), (4, 7)),
    "more than one operand holds": Case((40,), (25,), heads=3),
    "odd sizes": Case((7, 21, 4), (0, 1, 2), width=48, heads=3, qk=5, v=7),
    "no candidates": Case((6, 2), (0, 0)),
    "empty sequences": Case((0, 3, 0), (0, 1, 0)),
    "no rows": Case((0, 0), (0, 0)),
    "empty batch": Case((), ()),
    "one head": Case((18, 18), (1, 1), width=16, heads=1, qk=16, v=8),
}


@pytest.fixture(params=list(CASES), ids=[name.replace(" ", "-") for name in CASES])
def case(request):
    return CASES[request.param]
