"""Problems and a float64 oracle for the LMSD tests; the oracle is plain autograd, independent of the package."""

import dataclasses

import pytest
import torch

# Norm of the difference over the norm of the oracle: a few roundings of the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass
class Problem:
    x: torch.Tensor
    u: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    groups: int

    @property
    def tensors(self):
        return self.x, self.u, self.weight, self.bias


def make_problem(rows, columns, dtype=torch.float32, groups=1, padded=False, device=DEVICE, seed=0) -> Problem:
    """Random inputs; ``padded`` makes x and u column blocks of wider buffers, as in a fused projection."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    x = random(rows, 3 * columns)[:, columns : 2 * columns] if padded else random(rows, columns)
    u = random(rows, 2 * columns)[:, :columns] if padded else random(rows, columns)
    parameters = columns if groups == 1 else groups
    return Problem(x, u, random(parameters), random(parameters), groups)


def oracle(problem, mask, ratio, eps=1e-6, silu=True, concat_u=True, concat_x=True):
    """float64 leaves and the differentiable result, with dropout decisions from ``mask``."""
    leaves = [t.detach().double().requires_grad_() for t in problem.tensors]
    x, u, weight, bias = leaves
    rows, columns = x.shape
    grouped = x.reshape(rows, problem.groups, columns // problem.groups)
    centred = grouped - grouped.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    spread = columns // weight.numel()
    ell = normed.reshape(rows, columns) * weight.repeat_interleave(spread) + bias.repeat_interleave(spread)
    a = torch.nn.functional.silu(u) if silu else u
    drop = lambda v, bit: v if mask is None else v * (mask >> bit & 1).double() / (1 - ratio)  # noqa: E731
    parts = ([drop(a, 2)] if concat_u else []) + ([drop(x, 1)] if concat_x else []) + [drop(ell * a, 0)]
    return leaves, torch.cat(parts, 1)


def relative_error(value, truth) -> float:
    """Norm of the difference over the norm of the truth; NaN counts as infinite, two empties as equal."""
    assert value.shape == truth.shape
    error = (value.detach().double() - truth.detach()).norm() / truth.detach().norm().clamp_min(1e-12)
    return float(torch.nan_to_num(error, nan=float("inf")))


@pytest.fixture
def lmsd_tools():
    """``make_problem``, ``oracle``, ``relative_error``, ``check_pair``, ``TOLERANCE`` and ``DEVICE``."""
    import types

    return types.SimpleNamespace(
        make_problem=make_problem,
        oracle=oracle,
        relative_error=relative_error,
        check_pair=check_pair,
        TOLERANCE=TOLERANCE,
        DEVICE=DEVICE,
    )


def check_pair(problem, backend, ratio=0.1, seed=0x1234_5678_9ABC, row_indices=None, compute_dweight=True, **flags):
    """Forward and backward of the explicit pair against the oracle; the mask against the reference, bit for bit."""
    from generative_recommenders.ops.lmsd import hstu_lmsd_backward, hstu_lmsd_forward, reference

    common = {"dropout_ratio": ratio, "backend": backend, "num_groups": problem.groups, **flags}
    saved = hstu_lmsd_forward(*problem.tensors, seed=seed, row_indices=row_indices, **common)
    y, mean, rstd, mask = saved
    rows, columns = problem.x.shape
    concat = flags.get("concat_u", True), flags.get("concat_x", True)
    if ratio > 0:
        numbers = torch.arange(rows, device=y.device) if row_indices is None else row_indices
        assert torch.equal(mask, reference.draw_mask(numbers.long(), columns, seed, ratio, *concat))
    else:
        assert mask is None
    named = {"apply_u_silu": "silu"}
    leaves, truth = oracle(problem, mask, ratio, **{named.get(k, k): v for k, v in flags.items()})
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)
    config = {"apply_u_silu": True, "concat_u": True, "concat_x": True} | common
    grads = hstu_lmsd_backward(dy, *problem.tensors, mean, rstd, mask, compute_dweight=compute_dweight, **config)
    wanted = torch.autograd.grad(truth, leaves, dy.double(), allow_unused=True)
    tolerance = TOLERANCE[problem.x.dtype]
    assert y.dtype == problem.x.dtype
    assert relative_error(y, truth) < tolerance
    assert (grads.dweight_tensor is None) == (not compute_dweight)
    for name, grad, right in zip(grads.keys(), grads, wanted, strict=True):
        if grad is not None:
            assert relative_error(grad, right) < 3 * tolerance, name
