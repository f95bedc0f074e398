"""Encoders, postprocessors, heads and the small layers, each against its definition."""

import datetime
import math

import pytest
import torch

from generative_recommenders.modules.action_encoder import ActionEncoder
from generative_recommenders.modules.layers import LayerNorm, SwishLayerNorm, swish_mlp
from generative_recommenders.modules.multitask import MultitaskHead, TaskConfig, task_labels, task_loss
from generative_recommenders.modules.postprocessors import TimestampPostprocessor, make_postprocessor
from generative_recommenders.modules.preprocessor import ContextualPreprocessor, EventRows
from generative_recommenders.modules.stu import STULayer, STULayerConfig, STUStack
from generative_recommenders.modules.transducer import HSTUTransducer


def test_swish_layer_norm():
    layer = SwishLayerNorm(6)
    with torch.no_grad():
        layer.weight.uniform_(), layer.bias.uniform_()
    x = torch.randn(5, 6)
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), x * torch.sigmoid(normed * layer.weight + layer.bias))


@pytest.mark.parametrize("layer", [LayerNorm(8), SwishLayerNorm(8)])
def test_norms_keep_the_dtype_inside_autocast(layer):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert layer(torch.randn(2, 8)).dtype == torch.float32


def test_mlp_first_values():
    mlp = swish_mlp(10, 20, 5)
    for linear in (mlp[0], mlp[2]):
        bound = math.sqrt(6 / sum(linear.weight.shape))
        assert 0.8 * bound < linear.weight.abs().max() <= bound
        assert torch.equal(linear.bias, torch.zeros_like(linear.bias))


# ---- Action encoder ----


def test_action_bits_are_encoded_one_by_one():
    encoder = ActionEncoder((1, 2, 4), 3, 7, 5)
    bits = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    rows = [
        torch.cat([encoder.action_embedding[i] * float(b & w > 0) for i, w in enumerate((1, 2, 4))])
        for b in bits.tolist()
    ]
    rows += [encoder.target_action_embedding[0]] * 2
    torch.testing.assert_close(encoder(bits, 2), encoder.mlp(torch.stack(rows)))


def test_an_action_weight_may_have_several_bits():
    encoder = ActionEncoder((3, 4), 2, 4, 4)
    out = encoder(torch.tensor([1, 2, 3, 4]), 0)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2]) and not torch.equal(out[0], out[3])


def test_action_encoder_gradients_equal_the_row_by_row_ones():
    encoder = ActionEncoder((1, 2), 2, 4, 3).double()
    bits, weight = torch.randint(0, 4, (9,)), torch.randn(11, 3, dtype=torch.float64)
    got = torch.autograd.grad((encoder(bits, 2) * weight).sum(), list(encoder.parameters()))
    set_bits = ((bits[:, None] & torch.tensor([1, 2])) > 0).double()
    rows = (set_bits[:, :, None] * encoder.action_embedding).flatten(1)
    rows = encoder.mlp(torch.cat([rows, encoder.target_action_embedding.expand(2, -1)]))
    want = torch.autograd.grad((rows * weight).sum(), list(encoder.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# ---- Preprocessor ----


def event_rows(history, candidates, attributes, dim=6):
    """Random events of sequences with so many history rows and candidates."""
    g = torch.Generator().manual_seed(1)
    count = sum(history) + sum(candidates)
    offsets = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (history, candidates)]
    stamps = torch.arange(sum(history)) + 1000, torch.arange(sum(candidates)) + 2000
    side = torch.randn(count, attributes * dim, generator=g) if attributes else None
    return EventRows(torch.randn(count, dim, generator=g), side, *offsets, *stamps)


def test_sequence_is_context_then_history_then_candidates():
    events = event_rows([2, 0, 3], [1, 2, 1], 2)
    bits = torch.tensor([1, 4, 2, 0, 3])
    module = ContextualPreprocessor(6, 8, 5, num_contextual=2, num_attributes=2, action_dim=3)
    context = [
        (torch.randn(3, 6), torch.tensor([0, 1, 2, 3])),
        (torch.randn(3, 6), torch.tensor([0, 0, 2, 3])),  # the first sequence lacks it, the second has two values
    ]
    out = module(events, bits, context)

    rows = module.content_mlp(events.item) + module.attribute_mlp(events.attributes) + module.action_encoder(bits, 4)
    h, c = rows[:5], rows[5:]
    slot_inputs = [context[0][0], torch.stack([torch.zeros(6), context[1][0][0], context[1][0][2]])]
    w, b = module.contextual_weight, module.contextual_bias
    slots = torch.stack([slot_inputs[i] @ w[i] + b[i] for i in range(2)], dim=1)
    want = torch.cat([slots[0], h[:2], c[:1], slots[1], c[1:3], slots[2], h[2:], c[3:]])
    torch.testing.assert_close(out.x, want)
    assert out.offsets.tolist() == [0, 5, 9, 15]
    stamps = [0, 0, 1000, 1001, 2000, 0, 0, 2001, 2002, 0, 0, 1002, 1003, 1004, 2003]
    assert out.layout.timestamps.tolist() == stamps
    assert out.candidate_rows.tolist() == [4, 7, 8, 14]

    longest = module(events, bits, context, longest_first=True)
    assert longest.offsets.tolist() == [0, 6, 11, 15] and longest.layout.num_targets.tolist() == [1, 1, 2]
    torch.testing.assert_close(longest.x, torch.cat([want[9:], want[:5], want[5:9]]))
    assert longest.candidate_rows.tolist() == [10, 13, 14, 5]


def test_a_wrong_number_of_contextual_features_is_named():
    module = ContextualPreprocessor(6, 8, 5, num_contextual=2, num_attributes=0)
    with pytest.raises(ValueError, match="got 0 contextual features, the model has 2"):
        module(event_rows([2], [1], 0), torch.tensor([1, 1]))


def test_candidate_order_is_restored_after_sorting():
    events = event_rows([2, 0, 3], [1, 2, 1], 0)
    preprocessor = ContextualPreprocessor(6, 8, 5, num_contextual=0, num_attributes=0)
    layer = STULayer(STULayerConfig(embedding_dim=8, num_heads=1, hidden_dim=8, attention_dim=8, max_seq_len=9))
    transducer = HSTUTransducer(preprocessor, None, STUStack([layer]), make_postprocessor("l2_norm", 8))
    for longest_first in (False, True):
        sequence = preprocessor(events, torch.tensor([1, 4, 2, 0, 3]), (), longest_first)
        in_layout = sequence.x[sequence.candidate_rows.sort().values]
        restored = transducer.restore_candidate_order(in_layout, sequence)
        assert torch.equal(restored, sequence.x[sequence.candidate_rows])


# ---- Postprocessors ----


def test_time_features_follow_the_clock():
    moments = [datetime.datetime(2024, 5, day, hour, 59, tzinfo=datetime.UTC) for day in (1, 4, 8) for hour in (0, 13)]
    module = TimestampPostprocessor(4)
    got = module.time_features(torch.tensor([int(m.timestamp()) for m in moments]))
    for row, moment in zip(got.tolist(), moments, strict=True):
        hour = 2 * math.pi * moment.hour / 24
        day = 2 * math.pi * ((moment.weekday() - 3) % 7) / 7  # day 0 of the epoch was a Thursday
        assert row == pytest.approx([math.cos(hour), math.sin(hour), math.cos(day), math.sin(day)], abs=1e-6)


def test_full_turn_is_configurable():
    stamp = torch.tensor([23 * 3600])
    exact, public = TimestampPostprocessor(4), make_postprocessor("timestamp", 4, full_turn=2 * 3.14)
    assert public.time_features(stamp)[0, 1] == pytest.approx(math.sin(23 / 24 * 6.28), abs=1e-6)
    assert public.time_features(stamp)[0, 1] != exact.time_features(stamp)[0, 1]


def test_timestamp_postprocessor():
    module = TimestampPostprocessor(4)
    x, stamps = torch.randn(3, 4), torch.tensor([0, 5000, 10**9])
    linear, norm = module.time_feature_combiner, module.layer_norm
    y = torch.cat([x, module.time_features(stamps)], dim=1) @ linear.weight.T + linear.bias
    want = (y - y.mean(1, keepdim=True)) / (y.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(module(x, stamps), want * norm.weight + norm.bias)


def test_l2_norm_of_a_zero_row_is_zero():
    out = make_postprocessor("l2_norm", 4)(torch.tensor([[0.0, 0, 0, 0], [3, 0, 4, 0]]), torch.zeros(2))
    assert out.tolist() == [[0, 0, 0, 0], pytest.approx([0.6, 0, 0.8, 0])]


# ---- Heads ----


def test_labels_read_their_own_bit():
    bits = torch.tensor([0, 1, 2, 3, 4, 5])
    assert task_labels(TaskConfig("a"), {"item_action_weight": bits}).tolist() == [0, 1, 0, 1, 0, 1]
    assert task_labels(TaskConfig("b", label_bit=2), {"item_action_weight": bits}).tolist() == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("kind", ["binary", "regression"])
def test_loss_is_a_weighted_mean_and_zero_without_weight(kind):
    task = TaskConfig("t", kind, loss_weight=0.5)
    logits, labels = torch.randn(4, requires_grad=True), torch.tensor([0.0, 1, 1, 0])
    some = task_loss(task, logits, labels, torch.tensor([1.0, 1, 0, 0]))
    torch.testing.assert_close(some, task_loss(task, logits[:2], labels[:2], torch.ones(2)))
    none = task_loss(task, logits, labels, torch.zeros(4))
    assert none == 0
    assert torch.equal(torch.autograd.grad(none, logits)[0], torch.zeros(4))


def test_heads_are_separate():
    head = MultitaskHead(4, (TaskConfig("a"), TaskConfig("b", "regression", "value")), hidden_dim=8)
    user, item = torch.randn(3, 4), torch.randn(3, 4)
    out = head(user, item, {"item_action_weight": torch.tensor([1, 0, 1]), "value": torch.tensor([2.0, 3, 4])})
    torch.testing.assert_close(out.predictions[0], torch.sigmoid(head.heads[0](user * item)[:, 0]))
    torch.testing.assert_close(out.predictions[1], head.heads[1](user * item)[:, 0])
    out.losses["a"].backward()
    assert head.heads[0][0].weight.grad.abs().sum() > 0
    assert head.heads[1][0].weight.grad is None or head.heads[1][0].weight.grad.abs().sum() == 0


def test_a_head_gives_the_logits_beside_the_predictions_in_float32_whatever_the_caller_casts():
    """In bfloat16 logits of 25 and 25.05 are one number, and so are their fp32 probabilities."""
    head = MultitaskHead(4, (TaskConfig("a"), TaskConfig("b", "regression", "value", label_center=3.0)), hidden_dim=8)
    user, item = torch.randn(64, 4), torch.randn(64, 4)
    with torch.no_grad():
        head.heads[0][-1].bias += 25
    alone = head(user, item)
    with torch.autocast("cpu", torch.bfloat16):
        inside = head(user, item)
    assert torch.equal(inside.logits, alone.logits) and inside.logits.dtype == torch.float32
    assert alone.logits[0].unique().numel() > 60 and alone.predictions[0].unique().numel() == 1
    torch.testing.assert_close(alone.logits[0], head.heads[0](user * item)[:, 0])
    assert torch.equal(alone.logits[1], alone.predictions[1])


def test_a_regression_label_has_a_unit_and_a_centre():
    task = TaskConfig("r", "regression", "value", label_scale=0.01, label_center=3.5, loss_weight=1.0)
    head = MultitaskHead(4, (task,), hidden_dim=8)
    user, item, value = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([400, 50, 350])
    out = head(user, item, {"value": value})
    want = 3.5 + head.heads[0](user * item)[:, 0]
    torch.testing.assert_close(out.predictions[0], want)
    torch.testing.assert_close(out.labels[0], torch.tensor([4.0, 0.5, 3.5]))
    torch.testing.assert_close(out.losses["r"], (want - torch.tensor([4.0, 0.5, 3.5])).square().mean())


@pytest.mark.parametrize("changes,message", [(dict(kind="rank"), "kind='rank'"), (dict(label_bit=0), "label_bit=0")])
def test_a_wrong_task_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        TaskConfig("t", **changes)


def test_events_without_the_attributes_of_the_model_are_refused():
    events = event_rows([3, 2], [1, 1], attributes=0)
    preprocessor = ContextualPreprocessor(6, 8, 5, num_contextual=0, num_attributes=2)
    with pytest.raises(ValueError, match="the model has item attributes, these events have none"):
        preprocessor.embed_rows(events, torch.zeros(5, dtype=torch.int64))
