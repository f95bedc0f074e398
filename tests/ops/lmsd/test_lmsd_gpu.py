"""What only a GPU shows: graphs, streams, recompiles, offsets past 2**31."""

import pytest
import torch

from generative_recommenders.ops.lmsd import hstu_lmsd, hstu_lmsd_backward, hstu_lmsd_forward

pytestmark = pytest.mark.gpu


def test_captured_graph_draws_anew_at_each_replay(lmsd_tools):
    leaves = [t.requires_grad_() for t in lmsd_tools.make_problem(257, 64, torch.bfloat16).tensors]
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step():
        seed.add_(1)
        y = hstu_lmsd(*leaves, dropout_ratio=0.5, seed=seed)
        return y, torch.autograd.grad(y, leaves, torch.ones_like(y))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads = step()
    for value in (100, 200):
        seed.fill_(value)
        graph.replay()
        right = hstu_lmsd(*leaves, dropout_ratio=0.5, seed=value + 1)
        assert torch.equal(y, right)
        for a, b in zip(grads, torch.autograd.grad(right, leaves, torch.ones_like(right)), strict=True):
            assert torch.equal(a, b)


def test_two_streams(lmsd_tools):
    problems = [lmsd_tools.make_problem(4099, 256, torch.bfloat16, seed=i) for i in range(2)]
    right = [hstu_lmsd_forward(*p.tensors, seed=3) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    for given in (streams, [s.cuda_stream for s in streams]):
        for _ in range(5):
            results = [hstu_lmsd_forward(*p.tensors, seed=3, stream=s) for p, s in zip(problems, given, strict=True)]
        torch.cuda.synchronize()
        for a, b in zip(results, right, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_rows_strides_and_seeds_never_recompile(lmsd_tools):
    from generative_recommenders.ops.lmsd.triton_kernels import lmsd_backward_kernel, lmsd_forward_kernel

    def compiled():
        return [
            len(k.device_caches[torch.cuda.current_device()][0]) for k in (lmsd_forward_kernel, lmsd_backward_kernel)
        ]

    def run(rows, seed, padded, ratio=0.1):
        problem = lmsd_tools.make_problem(rows, 128, torch.bfloat16, padded=padded)
        y, *saved = hstu_lmsd_forward(*problem.tensors, seed=seed, dropout_ratio=ratio)
        flags = {"apply_u_silu": True, "concat_u": True, "concat_x": True, "dropout_ratio": ratio}
        hstu_lmsd_backward(y, *problem.tensors, *saved, **flags)

    run(16, 0, False)
    before = compiled()
    for rows in (1, 2, 7, 16, 1000, 4099):
        for seed in (0, 1, 16, -1, 2**31, 2**63 - 1, -(2**63)):
            run(rows, seed, rows % 2 == 1)
    run(3, 5, False, ratio=0.7)
    assert compiled() == before


@pytest.mark.parametrize("columns", [512])
def test_offsets_past_two_to_the_31(columns):
    """1.5 M rows of 3 * 512: the last rows equal the same rows run alone under their row numbers."""
    rows, last = 1_500_000, 1000
    x, u = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.randn(columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert rows * 3 * columns > 2**31
    flags = {"apply_u_silu": True, "concat_u": True, "concat_x": True, "dropout_ratio": 0.1}
    whole = hstu_lmsd_forward(x, u, weight, bias, seed=4)
    dy = whole.y_tensor.roll(1, 1)
    grads = hstu_lmsd_backward(dy, x, u, weight, bias, *whole[1:], **flags)
    part = (x[-last:], u[-last:], weight, bias)
    alone = hstu_lmsd_forward(*part, seed=4, row_indices=torch.arange(rows - last, rows, device="cuda"))
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[-last:], b)
    some = hstu_lmsd_backward(dy[-last:], *part, *alone[1:], **flags)
    assert torch.equal(grads.dx_tensor[-last:], some.dx_tensor)
    assert torch.equal(grads.du_tensor[-last:], some.du_tensor)


def test_masks_equal_the_reference_at_tall_rows():
    from generative_recommenders.ops.lmsd import reference

    rows = torch.tensor([0, 1_398_102, 2_796_203, 2**31 + 1, 2**32 - 1, 2**32, 2**41], device="cuda")
    for columns in (96, 512, 1536):
        x = torch.randn(rows.numel(), columns, device="cuda")
        saved = hstu_lmsd_forward(
            x, x.clone(), x[0].clone(), x[1].clone(), seed=-9, dropout_ratio=0.5, row_indices=rows
        )
        assert torch.equal(saved.mask_tensor, reference.draw_mask(rows, columns, -9, 0.5, True, True))
