"""The STU layer against an independent dense float64 formula: forward and every gradient, over a table of shapes."""

import math

import pytest
import torch

from generative_recommenders.modules.stu import STULayer, STULayerConfig, STUStack


def config(**changes):
    sizes = dict(
        embedding_dim=16,
        num_heads=2,
        hidden_dim=8,
        attention_dim=8,
        max_seq_len=32,
        output_dropout_ratio=0.0,
        backend="PYTORCH",
    )
    return STULayerConfig(**(sizes | changes))


def randomise(layer, seed=0):
    """Every parameter away from its special first value (ones, zeros)."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.3)
    return layer


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)


def norm(x, weight, bias, eps=1e-6):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def visible(length, candidates, c):
    """Row i sees row j, written from the definition, one pair at a time."""
    prefix, window = c.contextual_seq_len, c.max_attn_len
    id_max = (length - prefix + 1 if prefix else length) - candidates
    ids = [min(max(r - prefix + 1, 0) if prefix else r, id_max) for r in range(length)]
    mask = torch.zeros(length, length, dtype=torch.float64)
    for i in range(length):
        for j in range(length):
            distance = ids[i] - ids[j] if c.causal else abs(ids[i] - ids[j])
            sees = i == j or (distance > 0 and (window == 0 or distance <= window))
            sees = sees or (prefix > 0 and ids[i] == 0 and ids[j] < id_max)
            mask[i, j] = float(sees)
    return mask


def dense_layer(x, p, lengths, targets, c, normaliser):
    """One layer, one sequence at a time, in the dtype of x."""
    out = []
    widths = [c.num_heads * d for d in (c.hidden_dim, c.hidden_dim, c.attention_dim, c.attention_dim)]
    for rows, candidates in zip(x.split(lengths), targets, strict=True):
        length = rows.shape[0]
        normed = norm(rows, p["_input_norm_weight"], p["_input_norm_bias"])
        u, v, q, k = (normed @ p["_uvqk_weight"] + p["_uvqk_beta"]).split(widths, dim=1)
        mask = visible(length, candidates, c)
        heads = []
        for h in range(c.num_heads):
            q_h, k_h, v_h = (t.unflatten(1, (c.num_heads, -1))[:, h] for t in (q, k, v))
            scores = q_h @ k_h.T * c.alpha
            heads.append(scores * torch.sigmoid(scores) * mask / normaliser @ v_h)
        y = torch.cat(heads, dim=1)
        a = u * torch.sigmoid(u)
        if c.use_group_norm:
            normed_y = [
                norm(head, p["_output_norm_weight"][h], p["_output_norm_bias"][h]) for h, head in enumerate(heads)
            ]
            normed_y = torch.cat(normed_y, dim=1)
        else:
            normed_y = norm(y, p["_output_norm_weight"], p["_output_norm_bias"])
        out.append(rows + torch.cat([a, y, normed_y * a], dim=1) @ p["_output_weight"])
    return torch.cat(out) if out else x


SHAPES = {
    "one sequence": ([7], [1], {}),
    "ragged": ([9, 4, 12, 1], [1, 1, 1, 1], {}),
    "several candidates": ([9, 8, 12], [3, 5, 1], {}),
    "only candidates": ([4, 2], [4, 2], {}),
    "no candidates": ([6, 3], [0, 0], {}),
    "empty sequences": ([0, 7, 0, 1], [0, 1, 0, 1], {}),
    "three heads, d_qk != d_v": ([9, 5], [2, 1], dict(num_heads=3, attention_dim=4, embedding_dim=12)),
    "window": ([20, 11], [2, 1], dict(max_attn_len=4)),
    "contextual prefix": ([14, 9], [2, 3], dict(contextual_seq_len=3)),
    "window and prefix": ([20, 13], [2, 3], dict(contextual_seq_len=3, max_attn_len=5)),
    "not causal": ([9, 6], [1, 2], dict(causal=False)),
    "not target-aware": ([9, 6], [1, 2], dict(target_aware=False)),
    "own alpha": ([9, 6], [1, 2], dict(attn_alpha=0.7)),
    "group norm": ([9, 6], [1, 2], dict(use_group_norm=True)),
    "batch_max": ([9, 6], [1, 2], dict(attn_norm="batch_max")),
}


def compare(lengths, targets, changes, dtype, tolerance):
    layer = randomise(STULayer(config(**changes))).to(dtype)
    c = layer.config
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), c.embedding_dim, generator=g, dtype=torch.float64)
    dy = torch.randn(x.shape, generator=g, dtype=torch.float64)

    wide = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    wide_x = x.clone().requires_grad_()
    normaliser = max(lengths) if c.attn_norm == "batch_max" else c.max_seq_len
    seen = targets if c.target_aware else [0] * len(targets)
    want = dense_layer(wide_x, wide, lengths, seen, c, normaliser)
    want.backward(dy)

    x = x.to(dtype).requires_grad_()
    got = layer(x, offsets_of(lengths), max(lengths), torch.tensor(targets))
    got.backward(dy.to(dtype))
    pairs = [("y", got, want), ("dx", x.grad, wide_x.grad)]
    pairs += [(name, p.grad, wide[name].grad) for name, p in layer.named_parameters()]
    for name, a, b in pairs:
        error = (a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("lengths,targets,changes", SHAPES.values(), ids=list(SHAPES))
def test_layer_equals_the_dense_formula_in_float64(lengths, targets, changes):
    compare(lengths, targets, changes, torch.float64, 1e-12)


@pytest.mark.parametrize("name", ["ragged", "several candidates", "empty sequences", "group norm"])
def test_layer_equals_the_dense_formula_in_float32(name):
    compare(*SHAPES[name], torch.float32, 2e-5)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_rows_with_float32_parameters(autocast):
    torch.manual_seed(3)  # the weights, too: with about one draw in seven some gradient is beyond the bound
    layer = randomise(STULayer(config()))
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    want, gradients = run(layer, x, [9, 7], [1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got, rough = run(layer, x.bfloat16(), [9, 7], [1, 2])
    assert got.dtype == torch.bfloat16
    assert rough[0].dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in rough[1:])
    for a, b in zip([got, *rough], [want, *gradients], strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


def run(layer, x, lengths, targets, bound=None):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(5)
    y = layer(x, offsets_of(lengths), bound or max(lengths), torch.tensor(targets))
    (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
    return y.detach(), [x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("flags", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_recomputing_changes_no_bit(flags):
    x = torch.randn(16, 16)
    names = ("recompute_normed_x", "recompute_uvqk", "recompute_y")
    keeps = config(output_dropout_ratio=0.4, **dict.fromkeys(names, False))
    redoes = config(output_dropout_ratio=0.4, **dict(zip(names, map(bool, flags), strict=True)))
    layer = randomise(STULayer(keeps))
    other = STULayer(redoes)
    other.load_state_dict(layer.state_dict())
    y, gradients = run(layer, x, [9, 0, 7], [1, 0, 2])
    same_y, same_gradients = run(other, x, [9, 0, 7], [1, 0, 2])
    assert torch.equal(y, same_y)
    for a, b in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("recompute", [True, False])
def test_recomputed_y_is_not_kept(recompute):
    layer = STULayer(config(recompute_y=recompute))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        layer(torch.randn(9, 16, requires_grad=True), offsets_of([9]), 9)
    assert ((9, 3 * 16) in kept) is not recompute


def test_the_upper_bound_of_lengths_changes_nothing():
    layer = randomise(STULayer(config()))
    x = torch.randn(16, 16)
    assert torch.equal(run(layer, x, [9, 7], [1, 2])[0], run(layer, x, [9, 7], [1, 2], bound=30)[0])


# ---- Empty jagged tensors ----


@pytest.mark.parametrize("lengths", [[0, 0, 0], []], ids=["all empty", "no sequences"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, dict(attn_norm="batch_max"), dict(use_group_norm=True, recompute_y=False)])
def test_a_batch_without_rows(lengths, dtype, changes):
    stack = STUStack([STULayer(config(output_dropout_ratio=0.1, **changes)) for _ in range(2)])
    x = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
    y = stack(x, offsets_of(lengths), 0, torch.zeros(len(lengths), dtype=torch.int64))
    assert y.shape == (0, 16) and y.dtype == dtype
    y.sum().backward()
    assert x.grad.shape == (0, 16)
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_empty_neighbours_change_no_bit():
    layer = randomise(STULayer(config()))
    x = torch.randn(8, 16)
    alone, gradients = run(layer, x, [7, 1], [1, 1])
    among, same_gradients = run(layer, x, [0, 7, 0, 1], [0, 1, 0, 1])
    assert torch.equal(alone, among)
    for a, b in zip(gradients, same_gradients, strict=True):
        assert torch.equal(a, b)


# ---- The attention divisor ----


@pytest.mark.parametrize("neighbour", [64, 4096])
def test_a_score_does_not_depend_on_the_neighbours_length(neighbour):
    layer = randomise(STULayer(config(max_seq_len=4096))).eval()
    a = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = layer(a, offsets_of([40]), 40, torch.tensor([1]))
        b = torch.randn(neighbour, 16)
        among = layer(torch.cat([a, b]), offsets_of([40, neighbour]), neighbour, torch.tensor([1, 1]))[:40]
    torch.testing.assert_close(among, alone, rtol=1e-5, atol=1e-6)


def test_batch_max_is_what_makes_a_score_depend_on_the_neighbours():
    layer = randomise(STULayer(config(attn_norm="batch_max"))).eval()
    a, b = torch.randn(10, 16), torch.randn(30, 16)
    with torch.no_grad():
        alone = layer(a, offsets_of([10]), 10, torch.tensor([1]))
        among = layer(torch.cat([a, b]), offsets_of([10, 30]), 30, torch.tensor([1, 1]))[:10]
    assert (among - alone).abs().max() > 1e-3


def test_the_divisor_is_the_configurations_constant_whatever_the_batch():
    layer = STULayer(config(max_seq_len=77))
    for lengths in ([], [0], [3], [5, 70]):
        assert layer.attention_normaliser(offsets_of(lengths)) == 77.0
    batch_max = STULayer(config(attn_norm="batch_max"))
    got = [float(batch_max.attention_normaliser(offsets_of(lengths))) for lengths in ([], [0], [3], [5, 70])]
    assert got == [1.0, 1.0, 3.0, 70.0]


def test_the_divisor_survives_saving_and_evaluation(tmp_path):
    layer = randomise(STULayer(config()))
    x = torch.randn(9, 16)
    torch.save({"config": layer.config, "weights": layer.state_dict()}, tmp_path / "layer.pt")
    saved = torch.load(tmp_path / "layer.pt", weights_only=False)
    loaded = STULayer(saved["config"])
    loaded.load_state_dict(saved["weights"])
    trained = layer(x, offsets_of([9]), 9, torch.tensor([1]))
    evaluated = loaded.eval()(x, offsets_of([9]), 30, torch.tensor([1]))
    assert loaded.config.max_seq_len == 32
    assert torch.equal(trained, evaluated)


# ---- Randomness and modes ----


def test_each_training_forward_draws_one_seed_and_evaluation_none():
    layer = STULayer(config(output_dropout_ratio=0.5))
    x, offsets = torch.randn(9, 16), offsets_of([9])
    torch.manual_seed(3)
    layer(x, offsets, 9)
    after_forward = torch.get_rng_state()
    torch.manual_seed(3)
    layer.next_dropout_seed(x.device)
    assert torch.equal(after_forward, torch.get_rng_state())
    layer.eval()(x, offsets, 9)
    assert torch.equal(after_forward, torch.get_rng_state())


def test_dropout_follows_the_generator_and_is_off_in_evaluation():
    layer = randomise(STULayer(config(output_dropout_ratio=0.5)))
    x = torch.randn(9, 16)
    first, again = run(layer, x, [9], [1])[0], run(layer, x, [9], [1])[0]
    assert torch.equal(first, again)
    other = layer(x, offsets_of([9]), 9, torch.tensor([1]))
    assert not torch.equal(first, other)
    layer.eval()
    assert torch.equal(run(layer, x, [9], [1])[0], layer(x, offsets_of([9]), 9, torch.tensor([1])))


def test_output_rows_alone_keep_the_masks_of_the_full_batch():
    layer = randomise(STULayer(config(output_dropout_ratio=0.5)))
    x, u, attention = (torch.randn(12, 16) for _ in range(3))
    rows = torch.tensor([11, 3, 7])
    full = layer.output(x, u, attention, seed=9)
    some = layer.output(x[rows], u[rows], attention[rows], 9, row_indices=rows)
    torch.testing.assert_close(some, full[rows])


def test_a_layer_built_for_inference_refuses_to_train():
    layer = STULayer(config(is_inference=True))
    with pytest.raises(ValueError, match="is_inference=True"):
        layer(torch.randn(3, 16), offsets_of([3]), 3)
    assert layer.eval()(torch.randn(3, 16), offsets_of([3]), 3).shape == (3, 16)


def test_first_values():
    layer = STULayer(config())
    for name, want in (("_uvqk_beta", 0), ("_input_norm_bias", 0), ("_output_norm_bias", 0)):
        assert torch.equal(getattr(layer, name), torch.full_like(getattr(layer, name), want))
    for name in ("_input_norm_weight", "_output_norm_weight"):
        assert torch.equal(getattr(layer, name), torch.ones_like(getattr(layer, name)))
    for weight in (layer._uvqk_weight, layer._output_weight):
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.9 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(num_heads=0), "num_heads=0"),
        (dict(max_attn_len=-1), "max_attn_len=-1"),
        (dict(output_dropout_ratio=1.0), "output_dropout_ratio=1.0"),
        (dict(attn_norm="longest"), "attn_norm='longest'"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
