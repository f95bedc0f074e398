"""The fused STU front (interpreter on a CPU) against the same mathematics in float64 PyTorch."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from generative_recommenders.ops.attention import (
    AttentionCall,
    Projection,
    UvqkParameters,
    hstu_preprocess_attention,
)
from generative_recommenders.ops.dispatch import BackendUnavailable
from tests.ops.attention.oracle import Case, Mask, attention_by_rows, targets_of

HEADS, D_QK, D_V, WIDTH = 2, 16, 24, 40


def make_inputs(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    columns = 2 * HEADS * (D_QK + D_V)
    shapes = ((rows, WIDTH), (WIDTH,), (WIDTH,), (WIDTH, columns), (columns,))
    scales = (1.0, 1.0, 0.3, WIDTH**-0.5, 0.2)
    tensors = [torch.randn(s, generator=generator) * f for s, f in zip(shapes, scales, strict=True)]
    return [t.to(dtype).requires_grad_() for t in tensors]


def oracle(inputs, offsets, targets, mask, alpha, norm):
    x, norm_weight, norm_bias, weight, bias = (t.detach().double().requires_grad_() for t in inputs)
    normed = F.layer_norm(x, (WIDTH,), norm_weight, norm_bias, 1e-6)
    uvqk = normed @ weight + bias
    u, v, q, k = uvqk.split([HEADS * d for d in (D_V, D_V, D_QK, D_QK)], dim=1)
    case = Case(*(t.unflatten(1, (HEADS, -1)) for t in (q, k, v)), None, offsets, targets, mask)
    return (u, attention_by_rows(case, alpha, norm).flatten(1)), (x, norm_weight, norm_bias, weight, bias)


def front(inputs, offsets, longest, targets=None, recompute=(True, True), backend=None):
    """The front of x and its four parameters; scores times 0.3, divided by 7."""
    x, *parameters = inputs
    projection, call = (
        Projection(HEADS, D_QK, D_V, 1e-6, *recompute),
        AttentionCall(offsets, longest, 0.3, 7.0, targets),
    )
    return hstu_preprocess_attention(x, UvqkParameters(*parameters), projection, call, backend)


@pytest.mark.parametrize("recompute", list(itertools.product((False, True), repeat=2)))
def test_forward_and_gradients(recompute):
    lengths = [19, 0, 1, 33]
    mask = Mask("many", "many")
    targets = targets_of(lengths, "many", 0, torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make_inputs(sum(lengths), torch.float32)
    got = front(inputs, offsets, 33, targets, recompute, "TRITON")
    want, leaves = oracle(inputs, offsets, targets, mask, 0.3, 7.0)
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(t.shape, generator=generator) for t in want]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    torch.autograd.backward(got, upstream)
    expected = torch.autograd.grad(want, leaves, [t.double() for t in upstream])
    for tensor, b in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad.double(), b, rtol=1e-4, atol=1e-4)


def test_recompute_keeps_x_alone():
    rows = WIDTH + 1
    inputs = make_inputs(rows, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        front(inputs, torch.tensor([0, rows]), rows, backend="TRITON")
    assert {t.data_ptr() for t in kept if t.dim() == 2 and t.shape[0] == rows} == {inputs[0].data_ptr()}


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_empty_batches_have_zero_gradients(offsets):
    inputs = make_inputs(0, torch.float32)
    u, out = front(inputs, torch.tensor(offsets), 0, backend="TRITON")
    assert u.shape == out.shape == (0, HEADS * D_V)
    (u.sum() + out.sum()).backward()
    for tensor in inputs:
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_an_unused_output_has_no_part_in_the_gradient():
    inputs = make_inputs(20, torch.float32)
    for used in (0, 1):
        grads = []
        for backend in ("TRITON", "PYTORCH"):
            outputs = front(inputs, torch.tensor([0, 20]), 20, backend=backend)
            grads.append(torch.autograd.grad(outputs[used].square().sum(), inputs))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_mixed_dtypes_need_autocast():
    inputs = make_inputs(4, torch.float32)
    with pytest.raises(ValueError, match="autocast"):
        front([inputs[0].half(), *inputs[1:]], torch.tensor([0, 4]), 4)


def call_front(inputs, backend, rows):
    return front(inputs, torch.tensor([0, rows]), rows, backend=backend)


def test_strided_parameters_are_read_right():
    inputs = [t.detach() for t in make_inputs(20, torch.float32)]
    want = call_front(inputs, "TRITON", 20)
    for number in (1, 2, 4):
        inputs[number] = torch.stack([inputs[number], torch.full_like(inputs[number], 3)], dim=1)[:, 0]
    for a, b in zip(call_front(inputs, "TRITON", 20), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["TRITON", "PYTORCH"])
@pytest.mark.parametrize("number, name", [(1, "norm_weight"), (2, "norm_bias"), (4, "uvqk_bias")])
def test_parameters_of_the_wrong_size(number, name, backend):
    inputs = make_inputs(20, torch.float32)
    inputs[number] = inputs[number][:1]
    with pytest.raises(ValueError, match=f"{name} must be"):
        call_front(inputs, backend, 20)


def test_bfloat16_autocast_is_refused_by_the_interpreter():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BackendUnavailable, match="bfloat16"):
        call_front(make_inputs(20, torch.float32), "TRITON", 20)
