"""The fused layer on a GPU at a middling shape: bf16 errors against float64, repeats, and no stray kernels."""

import pytest
import torch

from generative_recommenders.modules.stu import STULayer, STULayerConfig

pytestmark = pytest.mark.gpu

LENGTHS, TARGETS = [300, 0, 1, 64, 777, 129], [1, 0, 1, 3, 1, 20]
WIDTH = 256


def make_layer(width, recompute, backend="TRITON", **changes) -> STULayer:
    config = STULayerConfig(
        embedding_dim=WIDTH, num_heads=2, hidden_dim=width, attention_dim=width, max_seq_len=800,
        recompute_normed_x=recompute, recompute_uvqk=recompute, recompute_y=recompute, backend=backend, **changes,
    )  # fmt: skip
    layer = STULayer(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return layer.cuda()


def run(layer, autocast=True):
    """{name: tensor} of the output and all gradients; equal inputs and equal dropout seed for every layer."""
    generator = torch.Generator().manual_seed(2)
    dtype = torch.bfloat16 if autocast else torch.float64
    x, d_out = (torch.randn(sum(LENGTHS), WIDTH, generator=generator).bfloat16().cuda().to(dtype) for _ in range(2))
    offsets, targets = torch.tensor([0, *LENGTHS]).cumsum(0).cuda(), torch.tensor(TARGETS).cuda()
    x.requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = layer(x, offsets, max(LENGTHS), targets)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return dict(zip(("out", "dx", *names), (out, *torch.autograd.grad(out, (x, *parameters), d_out)), strict=True))


def error(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float(((a - b).norm() / b.norm()).nan_to_num(nan=float("inf")))


@pytest.mark.parametrize("width", [128, 32])  # a Hopper GPU's own kernels take the first
@pytest.mark.parametrize("recompute", [False, True])
def test_error_is_at_most_twice_that_of_pytorch(width, recompute):
    want = run(make_layer(width, recompute, "PYTORCH").double(), autocast=False)
    theirs = run(make_layer(width, recompute, "PYTORCH"))
    ours, again = (run(make_layer(width, recompute)) for _ in range(2))
    for name, b in want.items():
        assert torch.equal(ours[name], again[name]), name
        assert error(ours[name], b) <= 2 * error(theirs[name], b) + 1e-4, name


def test_x_is_not_copied_for_the_residual():
    layer = make_layer(128, False)
    run(layer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(layer)
        torch.cuda.synchronize()
    assert not [event.key for event in profile.key_averages() if "Memcpy DtoD" in event.key]
