"""bf16 on a GPU: error against float64 next to plain PyTorch's own, poisoned buffers, no recompilation."""

import pytest
import torch

from generative_recommenders.ops.attention import UvqkParameters
from generative_recommenders.ops.candidate_attention import backends, candidate_attention

from .conftest import Case, outputs_and_gradients, relative_errors

pytestmark = pytest.mark.gpu
CASES = {
    "one": Case((700, 33, 1, 64, 65, 128), (1,) * 6, width=512, heads=4, qk=128, v=128, norm=256.0),
    "several": Case((300, 0, 33, 70, 5), (10, 0, 5, 33, 2), width=512, heads=4, qk=128, v=128, norm=256.0),
    "narrow": Case((300, 20), (1, 1), width=96, heads=2, qk=32, v=64, norm=100.0),
    "wide": Case((100, 20), (1, 1), width=1024, heads=4, qk=64, v=64, norm=100.0),
}


def compute(case, dtype, computation, backend):
    x, offsets, targets, parameters, grads = case.inputs(torch.float64)
    offsets, targets = offsets.cuda(), targets.cuda()

    def op(x, p):
        return candidate_attention(x, offsets, targets, UvqkParameters(*p), *case.shape, computation, backend)

    cast = lambda tensors: [t.to("cuda", dtype) for t in tensors]  # noqa: E731
    return outputs_and_gradients(op, cast([x])[0], cast(parameters), cast(grads))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_float64(name, dtype):
    case = CASES[name]
    if backends.why_not_absorbed(case.width, dtype, case.heads):
        pytest.skip("rows too wide for shared memory")
    want = compute(case, torch.float64, "materialised", "PYTORCH")
    ours = relative_errors(compute(case, dtype, "absorbed", "TRITON"), want)
    if dtype == torch.float32:
        assert max(ours.values()) <= 1e-5, ours
        return
    plain = relative_errors(compute(case, dtype, "materialised", "PYTORCH"), want)
    assert all(ours[part] <= 2 * plain[part] for part in ours), (ours, plain)


def test_materialised():
    case = CASES["one"]
    want = compute(case, torch.float64, "materialised", "PYTORCH")
    ours = relative_errors(compute(case, torch.bfloat16, "materialised", "TRITON"), want)
    plain = relative_errors(compute(case, torch.bfloat16, "materialised", "PYTORCH"), want)
    assert all(ours[part] <= 2 * plain[part] for part in ours), (ours, plain)


def test_repeats_are_bit_equal():
    """Nothing is summed in an order that the launch decides, and nothing that was not written is read."""
    case = CASES["one"]
    first = compute(case, torch.bfloat16, "absorbed", "TRITON")
    junk = torch.full((64 * 2**20,), float("nan"), device="cuda")
    del junk
    again = compute(case, torch.bfloat16, "absorbed", "TRITON")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_recompilation_for_24_lengths():
    from generative_recommenders.ops.candidate_attention import triton_absorbed

    kernels = (triton_absorbed.absorbed_forward_kernel, triton_absorbed.absorbed_backward_kernel)
    compiled = lambda: [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]  # noqa: E731
    sizes = dict(width=512, heads=4, qk=128, v=128)
    compute(Case((64, 30), (1, 1), **sizes), torch.bfloat16, "absorbed", "TRITON")
    before = compiled()
    for longest in range(100, 2500, 100):
        compute(Case((longest, 1 + longest // 7, 16), (1, 1, 1), **sizes), torch.bfloat16, "absorbed", "TRITON")
    assert compiled() == before
