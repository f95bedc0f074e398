"""Plain Triton attention against dense float64, through the interpreter on a CPU."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from generative_recommenders.ops.attention import configs, hstu_mha, launch, tune
from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.ops.common.triton_column_sums import sum_columns
from tests.ops.attention.oracle import MASKS, Mask, attention_by_rows, make_case, sees, visible

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
NAMES = ("out", "dq", "dk", "dv")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the right answer; NaN counts as infinite."""
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    return float(difference.detach().nan_to_num(nan=float("inf")))


def run(case, alpha, norm, **options) -> dict[str, torch.Tensor]:
    arguments = dict(backend="TRITON", **case.mask_arguments())
    arguments.update(options)
    out = hstu_mha(case.q, case.k, case.v, case.offsets, case.longest, alpha, norm, **arguments)
    return dict(zip(NAMES, (out, *torch.autograd.grad(out, (case.q, case.k, case.v), case.dout)), strict=True))


def oracle(case, alpha, norm) -> dict[str, torch.Tensor]:
    out = attention_by_rows(case, alpha, norm)
    grads = torch.autograd.grad(out, (case.q, case.k, case.v), case.dout.double())
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def assert_close(got, want, tolerance) -> None:
    errors = {name: error(got[name], want[name]) for name in NAMES}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_oracle_mask_is_the_definition(mask):
    for length, candidates in ((1, 0), (9, 3), (6, 6), (12, 1)):
        table = visible(length, candidates, mask)
        for i in range(length):
            for j in range(length):
                assert bool(table[i, j]) == sees(i, j, length, candidates, mask)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_masks(mask):
    case = make_case([33, 0, 1, 16, 21], 1, 16, 16, torch.float32, mask, seed=1)
    assert_close(run(case, 0.3, 13.0), oracle(case, 0.3, 13.0), TOLERANCE[torch.float32])


@pytest.mark.parametrize("d_qk, d_v", [(32, 16), (17, 40), (64, 64), (128, 128), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_widths(d_qk, d_v, dtype):
    case = make_case([15, 17], 1, d_qk, d_v, dtype, MASKS[8], seed=2)
    assert_close(run(case, d_qk**-0.5, 17.0), oracle(case, d_qk**-0.5, 17.0), TOLERANCE[dtype])


@pytest.mark.parametrize("block_m, block_n", [(16, 32), (32, 16), (64, 64)])
@pytest.mark.parametrize("mask", [MASKS[2], MASKS[5], MASKS[7], MASKS[8]], ids=lambda m: m.name)
def test_tile_shapes_change_nothing(mask, block_m, block_n):
    case = make_case([50, 31, 2], 1, 16, 16, torch.float32, mask, seed=4)
    with all_forced(configs.LaunchConfig(block_m, block_n, 4, 1)):
        assert_close(run(case, 0.3, 13.0), oracle(case, 0.3, 13.0), TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows, columns", [(0, 24), (1, 24), (33, 600), (150, 1024)])
def test_column_sums(rows, columns):
    source = torch.randn(rows, columns + 40, generator=torch.Generator().manual_seed(6))
    for part in (source[:, 16 : 16 + columns], source[:, : 2 * 8 : 2], source.half()[:, 40:]):
        got = sum_columns(part)
        assert got.dtype == torch.float32 and torch.equal(got, sum_columns(part))
        torch.testing.assert_close(got.double(), part.double().sum(0), rtol=1e-5, atol=1e-5)


def test_norm_may_be_a_tensor():
    case = make_case([9, 20], 1, 16, 16, torch.float32, MASKS[1])
    assert_close(run(case, 0.3, torch.tensor(13.0)), oracle(case, 0.3, 13.0), TOLERANCE[torch.float32])


def test_backward_is_deterministic():
    case = make_case([40, 23], 2, 16, 16, torch.float16, MASKS[2])
    first, second = run(case, 0.3, 13.0), run(case, 0.3, 13.0)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_upstream_gradient_may_have_any_strides():
    case = make_case([12, 5], 2, 16, 16, torch.float32, MASKS[1])
    out = hstu_mha(case.q, case.k, case.v, case.offsets, 12, 0.3, 5.0, case.num_targets, backend="TRITON")
    got = torch.autograd.grad(out.sum(), (case.q, case.k, case.v))
    case.dout = torch.ones(1, 1, 1).expand(case.v.shape)
    want = oracle(case, 0.3, 5.0)
    for name, grad in zip(NAMES[1:], got, strict=True):
        assert error(grad, want[name]) < 2e-6


@contextlib.contextmanager
def all_forced(config):
    """Every kernel launched with one configuration."""
    with contextlib.ExitStack() as stack:
        for kernel in configs.KERNELS:
            stack.enter_context(configs.forced(kernel, config))
        yield


def fused_buffer_case(lengths, targets, heads, width, dtype, device):
    """FC-02: one buffer of U, V, Q, K columns, and a gradient buffer whose U slice must stay as it is."""
    case = make_case(lengths, heads, width, width, dtype, Mask("many", "many"), device=device)
    case.num_targets = torch.tensor(targets, device=device)
    grads = torch.full((sum(lengths), 4 * heads * width), 7.0, device=device, dtype=dtype)
    _, dv, dq, dk = (t.unflatten(1, (heads, width)) for t in grads.split(heads * width, dim=1))
    return case, grads, (dq, dk, dv)


def check_fused_buffer(device, dtype, heads, width, tolerance):
    case, grads, (dq, dk, dv) = fused_buffer_case([61, 130, 97], [3, 1, 5], heads, width, dtype, device)
    call = AttentionCall(case.offsets, 130, width**-0.5, 130.0, case.num_targets).on(case.q.device)
    out = torch.full(case.v.shape, float("nan"), device=device, dtype=dtype)
    with torch.no_grad():
        launch.forward_into(case.q, case.k, case.v, out, call)
        launch.backward_into(case.dout, case.q, case.k, case.v, dq, dk, dv, call)
    want = oracle(case, width**-0.5, 130.0)
    got = dict(zip(NAMES, (out, dq, dk, dv), strict=True))
    assert_close(got, want, tolerance)
    assert bool((grads[:, : heads * width] == 7).all())
    packed = [t.detach().contiguous().requires_grad_() for t in (case.q, case.k, case.v)]
    again = hstu_mha(*packed, case.offsets, 130, width**-0.5, 130.0, case.num_targets, backend="TRITON")
    assert torch.equal(again, out)
    for a, b in zip(torch.autograd.grad(again, packed, case.dout), (dq, dk, dv), strict=True):
        assert torch.equal(a, b)


def test_fc02_strided_views_of_one_buffer():
    with all_forced(configs.LaunchConfig(64, 64, 4, 1)):
        check_fused_buffer("cpu", torch.float32, 1, 16, 2e-6)


@pytest.mark.parametrize("lengths, targets", [([0, 0, 0], [0, 0, 0]), ([], []), ([0, 7, 0, 1], [0, 1, 0, 1])])
@pytest.mark.parametrize("backend", ["TRITON", "PYTORCH"])
def test_fc06_empty_sequences_and_batches(lengths, targets, backend):
    case = make_case(lengths, 2, 16, 16, torch.float32, Mask("one", "one"))
    case.num_targets = torch.tensor(targets, dtype=torch.int64)
    got = run(case, 0.3, 5.0, backend=backend)
    assert got["out"].shape == (sum(lengths), 2, 16) and got["out"].dtype == torch.float32
    if sum(lengths) > 0:
        full = make_case([7, 1], 2, 16, 16, torch.float32, Mask("one", "one"))
        full.num_targets = torch.tensor([1, 1])
        want = run(full, 0.3, 5.0, backend=backend)
        for name in NAMES:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["TRITON", "PYTORCH"])
def test_fc08_neighbours_do_not_change_a_sequence(backend):
    neighbours = ([40], [40, 64], [40, 150])
    whole = make_case([40, 150], 1, 16, 16, torch.float32, Mask("one", "one"))
    outputs = []
    for lengths in neighbours:
        rows = sum(lengths)
        out = hstu_mha(
            whole.q[:rows], whole.k[:rows], whole.v[:rows], torch.tensor([0, *lengths]).cumsum(0), max(lengths),
            0.25, 4096.0, torch.ones(len(lengths), dtype=torch.int64), backend=backend,
        )  # fmt: skip
        outputs.append(out[:40])
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-5, atol=1e-9)


def test_fc14_every_config_alone_and_twice():
    case = make_case([20, 45], 1, 16, 16, torch.float32, MASKS[1])
    want = oracle(case, 0.3, 13.0)
    for block_m, block_n in ((16, 16), (32, 64), (64, 32)):
        with all_forced(configs.LaunchConfig(block_m, block_n, 4, 1)):
            first, second = run(case, 0.3, 13.0), run(case, 0.3, 13.0)
        assert_close(first, want, 2e-6)
        assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_tuning_stores_the_fastest_and_later_calls_use_it(monkeypatch, tmp_path):
    monkeypatch.setattr(configs, "tuned_file", lambda: tmp_path / "attention.json")
    configs.tuned_table.cache_clear()
    scratch = tune.Scratch(1, 20, 1, 16, 16, torch.float32, torch.device("cpu"))
    slow, fast = configs.LaunchConfig(16, 16, 4, 1), configs.LaunchConfig(32, 16, 4, 1)
    elapsed = iter([2.0, 1.0] * 3)
    tune.tune(scratch, lambda launch: (launch(), next(elapsed))[1], (slow, fast), report=lambda line: None)
    try:
        assert configs.launch_config("backward_q", torch.device("cpu"), 16, 16, torch.float32) == fast
        case = make_case([20, 45], 1, 16, 16, torch.float32, MASKS[1])
        assert_close(run(case, 0.3, 13.0), oracle(case, 0.3, 13.0), 2e-6)
        (tmp_path / "attention.json").write_text("{ damaged")
        configs.tuned_table.cache_clear()
        assert configs.tuned_table() == {}
    finally:
        configs.tuned_table.cache_clear()


def test_configs_cover_every_architecture():
    for architecture in ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "gfx950", "interpreter"):
        for kernel in configs.KERNELS:
            for width in (16, 33, 64, 128, 256):
                for dtype in (torch.float32, torch.bfloat16):
                    config = configs.default_config(kernel, architecture, width, width, dtype)
                    assert config.block_m >= 16 and config.block_n >= 16


def test_triton_refuses_what_it_has_no_kernel_for():
    q = torch.zeros(4, 1, 300)
    for tensor, message in ((q, "up to 256"), (torch.zeros(4, 1, 16, dtype=torch.float64), "float64")):
        with pytest.raises(ValueError, match=message):
            hstu_mha(tensor, tensor, tensor, torch.tensor([0, 4]), 4, 1.0, 1.0, backend="TRITON")


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_ahead_of_time(arch):
    check_compilation(arch, "--few")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles_ahead_of_time(arch):
    check_compilation(arch)


def check_compilation(arch: int, *options: str) -> None:
    root = pathlib.Path(__file__).parents[3]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(root)
    command = [sys.executable, str(root / "tests/ops/attention/compile_kernels.py"), str(arch), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
