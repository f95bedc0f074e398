"""The differentiable op: gradients of odd upstreams, opcheck, compile, second derivatives."""

import itertools

import pytest
import torch

from generative_recommenders.ops.lmsd import hstu_lmsd, hstu_lmsd_forward

FLAGS = [
    dict(zip(("apply_u_silu", "concat_u", "concat_x"), values, strict=True))
    for values in itertools.product((True, False), repeat=3)
]
LOSSES = {
    "sum": lambda y: y.sum(),  # expanded gradient, strides 0
    "slice": lambda y: (y[:, 8:40] ** 2).sum(),
    "transposed": lambda y: (y.t().contiguous() * torch.arange(y.shape[0], device=y.device)).sum(),
    "rows": lambda y: y[::2].pow(2).sum(),
}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_upstream_gradients(lmsd_tools, backend, loss, rows):
    problem = lmsd_tools.make_problem(rows, 32, padded=True)
    leaves = [t.detach().requires_grad_() for t in problem.tensors]
    y = hstu_lmsd(*leaves, dropout_ratio=0.2, seed=3, backend=backend)
    grads = torch.autograd.grad(LOSSES[loss](y), leaves)
    mask = hstu_lmsd_forward(*problem.tensors, dropout_ratio=0.2, seed=3, backend="PYTORCH").mask_tensor
    doubles, truth = lmsd_tools.oracle(problem, mask, 0.2)
    for grad, wanted in zip(grads, torch.autograd.grad(LOSSES[loss](truth), doubles), strict=True):
        assert lmsd_tools.relative_error(grad, wanted) < 1e-5
    if rows == 0:
        assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_strides_a_kernel_cannot_address_are_copied(lmsd_tools, backend):
    problem = lmsd_tools.make_problem(6, 16)
    odd = torch.randn(6, 33, device=lmsd_tools.DEVICE)[:, 1:17].requires_grad_()
    turned = torch.randn(16, 6, device=lmsd_tools.DEVICE).t().requires_grad_()
    y = hstu_lmsd(odd, turned, problem.weight, problem.bias, seed=1, backend=backend)
    straight = hstu_lmsd(odd.contiguous(), turned.contiguous(), problem.weight, problem.bias, seed=1, backend=backend)
    assert torch.equal(y, straight)
    grads = torch.autograd.grad(y.square().sum(), (odd, turned))
    for grad, wanted in zip(grads, torch.autograd.grad(straight.square().sum(), (odd, turned)), strict=True):
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_only_some_inputs_need_gradients(lmsd_tools, backend):
    problem = lmsd_tools.make_problem(5, 16)
    weight = problem.weight.requires_grad_()
    full = torch.autograd.grad(hstu_lmsd(*problem.tensors, backend=backend).square().sum(), weight)[0]
    x = problem.x.detach().requires_grad_()
    y = hstu_lmsd(x, problem.u, weight.detach(), problem.bias, backend=backend)
    y.square().sum().backward()  # no weight gradient is asked for
    assert x.grad is not None and full.shape == weight.shape


@pytest.mark.parametrize(
    "flags,ratio,groups", [(flags, 0.4, 1) for flags in FLAGS] + [(FLAGS[0], 0.0, 1), (FLAGS[0], 0.4, 2)]
)
def test_first_and_second_derivatives(flags, ratio, groups):
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    torch.manual_seed(3)
    parameters = 8 if groups == 1 else groups
    inputs = (random(2, 8), random(2, 8), random(parameters), random(parameters))
    run = lambda *t: hstu_lmsd(*t, dropout_ratio=ratio, seed=2, num_groups=groups, **flags)  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("seeded_by_tensor", [False, True])
def test_opcheck(lmsd_tools, ratio, seeded_by_tensor):
    problem = lmsd_tools.make_problem(5, 16)
    leaves = [t.requires_grad_() for t in problem.tensors]
    seed = torch.tensor([7], device=lmsd_tools.DEVICE) if seeded_by_tensor else None
    rows = torch.arange(5, device=lmsd_tools.DEVICE)
    op = torch.ops.generative_recommenders.lmsd_forward.default
    torch.library.opcheck(op, (*leaves, rows, seed, 7, 1e-6, ratio, True, True, False, 1, "PYTORCH"))
    y, mean, rstd, mask = op(*problem.tensors, None, None, 7, 1e-6, ratio, True, True, False, 1, "PYTORCH")
    saved = (mean, rstd, mask, 1e-6, ratio, True, True, False, 1, True, "PYTORCH")
    back = torch.ops.generative_recommenders.lmsd_backward.default
    torch.library.opcheck(back, (torch.ones_like(y), *[t.detach() for t in problem.tensors], *saved))


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_compile_fullgraph(lmsd_tools, ratio):
    compiler = "inductor" if torch.cuda.is_available() else "aot_eager"

    def run(x, u, weight, bias, seed):
        return hstu_lmsd(x * 2, u, weight, bias, dropout_ratio=ratio, seed=seed).square()

    compiled = torch.compile(run, fullgraph=True, backend=compiler, dynamic=True)
    for rows in (5, 9):
        leaves = [t.requires_grad_() for t in lmsd_tools.make_problem(rows, 16).tensors]
        seed = torch.tensor([rows], device=lmsd_tools.DEVICE)
        outputs = [f(*leaves, seed) for f in (run, compiled)]
        torch.testing.assert_close(outputs[1], outputs[0])
        eager, fused = (torch.autograd.grad(y.sum(), leaves) for y in outputs)
        for a, b in zip(eager, fused, strict=True):
            torch.testing.assert_close(b, a)


def test_seed_tensor_draws_anew(lmsd_tools):
    problem = lmsd_tools.make_problem(9, 64)
    seed = torch.tensor(11, device=lmsd_tools.DEVICE)
    first = hstu_lmsd(*problem.tensors, seed=seed)
    assert torch.equal(first, hstu_lmsd(*problem.tensors, seed=11))
    seed += 1
    assert torch.equal(hstu_lmsd(*problem.tensors, seed=seed), hstu_lmsd(*problem.tensors, seed=12))
    assert not torch.equal(first, hstu_lmsd(*problem.tensors, seed=seed))


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_first_call_equals_second(lmsd_tools, backend):
    """No tuning writes into gradients: lengths change between calls, the results of equal inputs do not."""
    for rows in (200, 64, 200):
        leaves = [t.requires_grad_() for t in lmsd_tools.make_problem(rows, 64).tensors]
        first, second = (
            torch.autograd.grad(hstu_lmsd(*leaves, seed=1, backend=backend).square().sum(), leaves) for _ in range(2)
        )
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
