"""Joining looked-up rows: values and gradients are those of concatenation, whatever buffers the rows come from."""

import pytest
import torch

from generative_recommenders.ops.encode import join_features

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 6


def look_up(buffer, features, history, candidates, context):
    """(history, candidates, others): views of one buffer, or tensors of their own."""
    sizes = [context] * 2 + [history] * features + [candidates] * features
    if buffer == "one":
        root = torch.randn(sum(sizes), WIDTH, device=DEVICE, requires_grad=True)
        roots, parts = [root], list((root * 1.0).split(sizes))
    elif buffer == "flat":  # as a look-up that returns one row of numbers
        root = torch.randn(sum(sizes) * WIDTH, device=DEVICE, requires_grad=True)
        roots, parts = [root], list((root * 1.0).view(-1, WIDTH).split(sizes))
    else:
        parts = roots = [torch.randn(n, WIDTH, device=DEVICE, requires_grad=True) for n in sizes]
    return roots, (parts[2 : 2 + features], parts[2 + features :], parts[:2])


def check(roots, parts, dtype):
    outs = [join_features(*parts, dtype, fused) for fused in (True, False)]
    flat = [[o.item, o.candidates, *o.others] + ([] if o.attributes is None else [o.attributes]) for o in outs]
    g = torch.Generator().manual_seed(1)
    ups = [torch.randn(t.shape, generator=g).to(t) for t in flat[1]]
    for a, b in zip(*flat, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    grads = [torch.autograd.grad(f, roots, ups, retain_graph=True, allow_unused=True) for f in flat]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b)


@pytest.mark.parametrize("buffer", ["one", "flat", "own"])
@pytest.mark.parametrize("features", [1, 2, 4])
@pytest.mark.parametrize("history,candidates,context", [(30, 5, 3), (0, 0, 0), (7, 0, 2), (0, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_join_equals_concatenation(buffer, features, history, candidates, context, dtype):
    check(*look_up(buffer, features, history, candidates, context), dtype)


def test_the_gradient_of_a_common_buffer_is_written_once():
    """No slices of it are concatenated or added on the way: the buffer's gradient comes straight from the function."""
    root = torch.randn(40, WIDTH, device=DEVICE, requires_grad=True)
    buffer = root * 1.0
    parts = buffer.split([3, 20, 10, 4, 3])
    joined = join_features(parts[1:2], parts[3:4], parts[:1], torch.float16, True)
    functions = {fn.name() for fn, _ in joined.item.grad_fn.next_functions if fn is not None}
    assert functions == {"MulBackward0"}
    (grad,) = torch.autograd.grad(joined.item.float().sum(), root)
    want = torch.zeros(40, WIDTH, device=DEVICE)
    want[3:23] = want[33:37] = 1
    assert torch.equal(grad, want)


def test_blocks_that_overlap_or_repeat():
    root = torch.randn(20, WIDTH, device=DEVICE, requires_grad=True)
    buffer = root * 1.0
    check([root], ([buffer[:8], buffer[4:12]], [buffer[2:5], buffer[2:5]], [buffer[:20]]), torch.float32)
    columns = torch.randn(9, 2 * WIDTH, device=DEVICE, requires_grad=True)
    other = columns * 1.0
    check([columns], ([other[:5, :WIDTH]], [other[5:, WIDTH:]], []), torch.float32)


def test_rows_without_gradient():
    with torch.no_grad():
        _, parts = look_up("one", 2, 5, 2, 1)
        fused, plain = (join_features(*parts, torch.float32, f) for f in (True, False))
    assert torch.equal(fused.item, plain.item) and not fused.item.requires_grad


@pytest.mark.gpu
def test_join_at_size():
    global WIDTH
    WIDTH = 512
    check(*look_up("one", 3, 50_000, 1000, 1000), torch.bfloat16)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("history, candidates, others", [
    ([(7, 8), (5, 8)], [(2, 8), (2, 8)], []),
    ([(7, 8), (7, 16)], [(2, 8), (2, 8)], []),
    ([(7, 8)], [(2, 16)], []),
    ([(7, 8)], [(2, 8)], [(3, 4)]),
])  # fmt: skip
def test_features_that_do_not_fit(history, candidates, others, fused):
    tensors = [[torch.zeros(shape, device=DEVICE) for shape in shapes] for shapes in (history, candidates, others)]
    with pytest.raises(ValueError, match="feature.* must be"):
        join_features(*tensors, torch.float32, fused)
