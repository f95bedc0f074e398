"""Swish norm, encoding and table sums against float64, forward and every gradient."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from generative_recommenders.ops import dispatch
from generative_recommenders.ops.common import philox
from generative_recommenders.ops.dispatch import BackendUnavailable
from generative_recommenders.ops.encode import EncodeCall, encode_sequence, swish_layer_norm, why_not_fused
from tests.ops.encode import oracle

pytest.importorskip("triton")
DEVICE, TOLERANCE, relative_error = oracle.DEVICE, oracle.TOLERANCE, oracle.relative_error
SEED = 0x1234_5678_9ABC


def run(problem, ratio=0.0, seed=SEED, fused=True):
    """x and the gradients by leaf for a fixed upstream gradient."""
    p, call_seed = problem.leaves, torch.tensor([seed], device=DEVICE)
    call = EncodeCall(
        problem.places, problem.patterns, problem.positions, problem.times, problem.dtype, ratio, call_seed
    )
    a_norm = (p["a_weight"], p["a_bias"], oracle.EPS) if "attributes" in p else None
    x = encode_sequence(
        p["content"], (p["weight"], p["bias"], oracle.EPS), p.get("attributes"), a_norm, p["action"], p.get("context"),
        p["position"], p["time"], call, fused,
    )  # fmt: skip
    g = torch.Generator().manual_seed(7)
    dx = torch.randn(x.shape, generator=g).to(x)
    return x, dx, dict(zip(p, torch.autograd.grad(x, list(p.values()), dx), strict=True))


def check(problem, ratio=0.0, fused=True):
    x, dx, grads = run(problem, ratio, fused=fused)
    rows = torch.arange(x.shape[0], device=DEVICE)
    keep = philox.keep_decisions(rows, x.shape[1], SEED, 3, ratio) if ratio else None
    leaves, truth = oracle.encode(problem, keep, ratio)
    wanted = torch.autograd.grad(truth, list(leaves.values()), dx.double())
    tolerance = TOLERANCE[problem.dtype]
    assert x.dtype == problem.dtype
    assert relative_error(x, truth) < tolerance
    if keep is not None:
        assert not x[~keep].any(), "a dropped element is not zero"
    for (name, grad), right in zip(grads.items(), wanted, strict=True):
        assert grad.dtype == problem.leaves[name].dtype
        assert relative_error(grad, right) < 3 * tolerance, name


# ---- Encoding ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("width", [16, 40, 128])
def test_encoding_equals_float64(dtype, ratio, width):
    check(oracle.make_problem(events=150, context=10, width=width, dtype=dtype), ratio)


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_the_reference_equals_float64(attributes, context, ratio):
    """Its decisions are the kernel's, too."""
    check(oracle.make_problem(33, context, 16, torch.float32, attributes), ratio, fused=False)


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("events", [0, 1, 33])
def test_parts_may_be_absent(attributes, context, events):
    check(oracle.make_problem(events, context, 16, torch.float32, attributes), 0.2)


def test_one_entry_that_every_row_looks_up():
    """Many full pieces of one entry, none of the others."""
    check(oracle.make_problem(700, 8, 16, torch.float32, patterns=1, positions=1, times=1))


@pytest.mark.parametrize("patterns,times", [(2, 3), (9, 5), (9, 400)])
def test_pairs_of_few_entries_are_added_up_together(patterns, times):
    """The first two have rows enough for it, the last has not."""
    check(oracle.make_problem(1000, 30, 16, torch.float32, patterns=patterns, times=times), 0.2)


@pytest.mark.gpu
def test_a_table_of_more_entries_than_two_bytes_count():
    problem = oracle.make_problem(3000, 0, 16, torch.float32, positions=40_000)
    problem.positions[:500] = 39_999
    check(problem)


def test_rows_of_a_wider_buffer_and_an_expanded_gradient():
    problem = oracle.make_problem(20, 4, 16, torch.float32)
    wide = torch.randn(20, 50, device=DEVICE)
    problem.leaves["content"] = wide[:, 3:19].requires_grad_()
    check(problem)
    p = problem.leaves
    call = EncodeCall(problem.places, problem.patterns, problem.positions, problem.times, torch.float32)
    norms = (p["weight"], p["bias"], 1e-5), p["attributes"], (p["a_weight"], p["a_bias"], 1e-5)
    x = encode_sequence(p["content"], *norms, p["action"], p["context"], p["position"], p["time"], call)
    (grad,) = torch.autograd.grad(x.sum(), p["time"])
    counts = torch.bincount(problem.times, minlength=30).to(grad)
    torch.testing.assert_close(grad, counts[:, None].expand(-1, 16))


def test_two_runs_give_equal_bits():
    problem = oracle.make_problem(400, 10, 32, torch.float16)
    (x, _, grads), (again, _, grads_again) = run(problem, 0.2), run(problem, 0.2)
    assert torch.equal(x, again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_dropout_drops_its_share_and_depends_on_the_seed():
    problem = oracle.make_problem(500, 0, 64, torch.float32)
    dropped = [run(problem, 0.25, seed)[0] == 0 for seed in (1, 1, 2)]
    assert torch.equal(dropped[0], dropped[1])
    share = float(dropped[0].float().mean())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / dropped[0].numel()) ** 0.5
    both = float((dropped[0] & dropped[2]).float().mean())
    assert abs(both - 0.0625) < 5 * (0.0625 / dropped[0].numel()) ** 0.5


def test_wrong_counts_are_named():
    problem = oracle.make_problem(5, 2, 16, torch.float32)
    problem.times = problem.times[:-1]
    with pytest.raises(ValueError, match=r"times must be \[7\]: got \(6,\)"):
        run(problem)


# ---- Swish norm ----


def swish(x, weight, bias):
    return x * torch.sigmoid(oracle.layer_norm(x, weight, bias))


def check_swish(rows, width, dtype, weight_dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    leaves = [torch.randn(*s, generator=g).to(DEVICE) for s in ((rows, width), (width,), (width,))]
    leaves = [t.to(d).requires_grad_() for t, d in zip(leaves, (dtype, weight_dtype, weight_dtype), strict=True)]
    y = swish_layer_norm(*leaves, oracle.EPS)
    dy = torch.randn(rows, width, generator=g).to(y)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    truth = swish(*exact)
    assert y.dtype == dtype and relative_error(y, truth) < TOLERANCE[dtype]
    grads = torch.autograd.grad(y, leaves, dy)
    for leaf, grad, right in zip(leaves, grads, torch.autograd.grad(truth, exact, dy.double()), strict=True):
        assert grad.dtype == leaf.dtype
        assert relative_error(grad, right) < 3 * TOLERANCE[dtype]
    again = torch.autograd.grad(swish_layer_norm(*leaves, oracle.EPS), leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows,width", [(0, 8), (1, 8), (70, 24), (200, 256)])
def test_swish_norm_equals_float64(dtype, rows, width):
    check_swish(rows, width, dtype)


@pytest.mark.parametrize("fused", [True, False])
def test_swish_norm_of_any_shape_and_layout(fused):
    wide = torch.randn(6, 5, 32, device=DEVICE)
    weight, bias = torch.randn(2, 16, device=DEVICE).unbind()
    x = wide[..., 4:20]
    got = swish_layer_norm(x, weight, bias, oracle.EPS, fused)
    assert relative_error(got, swish(x.double(), weight.double(), bias.double())) < 3e-6


def test_strided_vectors_are_read_right():
    problem = oracle.make_problem(40, 5, 16, torch.float32)
    want, _, grads = run(problem)
    spread = lambda t: torch.stack([t, torch.full_like(t, 3)], dim=-1)[..., 0]  # noqa: E731
    for name in ("weight", "bias", "a_weight", "a_bias"):
        problem.leaves[name] = spread(problem.leaves[name].detach()).requires_grad_()
    for name in ("places", "patterns", "positions", "times"):
        setattr(problem, name, spread(getattr(problem, name)))
    got, _, again = run(problem)
    assert torch.equal(got, want) and all(torch.equal(again[name], grads[name]) for name in grads)
    x, weight, bias = (problem.leaves[name] for name in ("content", "weight", "bias"))
    plain = swish_layer_norm(x, weight.contiguous(), bias.contiguous(), oracle.EPS)
    assert torch.equal(swish_layer_norm(x, weight, bias, oracle.EPS), plain)


@pytest.mark.parametrize(
    "name, change",
    [
        ("weight", lambda t: t[:8]), ("a_bias", lambda t: t[:8]), ("context", lambda t: t.repeat(1, 2)),
        ("position", lambda t: t[:, :8]), ("time", lambda t: t.repeat(1, 2)), ("action", lambda t: t[0]),
        ("attributes", lambda t: t[1:]), ("patterns", lambda t: t[1:]), ("places", lambda t: t[1:]),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(name, change):
    problem = oracle.make_problem(40, 5, 16, torch.float32)
    if name in problem.leaves:
        problem.leaves[name] = change(problem.leaves[name])
    else:
        setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match="must be"):
        run(problem)


def test_dropout_needs_a_seed():
    problem = oracle.make_problem(4, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="needs a seed"):
        p = problem.leaves
        call = EncodeCall(
            problem.places, problem.patterns, problem.positions, problem.times, problem.dtype, dropout_ratio=0.5
        )
        norm = (p["weight"], p["bias"], oracle.EPS)
        encode_sequence(p["content"], norm, None, None, p["action"], p["context"], p["position"], p["time"], call)


# ---- Choice ----


def test_what_has_no_kernel_is_said(monkeypatch):
    rows = torch.zeros(2, 16, device=DEVICE)
    monkeypatch.delenv("HSTU_ENCODE_BACKEND", raising=False)
    assert why_not_fused(rows, 16, backend="TRITON") is None
    assert "PYTORCH was chosen" in why_not_fused(rows, 16, backend="PYTORCH")
    assert "12 columns" in why_not_fused(rows, 16, 12, backend="TRITON")
    with pytest.raises(BackendUnavailable, match="float64"):
        why_not_fused(rows.double(), 16, backend="TRITON")
    assert why_not_fused(rows.double(), 16) is not None
    monkeypatch.setenv("HSTU_ENCODE_BACKEND", "TRITON")
    assert why_not_fused(rows, 16) is None
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: False)
    with pytest.raises(BackendUnavailable, match="HSTU_ENCODE_BACKEND.*needs a GPU"):
        why_not_fused(rows.cpu(), 16)
    monkeypatch.setenv("HSTU_ENCODE_BACKEND", "PYTORCH")
    assert "PYTORCH was chosen" in why_not_fused(rows, 16)


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_kernels_compile_for_gpus_that_are_not_there(architecture, tmp_path):
    """In a process of its own: this one's interpreter mode was fixed when Triton was imported."""
    script = pathlib.Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(script.parents[3]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script), "--few", str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


# ---- A GPU's own sizes ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [512, 96, 1024])
def test_encoding_at_size(dtype, width):
    check(oracle.make_problem(30_000, 700, width, dtype, positions=3000, times=2049), 0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [256, 512, 2048])
def test_swish_norm_at_size(dtype, width):
    check_swish(20_011, width, dtype)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31():
    """4.3 M rows of 512: the last joined rows equal the same rows run alone."""
    rows, last, width = 4_300_000, 64, 512
    assert rows * width > 2**31
    content = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    ones, zeros = torch.ones(width, device="cuda"), torch.zeros(width, device="cuda")
    action, position, time = (torch.randn(n, width, device="cuda") for n in (2, 7, 5))
    numbers = torch.arange(rows, device="cuda")

    def encode(part):
        n = part.numel()
        call = EncodeCall(torch.arange(n, device="cuda"), part % 2, part % 7, part % 5, torch.bfloat16)
        return encode_sequence(content[part[0] :], (ones, zeros, 1e-5), None, None, action, None, position, time, call)

    content.requires_grad_()
    whole, alone = encode(numbers), encode(numbers[-last:])
    assert torch.equal(whole[-last:], alone)
    grads = [torch.autograd.grad(x[-last:].float().square().sum(), content)[0][-last:] for x in (whole, alone)]
    assert torch.equal(*grads)
