"""LayerNorm kernels (interpreter on a CPU) and their launches, against float64."""

import pytest
import torch

from generative_recommenders.ops.common.launch import RowLaunch, row_launch

pytest.importorskip("triton")
from generative_recommenders.ops.common.triton_layer_norm import normalize, normalize_backward  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows, width", [(0, 8), (1, 8), (70, 40), (33, 600)])
def test_both_ways_equal_float64(rows, width, residual):
    g = torch.Generator().manual_seed(0)
    x, dy, added = (torch.randn(rows, width, generator=g).to(DEVICE) for _ in range(3))
    weight, bias = torch.randn(2, width, generator=g).to(DEVICE).unbind()
    x = torch.cat([x + 3, x], dim=1)[:, :width]  # rows of a wider buffer, their mean far from zero
    copy = torch.empty_like(x)
    y, mean, rstd = normalize(x, weight, bias, 1e-5, torch.float32, copy)
    got = normalize_backward(x, dy, weight, mean, rstd, added if residual else None)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    centred = leaves[0] - leaves[0].mean(1, keepdim=True)
    want = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * leaves[1] + leaves[2]
    dx, d_weight, d_bias = torch.autograd.grad(want, leaves, dy.double())
    assert torch.equal(copy, x)
    pairs = (y, want), (got[0], dx + added if residual else dx), (got[1], d_weight), (got[2], d_bias)
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width, rows, warps, programs", [(200, 2, 1, 16), (512, 1, 1, 16), (4096, 1, 8, 2)])
def test_a_warp_has_512_columns(width, rows, warps, programs):
    launch = row_launch(width, torch.device("cuda"), resident=16)
    assert launch == RowLaunch(1 << (width - 1).bit_length(), rows, warps, programs, 128)
    assert launch.options()["num_warps"] == warps


def test_no_program_is_without_a_tile():
    launch, cpu = RowLaunch(8, rows=4, warps=1, programs=3), torch.device("cpu")
    assert [launch.grid(rows, cpu) for rows in (0, 1, 5, 100)] == [(0,), (1,), (2,), (3,)]
