"""The fused layer (interpreter on a CPU) against the same mathematics in float64, written out independently."""

import dataclasses
import itertools

import pytest
import torch

from generative_recommenders.modules import stu
from generative_recommenders.modules.stu import STULayer, STULayerConfig
from generative_recommenders.ops.attention import AttentionCall, Projection
from generative_recommenders.ops.common.philox import keep_decisions
from generative_recommenders.ops.stu import OutputParameters, reference
from tests.ops.attention.oracle import Case, Mask, attention_by_rows, targets_of

HEADS, D_QK, D_V, WIDTH, RATIO = 2, 16, 24, 40, 0.25
RECOMPUTE = ("recompute_normed_x", "recompute_uvqk", "recompute_y")
ALL = dict.fromkeys(RECOMPUTE, True)


def make_layer(**changes) -> STULayer:
    """A layer whose parameters are all away from their first values."""
    sizes = dict(embedding_dim=WIDTH, num_heads=HEADS, hidden_dim=D_V, attention_dim=D_QK, max_seq_len=64)
    layer = STULayer(STULayerConfig(**(sizes | dict(output_dropout_ratio=RATIO, backend="TRITON") | changes)))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


def norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias


def oracle(layer, x, offsets, targets, mask, seed):
    """Output, x and parameters in float64; dropout by the definition of its draws."""
    c = layer.config
    x = x.detach().double().requires_grad_()
    p = {name: t.detach().double().requires_grad_() for name, t in layer.named_parameters()}
    uvqk = norm(x, p["_input_norm_weight"], p["_input_norm_bias"]) @ p["_uvqk_weight"] + p["_uvqk_beta"]
    widths = [c.num_heads * d for d in (c.hidden_dim, c.hidden_dim, c.attention_dim, c.attention_dim)]
    u, v, q, k = uvqk.split(widths, dim=1)
    case = Case(*(t.unflatten(1, (c.num_heads, -1)) for t in (q, k, v)), None, offsets, targets, mask)
    attention = attention_by_rows(case, c.alpha, float(layer.attention_normaliser(offsets))).flatten(1)
    a = u / (1 + torch.exp(-u))
    segments = (a, attention, norm(attention, p["_output_norm_weight"], p["_output_norm_bias"]) * a)
    if layer.training and c.output_dropout_ratio > 0:
        rows, ratio = torch.arange(x.shape[0]), c.output_dropout_ratio
        kept = [keep_decisions(rows, u.shape[1], seed, segment, ratio) / (1 - ratio) for segment in (2, 1, 0)]
        segments = [s * scale for s, scale in zip(segments, kept, strict=True)]
    return x + torch.cat(list(segments), dim=1) @ p["_output_weight"], x, p


MANY = Mask("many", "many")


def check(layer, lengths, mask=MANY, dtype=torch.float32, rtol=1e-4, atol=1e-4, strided=False):
    generator = torch.Generator().manual_seed(11)
    rows, c = sum(lengths), layer.config
    x = torch.randn(rows, 2 * c.embedding_dim, generator=generator)[:, :: 2 if strided else 1][:, : c.embedding_dim]
    d_out = torch.randn(rows, c.embedding_dim, generator=generator)
    offsets, targets = torch.tensor([0, *lengths]).cumsum(0), targets_of(lengths, mask.targets, mask.context, generator)
    layer = layer.to(dtype)
    x, d_out = x.to(dtype).detach().requires_grad_(), d_out.to(dtype)
    torch.manual_seed(5)
    seed = int(layer.next_dropout_seed(x.device))
    torch.manual_seed(5)
    got = layer(x, offsets, max(lengths, default=0), targets)
    got.backward(d_out)
    want, wide_x, wide = oracle(layer, x, offsets, targets, mask, seed)
    want.backward(d_out.double())
    pairs = [("out", got, want), ("dx", x.grad, wide_x.grad)]
    pairs += [(name, p.grad, wide[name].grad) for name, p in layer.named_parameters()]
    for name, a, b in pairs:
        scale = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol * max(scale, 1.0), msg=lambda m: f"{name}: {m}")  # noqa: B023
    return got, {name: a for name, a, _ in pairs}


@pytest.fixture(autouse=True)
def fused_only(monkeypatch):
    """The tests here would also pass on the composition."""

    def refuse(*_, **__):
        raise AssertionError("the layer was composed, not fused")

    monkeypatch.setattr(stu, "hstu_preprocess_attention", refuse)


@pytest.mark.parametrize("ratio", [0.0, 0.5])  # exact in the fp32 that the oracle scales with
def test_the_reference_is_the_mathematics(ratio):
    layer = make_layer(output_dropout_ratio=ratio).double()
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(27, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    offsets, targets = torch.tensor([0, 19, 27]), torch.tensor([3, 1])
    p = dict(layer.named_parameters())
    got = reference.hstu_layer(
        x,
        layer._uvqk_parameters(),
        OutputParameters(*(p[f"_output_{name}"] for name in ("norm_weight", "norm_bias", "weight"))),
        layer.projection,
        AttentionCall(offsets, 19, layer.config.alpha, layer.attention_normaliser(offsets), targets),
        ratio,
        99,
    )
    want, wide_x, wide = oracle(layer, x, offsets, targets, MANY, 99)
    torch.testing.assert_close(got, want)
    grads = torch.autograd.grad(got.square().sum(), [x, *p.values()])
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), [wide_x, *wide.values()]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)))
def test_every_recompute_combination(flags):
    check(make_layer(**dict(zip(RECOMPUTE, flags, strict=True))), [19, 0, 1, 33])


@pytest.mark.parametrize("flags", [(False,) * 3, (True,) * 3])
def test_half_precision(flags):
    layer = make_layer(attention_dim=24, **dict(zip(RECOMPUTE, flags, strict=True)))
    check(layer, [9, 0, 21], dtype=torch.float16, rtol=0.02, atol=6e-3)


@pytest.mark.parametrize(
    "changes, mask",
    [
        (dict(attention_dim=32, hidden_dim=16), Mask("one", "one")),  # dy lives in grad's free columns
        (dict(attention_dim=8, hidden_dim=32), Mask("causal")),  # and has no room there
        (dict(max_attn_len=6, contextual_seq_len=3), Mask("all", "many", window=6, context=3)),
        (dict(causal=False), Mask("both", "many", causal=False)),
        (dict(attn_norm="batch_max", output_dropout_ratio=0.0), Mask("only", "all")),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_shapes_and_masks(changes, mask, recompute):
    check(make_layer(**changes, **dict.fromkeys(RECOMPUTE, recompute)), [20, 17, 2], mask)


def test_strided_rows():
    check(make_layer(), [18, 3], strided=True)


def test_evaluation_has_no_dropout():
    check(make_layer().eval(), [18, 3])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("recompute", [False, True])
def test_empty_batches_have_zero_gradients(lengths, recompute):
    layer = make_layer(**dict.fromkeys(RECOMPUTE, recompute))
    out, results = check(layer, lengths, Mask("none"))
    assert out.shape == (0, WIDTH)
    for name, _ in layer.named_parameters():
        assert torch.equal(results[name], torch.zeros_like(results[name])), name


def test_fused_equals_composed(monkeypatch):
    """Same mask, same mathematics; only sums may round differently."""
    layer = make_layer(**ALL)
    _, fused = check(layer, [19, 5])
    monkeypatch.undo()
    monkeypatch.setattr(stu, "why_not_fused", lambda *_: "not wanted")
    layer.zero_grad()
    _, composed = check(layer, [19, 5])
    for name, a in fused.items():
        torch.testing.assert_close(a, composed[name], rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)))
def test_what_is_kept(flags):
    layer, rows = make_layer(**dict(zip(RECOMPUTE, flags, strict=True))), 41
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(rows, WIDTH, requires_grad=True), torch.tensor([0, rows]), rows)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.shape[:1] == (rows,)}
    normed, uvqk, y = (0 if flag else 1 for flag in flags)
    u = HEADS * D_V
    floats = WIDTH + u + u + normed * WIDTH + uvqk * (u + 2 * HEADS * D_QK) + y * 3 * u + 4
    assert sum(sizes.values()) == rows * (4 * floats + u)


def test_a_second_backward_works_if_the_graph_was_retained():
    layer, x = make_layer(), torch.randn(20, WIDTH, requires_grad=True)
    out = layer(x, torch.tensor([0, 20]), 20).square().sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


def test_parameters_keep_their_dtype():
    layer = make_layer()
    x = torch.randn(20, WIDTH).half().requires_grad_()
    out = layer(x, torch.tensor([0, 20]), 20)
    out.float().square().sum().backward()
    assert out.dtype == x.grad.dtype == torch.float16
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_upstream_gradients_of_any_stride():
    layer, x = make_layer(), torch.randn(20, WIDTH, requires_grad=True)
    grads = []
    for d_out in (torch.ones(20, 1).expand(20, WIDTH), torch.ones(20, WIDTH)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(layer(x, torch.tensor([0, 20]), 20), x, d_out)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(use_group_norm=True), "group norm"),
        (dict(backend="PYTORCH"), "attention runs on PYTORCH"),
        (dict(num_heads=1, hidden_dim=12), "not multiples of 8"),
    ],
)
def test_why_not_fused(changes, reason):
    c = dataclasses.replace(make_layer().config, **changes)
    projection = Projection(c.num_heads, c.attention_dim, c.hidden_dim)
    assert reason in stu.why_not_fused(torch.randn(3, WIDTH), projection, c.use_group_norm, c.backend)


def test_lmsd_on_another_backend_is_composed(monkeypatch):
    monkeypatch.setenv("HSTU_ATTENTION_BACKEND", "TRITON")
    monkeypatch.setenv("HSTU_LMSD_BACKEND", "PYTORCH")
    assert stu.why_not_fused(torch.randn(3, WIDTH), make_layer().projection) == "LMSD runs on PYTORCH"


def test_wrong_shapes_are_named():
    layer = make_layer()
    with pytest.raises(ValueError, match="uvqk_weight"):
        layer(torch.randn(3, WIDTH + 8), torch.tensor([0, 3]), 3)
