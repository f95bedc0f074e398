"""The explicit pair against float64 autograd: the reference, and Triton (interpreted where there is no GPU)."""

import itertools

import pytest
import torch

from generative_recommenders.ops.common.launch import RowLaunch
from generative_recommenders.ops.lmsd import hstu_lmsd_backward, hstu_lmsd_forward, launch
from generative_recommenders.ops.lmsd.contract import LmsdConfig

ROWS = (0, 1, 2, 3, 257, 4099)
WIDTHS = (8, 64, 96, 128, 256, 512, 768, 1024, 1536, 4096)
FLAGS = [
    dict(zip(("apply_u_silu", "concat_u", "concat_x"), values, strict=True))
    for values in itertools.product((True, False), repeat=3)
]
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter computes bfloat16 wrongly


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows,columns", [(n, 64) for n in ROWS] + [(3, d) for d in WIDTHS] + [(257, 512)])
def test_reference(lmsd_tools, rows, columns, dtype):
    lmsd_tools.check_pair(lmsd_tools.make_problem(rows, columns, dtype), "PYTORCH")


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("rows,columns,groups", [(5, 64, 1), (3, 96, 4)])
def test_reference_flags(lmsd_tools, rows, columns, groups, flags, ratio):
    problem = lmsd_tools.make_problem(rows, columns, groups=groups, padded=True)
    lmsd_tools.check_pair(problem, "PYTORCH", ratio, **flags)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    "rows,columns",
    [(0, 64), (1, 64), (2, 8), (3, 128), (257, 64), (257, 96), (33, 512), (5, 768), (3, 1024), (2, 4096)],
)
def test_triton(lmsd_tools, rows, columns, dtype):
    lmsd_tools.check_pair(lmsd_tools.make_problem(rows, columns, dtype, padded=rows % 2 == 1), "TRITON")


@pytest.mark.parametrize("compute_dweight,ratio", [(True, 0.0), (True, 0.3), (False, 0.3)])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("rows,columns,groups", [(5, 64, 1), (3, 96, 4)])
def test_triton_flags(lmsd_tools, rows, columns, groups, flags, ratio, compute_dweight):
    problem = lmsd_tools.make_problem(rows, columns, groups=groups)
    lmsd_tools.check_pair(problem, "TRITON", ratio, compute_dweight=compute_dweight, **flags)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", WIDTHS)
def test_triton_table_on_gpu(lmsd_tools, columns, dtype):
    for rows in ROWS:
        lmsd_tools.check_pair(lmsd_tools.make_problem(rows, columns, dtype, padded=rows == 257), "TRITON")


@pytest.mark.gpu
@pytest.mark.parametrize("flags", FLAGS)
def test_triton_flags_bf16_on_gpu(lmsd_tools, flags):
    for ratio in (0.0, 0.3):
        lmsd_tools.check_pair(lmsd_tools.make_problem(257, 512, torch.bfloat16), "TRITON", ratio, **flags)


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
@pytest.mark.parametrize("columns,groups", [(64, 2), (96, 4), (128, 8), (512, 4)])
def test_group_norm(lmsd_tools, columns, groups, backend):
    lmsd_tools.check_pair(lmsd_tools.make_problem(7, columns, groups=groups), backend)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0xDEADBEEF, 2**32])
def test_triton_seeds_and_row_numbers(lmsd_tools, seed):
    problem = lmsd_tools.make_problem(6, 64)
    rows = torch.tensor([0, 7, 2**31, 2**32 - 1, 2**32, 2**45 + 11], device=lmsd_tools.DEVICE)
    for given in (seed, torch.tensor([seed], device=lmsd_tools.DEVICE)):
        lmsd_tools.check_pair(problem, "TRITON", seed=given, row_indices=rows)


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_indexed_rows_get_the_masks_of_the_full_call(lmsd_tools, backend):
    problem = lmsd_tools.make_problem(40, 64)
    whole = hstu_lmsd_forward(*problem.tensors, dropout_ratio=0.5, seed=9, backend=backend)
    spaced = torch.tensor([[39, 0], [3, 1], [3, 2], [17, 3]], device=lmsd_tools.DEVICE)[:, 0]
    for rows in (spaced.int(), spaced.contiguous(), spaced):
        part = hstu_lmsd_forward(
            problem.x[rows], problem.u[rows], problem.weight, problem.bias,
            dropout_ratio=0.5, seed=9, row_indices=rows, backend=backend,
        )  # fmt: skip
        assert torch.equal(part.mask_tensor, whole.mask_tensor[rows])
        assert torch.equal(part.y_tensor, whole.y_tensor[rows])


@pytest.mark.parametrize("units,warps,programs", [(1, 1, 1), (2, 1, 3), (4, 2, 64), (16, 4, 2)])
def test_tile_shapes_draw_one_mask(lmsd_tools, units, warps, programs):
    """Any forced launch passes alone: same mask, same result to rounding, same gradients, none added twice."""
    problem = lmsd_tools.make_problem(37, 64)
    cfg = LmsdConfig(0.4, True, True, True)
    config = RowLaunch(64, units, warps, programs, vector=4)
    base = hstu_lmsd_forward(*problem.tensors, dropout_ratio=0.4, seed=5, backend="PYTORCH")
    y, mean, rstd, mask = launch.forward(*problem.tensors, 5, None, cfg, config)
    assert torch.equal(mask, base.mask_tensor)
    torch.testing.assert_close(y, base.y_tensor)
    flags = {"dropout_ratio": 0.4, "apply_u_silu": True, "concat_u": True, "concat_x": True}
    right = hstu_lmsd_backward(torch.ones_like(y), *problem.tensors, *base[1:], backend="PYTORCH", **flags)
    for _ in range(2):
        grads = launch.backward(torch.ones_like(y), *problem.tensors, mean, rstd, mask, cfg, True, config=config)
        for grad, wanted in zip(grads, right, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_dropped_elements_are_zero_both_ways(lmsd_tools, backend):
    problem = lmsd_tools.make_problem(16, 64)
    flags = {"dropout_ratio": 0.5, "apply_u_silu": False, "concat_u": True, "concat_x": True, "backend": backend}
    y, mean, rstd, mask = hstu_lmsd_forward(*problem.tensors, seed=1, **flags)
    kept = torch.cat([mask >> 2 & 1, mask >> 1 & 1, mask & 1], 1).bool()
    assert bool((y[~kept] == 0).all()) and bool((y[kept] != 0).all())
    dy = torch.zeros_like(y)
    dy[:, :64] = 1  # du is then exactly the keep scale of the u segment
    du = hstu_lmsd_backward(dy, *problem.tensors, mean, rstd, mask, **flags).du_tensor
    assert torch.equal(du != 0, kept[:, :64])


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_weight_gradients_repeat_to_the_bit(lmsd_tools, backend):
    problem = lmsd_tools.make_problem(67, 64)
    flags = {"dropout_ratio": 0.1, "apply_u_silu": True, "concat_u": True, "concat_x": True, "backend": backend}
    y, *saved = hstu_lmsd_forward(*problem.tensors, seed=1, dropout_ratio=0.1, backend=backend)
    first, second = (hstu_lmsd_backward(y, *problem.tensors, *saved, **flags) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
