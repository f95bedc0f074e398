"""What the explicit pair accepts, refuses and returns."""

import pytest
import torch

from generative_recommenders.ops.dispatch import BackendUnavailable
from generative_recommenders.ops.lmsd import (
    LmsdBackward,
    LmsdForward,
    contract,
    hstu_lmsd_backward,
    hstu_lmsd_forward,
    supports_indexed_output_dropout,
)

CONFIG = {"dropout_ratio": 0.1, "apply_u_silu": True, "concat_u": True, "concat_x": True}


@pytest.fixture
def problem(lmsd_tools):
    return lmsd_tools.make_problem(6, 16)


@pytest.fixture
def saved(problem):
    return hstu_lmsd_forward(*problem.tensors, backend="PYTORCH")


def run_backward(problem, saved, dy=None, **overrides):
    y, mean, rstd, mask = saved
    options = CONFIG | {"backend": "PYTORCH"} | overrides
    return hstu_lmsd_backward(torch.ones_like(y) if dy is None else dy, *problem.tensors, mean, rstd, mask, **options)


def test_results_by_key_attribute_and_unpacking(problem, saved):
    y, mean, rstd, mask = saved
    assert isinstance(saved, LmsdForward)
    assert saved.keys() == ("y_tensor", "mean_tensor", "rstd_tensor", "mask_tensor")
    assert saved["y_tensor"] is saved.y_tensor is y and saved["mask_tensor"] is mask and saved[1] is mean
    assert dict(saved.items())["rstd_tensor"] is rstd
    grads = run_backward(problem, saved)
    assert isinstance(grads, LmsdBackward)
    assert grads.keys() == ("dx_tensor", "du_tensor", "dweight_tensor", "dbias_tensor")
    with pytest.raises(KeyError, match="y_tensor, mean_tensor"):
        saved["y"]


def test_shapes_and_dtypes(lmsd_tools):
    problem = lmsd_tools.make_problem(6, 16, torch.float16)
    y, mean, rstd, mask = hstu_lmsd_forward(*problem.tensors, concat_x=False, backend="PYTORCH")
    assert y.shape == (6, 32) and y.dtype == torch.float16
    assert mean.shape == rstd.shape == (6,) and mean.dtype == rstd.dtype == torch.float32
    assert mask.shape == (6, 16) and mask.dtype == torch.int8
    assert not bool((mask & 2).any()) and bool((mask & 4).any()) and bool((mask & 1).any())


def test_no_mask_and_no_draw_without_dropout(problem, monkeypatch):
    from generative_recommenders.ops.common import philox
    from generative_recommenders.ops.lmsd import reference

    def refuse(*_):
        raise AssertionError("drawn at dropout 0")

    monkeypatch.setattr(reference, "draw_mask", refuse)
    monkeypatch.setattr(philox, "keep_threshold", refuse)
    for backend in ("PYTORCH", "TRITON"):
        assert hstu_lmsd_forward(*problem.tensors, dropout_ratio=0.0, backend=backend).mask_tensor is None


@pytest.mark.parametrize("name", list(CONFIG))
def test_missing_configuration_is_named(problem, saved, name):
    with pytest.raises(ValueError, match=name):
        run_backward(problem, saved, **{name: None})


def test_configuration_that_does_not_fit(problem, saved):
    with pytest.raises(ValueError, match="concat_u=False"):
        run_backward(problem, saved, concat_u=False)
    with pytest.raises(ValueError, match="a mask"):
        run_backward(problem, saved, dropout_ratio=0.0)
    with pytest.raises(ValueError, match="no mask"):
        run_backward(problem, (*saved[:3], None))
    with pytest.raises(ValueError, match="mean"):
        run_backward(problem, (saved[0], saved[1][:-1], *saved[2:]))
    with pytest.raises(TypeError, match="dy"):
        run_backward(problem, saved, dy=torch.ones_like(saved[0], dtype=torch.float16))


def test_bad_inputs(problem):
    x, u, weight, bias = problem.tensors
    for change, match in (
        ((x[0], u[0], weight, bias), r"\[N, D\]"),
        ((x, u[:3], weight, bias), r"\[N, D\]"),
        ((x[:, :12], u[:, :12], weight[:12], bias[:12]), "multiple of 8"),
        ((x, u, weight[:8], bias), "weight has shape"),
        ((x, u, weight, bias[:8]), "bias has shape"),
    ):
        with pytest.raises(ValueError, match=match):
            hstu_lmsd_forward(*change)
    with pytest.raises(TypeError, match="u has dtype"):
        hstu_lmsd_forward(x, u.half(), weight, bias)
    with pytest.raises(TypeError, match="int32"):
        hstu_lmsd_forward(x.int(), u.int(), weight, bias)
    with pytest.raises(ValueError, match="num_groups"):
        hstu_lmsd_forward(*problem.tensors, num_groups=3)
    with pytest.raises(ValueError, match="dropout_ratio"):
        hstu_lmsd_forward(*problem.tensors, dropout_ratio=1.0)
    with pytest.raises(ValueError, match="64-bit"):
        hstu_lmsd_forward(*problem.tensors, seed=2**63)
    with pytest.raises(TypeError, match="seed"):
        hstu_lmsd_forward(*problem.tensors, seed=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="row_indices"):
        hstu_lmsd_forward(*problem.tensors, row_indices=torch.zeros(6, device=x.device))
    with pytest.raises(ValueError, match="row_indices"):
        hstu_lmsd_forward(*problem.tensors, row_indices=torch.zeros(5, dtype=torch.int64, device=x.device))


def test_alignment_is_checked_where_it_matters(lmsd_tools):
    problem = lmsd_tools.make_problem(6, 16)
    wide = torch.randn(6, 33, device=lmsd_tools.DEVICE)
    turned = torch.randn(16, 6, device=lmsd_tools.DEVICE).t()
    shifted = torch.randn(97, device=lmsd_tools.DEVICE)[1:].view(6, 16)
    for x in (wide[:, :16], turned, shifted):
        hstu_lmsd_forward(x, *problem.tensors[1:], backend="PYTORCH")
        with pytest.raises(ValueError, match=r"x_tensor .*contiguous\(\)"):
            hstu_lmsd_forward(x, *problem.tensors[1:], backend="TRITON")


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_caller_owned_gradients(lmsd_tools, backend):
    problem = lmsd_tools.make_problem(6, 16)
    saved = hstu_lmsd_forward(*problem.tensors, backend=backend)
    nan = lambda *shape: torch.full(shape, float("nan"), device=lmsd_tools.DEVICE)  # noqa: E731
    fused = nan(6, 48)  # dx and du as column blocks of one buffer
    owned = {"dx_tensor": fused[:, :16], "du_tensor": fused[:, 32:], "dweight_tensor": nan(16), "dbias_tensor": nan(16)}
    grads = run_backward(problem, saved, backend=backend, **owned)
    for name, wanted in run_backward(problem, saved, backend=backend).items():
        assert grads[name] is owned[name]
        assert torch.equal(grads[name], wanted)
    assert bool(fused[:, 16:32].isnan().all())


def test_owned_buffers_that_do_not_fit(problem, saved):
    x = problem.x
    for name, buffer, match in (
        ("dx_tensor", torch.empty(6, 8), "dx_tensor"),
        ("du_tensor", torch.empty_like(x).half(), "du_tensor"),
        ("dbias_tensor", torch.empty(1, device=x.device).expand(16), "strides"),
        ("dx_tensor", torch.empty(1, 16, device=x.device).expand(6, 16), "strides"),
    ):
        with pytest.raises(ValueError, match=match):
            run_backward(problem, saved, **{name: buffer})
    with pytest.raises(ValueError, match="compute_dweight"):
        run_backward(problem, saved, compute_dweight=False, dweight_tensor=torch.empty_like(problem.weight))


def test_overlap_is_refused(problem, saved):
    x = problem.x
    fused = torch.empty(6, 40, device=x.device)
    dy = torch.ones_like(saved.y_tensor)
    for owned, match in (
        ({"dx_tensor": x}, "dx_tensor overlaps x_tensor"),
        ({"du_tensor": dy[:, :16]}, "du_tensor overlaps dy_tensor"),
        ({"dx_tensor": fused[:, :16], "du_tensor": fused[:, 12:28]}, "du_tensor overlaps dx_tensor"),
        ({"dx_tensor": fused[:, :16], "dbias_tensor": fused[2, 4:20]}, "dbias_tensor overlaps dx_tensor"),
        ({"dbias_tensor": problem.weight}, "dbias_tensor overlaps weight_tensor"),
    ):
        with pytest.raises(ValueError, match=match):
            run_backward(problem, saved, dy=dy, **owned)


def test_overlap_of_column_blocks():
    buffer = torch.empty(8, 32)
    assert not contract.overlap(buffer[:, :16], buffer[:, 16:])
    assert not contract.overlap(buffer[:, :16], buffer[3, 16:])
    assert not contract.overlap(buffer[:4], buffer[4:])
    assert not contract.overlap(buffer[:0], buffer)
    assert contract.overlap(buffer[:, :16], buffer[:, 15:])
    assert contract.overlap(buffer[:, 8:24], buffer[1:, :16])
    assert contract.overlap(buffer[3:, 16:], buffer[:5, 24:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about tensors on a CPU")
def test_stream_needs_a_gpu(problem):
    with pytest.raises(ValueError, match="stream"):
        hstu_lmsd_forward(*problem.tensors, stream=1)


def test_backend_choice(problem, monkeypatch):
    with pytest.raises(BackendUnavailable, match="CUDNN"):
        hstu_lmsd_forward(*problem.tensors, backend="CUDNN")
    with pytest.raises(ValueError, match="PYTORCH, TRITON, CUDNN"):
        hstu_lmsd_forward(*problem.tensors, backend="JAX")
    double = [t.double() for t in problem.tensors]
    with pytest.raises(BackendUnavailable, match="float64"):
        hstu_lmsd_forward(*double, backend="TRITON")
    assert hstu_lmsd_forward(*double).y_tensor.dtype == torch.float64  # falls to the reference
    monkeypatch.setenv("HSTU_LMSD_BACKEND", "cudnn")
    with pytest.raises(BackendUnavailable, match="HSTU_LMSD_BACKEND"):
        hstu_lmsd_forward(*problem.tensors)


def test_supports_indexed_output_dropout(lmsd_tools, monkeypatch):
    assert supports_indexed_output_dropout() and supports_indexed_output_dropout("PYTORCH", "cpu")
    assert supports_indexed_output_dropout("TRITON", lmsd_tools.DEVICE)
    assert not supports_indexed_output_dropout("CUDNN")
    monkeypatch.setenv("HSTU_LMSD_BACKEND", "CUDNN")
    assert not supports_indexed_output_dropout()


@pytest.mark.parametrize("eps", [-1e-3, float("nan"), float("inf")])
def test_an_eps_that_makes_no_root_is_refused(eps):
    x, weight = torch.randn(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="eps="):
        hstu_lmsd_forward(x, x, weight, weight, eps=eps, dropout_ratio=0.0, backend="PYTORCH")
