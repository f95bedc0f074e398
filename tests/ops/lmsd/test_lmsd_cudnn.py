"""The adapter of the public cudnn kernels: refusals, the first-use guard, and the installed package's signatures.

The kernels themselves need an SM10x GPU and have not been run by these tests.
"""

import inspect
import sys
import types

import pytest
import torch

from generative_recommenders.ops.lmsd import cudnn as adapter
from generative_recommenders.ops.lmsd import explicit
from generative_recommenders.ops.lmsd.contract import LmsdConfig, LmsdShape

CONFIG = LmsdConfig(0.1, True, True, True)


def why_not(rows=4, columns=512, dtype=torch.bfloat16, weight_dtype=None, cfg=CONFIG, row_indices=None, seed=0):
    x = torch.empty(rows, columns, dtype=dtype, device="meta")
    weight = torch.empty(columns, dtype=weight_dtype or dtype, device="meta")
    return adapter.why_not_this_call(LmsdShape.of(x, weight, weight, cfg, row_indices, seed))


def test_refusals():
    assert why_not() is None
    assert "bfloat16" in why_not(dtype=torch.float16)
    assert "bfloat16" in why_not(weight_dtype=torch.float32)
    assert "D=1024" in why_not(columns=1024)
    assert "N=0" in why_not(rows=0)
    assert why_not(rows=2**31 // 512) is None
    assert "N=4194305" in why_not(rows=2**31 // 512 + 1)
    assert "group norm" in why_not(cfg=LmsdConfig(0.1, True, True, True, num_groups=4))
    assert "row_indices" in why_not(row_indices=torch.arange(4))
    assert "seed" in why_not(seed=torch.tensor(3))
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    assert "SM10x" in adapter.why_not(LmsdShape.of(x, x[0], x[0], CONFIG))


@pytest.fixture
def stand_in(monkeypatch):
    """A module named cudnn with the package's signatures, computing with the reference."""

    def forward(
        x_tensor, u_tensor, weight_tensor, bias_tensor, eps=1e-6, dropout_ratio=0.1, seed=0, stream=None,
        apply_u_silu=True, concat_u=True, concat_x=True,
    ):  # fmt: skip
        module.calls.append(x_tensor.shape[0])
        return explicit.hstu_lmsd_forward(
            x_tensor, u_tensor, weight_tensor, bias_tensor, eps, dropout_ratio, seed + module.seed_shift, stream,
            apply_u_silu, concat_u, concat_x, backend="PYTORCH",
        )  # fmt: skip

    def backward(*tensors, **options):
        return explicit.hstu_lmsd_backward(*tensors, **options, backend="PYTORCH")

    module = types.ModuleType("cudnn")
    module.hstu_lmsd_forward, module.hstu_lmsd_backward = forward, backward
    module.calls, module.seed_shift = [], 0
    monkeypatch.setitem(sys.modules, "cudnn", module)
    adapter._verify_once.cache_clear()
    yield module
    adapter._verify_once.cache_clear()


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 16), (5, 16), (16,), (16,))
    return tuple(torch.randn(s, generator=generator).bfloat16() for s in shapes)


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_adapter_equals_reference(stand_in, ratio):
    cfg = LmsdConfig(ratio, True, False, True)
    inputs = tensors()
    for _ in range(2):
        results = adapter.forward(*inputs, 3, None, cfg)
    assert stand_in.calls == [adapter._PROBE_ROWS, 5, 5]  # one probe for two calls
    right = explicit.hstu_lmsd_forward(*inputs, dropout_ratio=ratio, seed=3, concat_u=False, backend="PYTORCH")
    for a, b in zip(results, right, strict=True):
        assert a is b is None or torch.equal(a, b)
    dy = torch.ones_like(results[0])
    owned = (torch.empty_like(inputs[0]), None, None, None)
    grads = adapter.backward(dy, *inputs, *results[1:], cfg, False, owned)
    assert grads[0] is owned[0] and grads[2] is None


def test_guard_stops_a_package_that_draws_differently(stand_in):
    stand_in.seed_shift = 1
    with pytest.raises(RuntimeError, match="another mask"):
        adapter.forward(*tensors(), 3, None, CONFIG)


def test_installed_package_has_the_signatures_used():
    missing = adapter.import_error()
    if missing is not None:
        pytest.skip(missing)
    import cudnn

    for public, ours in (
        (cudnn.hstu_lmsd_forward, explicit.hstu_lmsd_forward),
        (cudnn.hstu_lmsd_backward, explicit.hstu_lmsd_backward),
    ):
        theirs = inspect.signature(public).parameters
        mine = inspect.signature(ours).parameters
        assert list(mine)[: len(theirs)] == list(theirs)
        for name, parameter in theirs.items():
            assert parameter.default == mine[name].default, name


def test_installed_package_refuses_what_we_refuse():
    missing = adapter.import_error()
    if missing is not None:
        pytest.skip(missing)
    import cudnn

    x, u, weight, bias = tensors()
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        cudnn.hstu_lmsd_forward(x, u, weight, bias)  # a CPU tensor
    from cudnn.hstu.hstu_lmsd._kernels import _common

    assert _common.MAX_FLAT_ELEMENTS == adapter.MAX_ELEMENTS
    assert _common.MAX_HIDDEN_SIZE_EXCLUSIVE == adapter.MAX_COLUMNS
