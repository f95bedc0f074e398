"""The targets-only last layer: equality with the full layer, and the gate's errors, fallbacks and logging."""

import dataclasses
import logging

import pytest
import torch

from generative_recommenders.errors import UserError
from generative_recommenders.modules.stu import STULayer, STULayerConfig, STUStack
from generative_recommenders.modules.targets_only import (
    LastLayerDecision,
    LastLayerUse,
    TargetsOnlyGate,
    static_blockers,
)
from generative_recommenders.ops import lmsd
from generative_recommenders.ops.candidate_attention import COMPUTATIONS, CandidateRows, TargetSummary
from generative_recommenders.ops.dispatch import Preference

SIZES = dict(embedding_dim=32, num_heads=2, hidden_dim=8, attention_dim=16, max_seq_len=40)
BATCHES = {
    "one": ((5, 33, 1, 20), (1, 1, 1, 1)),
    "several": ((9, 4, 30, 3), (2, 0, 5, 3)),
    "all candidates": ((1, 1, 1), (1, 1, 1)),
    "empty": ((), ()),
}


def make_layer(dtype=torch.float64, backend="PYTORCH", **changes):
    layer = STULayer(STULayerConfig(**SIZES, backend=backend, **changes))
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
    return layer.to(dtype)


def make_batch(name, dtype):
    lengths, targets = BATCHES[name]
    g = torch.Generator().manual_seed(4)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0])
    x = torch.randn(sum(lengths), SIZES["embedding_dim"], generator=g, dtype=torch.float64).to(dtype)
    grad = torch.randn(sum(targets), SIZES["embedding_dim"], generator=g, dtype=torch.float64).to(dtype)
    return x, offsets, max(lengths, default=0), torch.tensor(targets, dtype=torch.int64), grad


def run(layer, batch, computation):
    """Candidate outputs, gradients (x, then parameters) and the generator's state behind the forward."""
    x, offsets, longest, targets, grad = batch
    x = x.clone().requires_grad_()
    layer.zero_grad()
    candidates = CandidateRows.of(offsets, targets)
    torch.manual_seed(11)
    if computation == "full":
        out = layer(x, offsets, longest, targets)[candidates.rows]
    else:
        out = layer.forward_targets_only(x, offsets, candidates, computation)
    state = torch.get_rng_state()
    out.backward(grad)
    return out.detach(), [x.grad, *(p.grad for p in layer.parameters())], state


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("computation", COMPUTATIONS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("attn_norm", ["max_seq_len", "batch_max"])
def test_equals_the_full_layer(name, computation, dropout, attn_norm):
    layer = make_layer(output_dropout_ratio=dropout, attn_norm=attn_norm)
    batch = make_batch(name, torch.float64)
    want, want_grads, want_state = run(layer, batch, "full")
    got, grads, state = run(layer, batch, computation)
    assert torch.equal(state, want_state)
    for a, b in zip([got, *grads], [want, *want_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend, computation", [("TRITON", "absorbed"), ("TRITON", "materialised")])
def test_equals_the_full_layer_fp32(backend, computation, dropout, monkeypatch):
    monkeypatch.setenv("HSTU_CANDIDATE_ATTENTION_BACKEND", backend)
    layer = make_layer(torch.float32, backend=None, output_dropout_ratio=dropout)
    monkeypatch.setenv("HSTU_LMSD_BACKEND", "PYTORCH")
    monkeypatch.setenv("HSTU_ATTENTION_BACKEND", "PYTORCH")
    batch = make_batch("one", torch.float32)
    want, want_grads, want_state = run(layer, batch, "full")
    got, grads, state = run(layer, batch, computation)
    assert torch.equal(state, want_state)
    for a, b in zip([got, *grads], [want, *want_grads], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_dropout_masks_are_bit_equal(monkeypatch):
    """The masks that the two paths draw, caught at the op."""
    masks = []
    draw = lmsd.reference.draw_mask

    def catch(*args):
        masks.append(draw(*args))
        return masks[-1]

    monkeypatch.setattr(lmsd.reference, "draw_mask", catch)
    layer = make_layer(output_dropout_ratio=0.3, recompute_y=True)
    batch = make_batch("several", torch.float64)
    run(layer, batch, "full")
    full = masks[0]
    masks.clear()
    run(layer, batch, "absorbed")
    rows = CandidateRows.of(batch[1], batch[3]).rows
    assert torch.equal(masks[0], full[rows]) and 0 < (full & 1).float().mean() < 1


def test_evaluation_draws_nothing():
    layer = make_layer(output_dropout_ratio=0.3).eval()
    batch = make_batch("one", torch.float64)
    want, _, want_state = run(layer, batch, "full")
    got, _, state = run(layer, batch, "absorbed")
    torch.manual_seed(11)
    assert torch.equal(state, want_state) and torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(got, want)


BLOCKED = {
    "group norm": dict(use_group_norm=True),
    "not causal": dict(causal=False),
    "not target-aware": dict(target_aware=False),
    "max_attn_len=7": dict(max_attn_len=7),
    "contextual_seq_len=2": dict(contextual_seq_len=2),
    "recompute_normed_x is off": dict(recompute_normed_x=False),
    "recompute_uvqk is off": dict(recompute_uvqk=False),
    "recompute_y is off": dict(recompute_y=False),
    "inference mode": dict(is_inference=True),
    "kernel backend CUDNN": dict(backend="CUDNN"),
}
USES = {
    "full embeddings": dict(full_embeddings=True),
    "stack is empty": dict(num_layers=0),
}


def decide(gate, targets=(1, 1), training=True, config=None, **use):
    config = STULayerConfig(**SIZES) if config is None else config
    use = LastLayerUse(**({"num_layers": 2} | use))
    return gate.decide(config, use, training, torch.zeros(9, 32), torch.tensor(targets, dtype=torch.int64))[0]


@pytest.mark.parametrize("name", BLOCKED)
def test_static_conditions_of_the_layer_raise(name):
    config = STULayerConfig(**SIZES, **BLOCKED[name])
    assert len(static_blockers(config, LastLayerUse(num_layers=2))) == 1
    for training in (True, False):  # also in evaluation, also with its own knob off
        with pytest.raises(UserError, match=name) as error:
            decide(TargetsOnlyGate(enabled=True, eval_enabled=training), training=training, config=config)
        assert "TRITON_HSTU_LAST_LAYER_TARGETS_ONLY=0" in str(error.value) and "\n" not in str(error.value)
    assert decide(TargetsOnlyGate(), config=config).computation == "full"  # knob off: not consulted


def test_a_backend_that_a_file_prefers_blocks_nothing():
    config = STULayerConfig(**SIZES, backend=Preference("CUDNN", "a file"))
    assert static_blockers(config, LastLayerUse(num_layers=2)) == []


@pytest.mark.parametrize("name", USES)
def test_static_conditions_of_the_transducer_raise(name):
    with pytest.raises(UserError, match=name):
        decide(TargetsOnlyGate(enabled=True), **USES[name])


def test_what_the_last_layer_keeps_is_said_once_with_the_option_that_mends_it():
    kept = dict.fromkeys(("recompute_normed_x", "recompute_uvqk", "recompute_y"), False)
    with pytest.raises(UserError) as error:
        decide(TargetsOnlyGate(enabled=True), config=STULayerConfig(**SIZES, **kept))
    message = str(error.value)
    assert "recompute_normed_x, recompute_uvqk, recompute_y are off for the last layer" in message
    assert all(message.count(name) == 1 for name in (*kept, "model.recompute_last_layer=True", "recomputing"))
    mended = STULayerConfig(**SIZES, **dict.fromkeys(kept, True))
    assert decide(TargetsOnlyGate(enabled=True), config=mended).engaged


def test_several_blockers_are_all_named():
    config = STULayerConfig(**SIZES, use_group_norm=True, causal=False)
    with pytest.raises(UserError, match="group norm.*not causal"):
        decide(TargetsOnlyGate(enabled=True), config=config)


def test_engages():
    assert decide(TargetsOnlyGate(enabled=True)) == LastLayerDecision(True, "targets only, absorbed", "absorbed")
    assert decide(TargetsOnlyGate(enabled=True, computation="materialised")).computation == "materialised"
    assert decide(TargetsOnlyGate(enabled=True), training=False).engaged


@pytest.mark.parametrize("targets", [(2, 1), (0, 2), (1, 0), (10, 10)])
def test_other_than_one_target_declines_unless_admitted(targets):
    declined = decide(TargetsOnlyGate(enabled=True), targets)
    assert not declined.engaged and "not exactly one target per sequence" in declined.reason
    assert decide(TargetsOnlyGate(enabled=True, several_targets=True), targets).engaged


def test_evaluation_knob():
    gate = TargetsOnlyGate(enabled=True, eval_enabled=False)
    assert decide(gate).engaged
    declined = decide(gate, training=False)
    assert not declined.engaged and declined.reason.startswith("evaluation")
    assert gate.last_decision == declined


def test_a_backend_without_indexed_dropout_declines(monkeypatch):
    """Asserted by substitution: every LMSD backend here takes row indices."""
    module = "generative_recommenders.modules.targets_only.supports_indexed_output_dropout"
    monkeypatch.setattr(module, lambda backend, device: False)
    declined = decide(TargetsOnlyGate(enabled=True))
    assert not declined.engaged and "row index" in declined.reason


def test_no_computation_can_serve(monkeypatch):
    module = "generative_recommenders.modules.targets_only.why_not_computation"
    monkeypatch.setattr(module, lambda computation, *_: None if computation == "materialised" else "too wide")
    assert decide(TargetsOnlyGate(enabled=True)).computation == "materialised"
    declined = decide(TargetsOnlyGate(enabled=True, computation="absorbed"))
    assert declined == LastLayerDecision(False, "absorbed: too wide", "full")


def test_each_reason_is_logged_once(caplog):
    gate = TargetsOnlyGate(enabled=True, eval_enabled=False)
    with caplog.at_level(logging.INFO, logger="generative_recommenders.modules.targets_only"):
        for step in range(100):
            decide(gate, (1, 1) if step % 3 else (2, 1), training=step % 4 > 0)
    assert sorted(record.levelname for record in caplog.records) == ["INFO", "WARNING", "WARNING"]
    assert len({record.getMessage() for record in caplog.records}) == 3


def test_the_gate_off_logs_nothing_and_reads_no_counts(caplog):
    counts = torch.ones(2, dtype=torch.int64, device="meta")  # reading it would raise
    with caplog.at_level(logging.DEBUG):
        decision, _ = TargetsOnlyGate().decide(
            STULayerConfig(**SIZES), LastLayerUse(num_layers=1), True, torch.zeros(2, 32), counts
        )
    assert not decision.engaged and decision.reason == "targets-only is off" and not caplog.records


def test_unknown_computation():
    with pytest.raises(ValueError, match="'fast' is not known"):
        TargetsOnlyGate(computation="fast")


def ranker_step(model, batch):
    model.zero_grad()
    torch.manual_seed(5)
    out = model(*batch)
    state = torch.get_rng_state()
    out.loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters()}, state


@pytest.mark.parametrize("candidates", [[1, 1, 1, 1], [10, 10, 10, 10], [2, 0, 3, 1]], ids=["one", "ten", "ragged"])
def test_whole_ranker(toy, candidates):
    """Predictions, loss and all gradients with the gate on and off, candidates in the batch's order."""
    batch = toy.batch(toy.samples([3, 20, 0, 11], candidates))
    plain = toy.model(output_dropout_ratio=0.3)
    gated = toy.model(
        output_dropout_ratio=0.3, last_layer_targets_only=True, targets_only_several_targets=candidates[0] != 1
    )
    want, want_grads, want_state = ranker_step(plain, batch)
    got, grads, state = ranker_step(gated, batch)
    assert not plain.transducer.last_layer_decision.engaged
    assert gated.transducer.last_layer_decision.computation == "absorbed"
    assert torch.equal(state, want_state)
    torch.testing.assert_close(got.user_embedding, want.user_embedding, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.predictions, want.predictions, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        scale = want_grads[name].abs().max().item()
        torch.testing.assert_close(grad, want_grads[name], rtol=1e-4, atol=1e-5 * scale + 1e-8, msg=name)


def test_two_models_in_one_process(toy):
    """One model's gate, reasons and decision are its own."""
    batch = toy.batch(toy.samples([3, 9]))
    on, off = toy.model(last_layer_targets_only=True), toy.model()
    on(*batch)
    off(*batch)
    assert on.transducer.last_layer_decision.engaged and not off.transducer.last_layer_decision.engaged
    on(*batch)
    assert on.transducer.last_layer_decision.engaged


def test_knob_flipped_between_runs(toy):
    model = toy.model()
    batch = toy.batch(toy.samples([3, 9, 4]))
    want = model(*batch).predictions
    model.transducer.targets_only.enabled = True
    got = model(*batch).predictions
    assert model.transducer.last_layer_decision.engaged
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    model.transducer.targets_only.enabled = False
    assert torch.equal(model(*batch).predictions, want)


def test_the_last_layer_recomputes_for_itself(toy):
    """The other layers may keep everything: the gate looks at the last layer's own options."""
    keeps = dict.fromkeys(("recompute_normed_x", "recompute_uvqk", "recompute_y"), False)
    batch = toy.batch(toy.samples([3, 9]))
    with pytest.raises(UserError, match="recompute_normed_x.* are off"):
        toy.model(last_layer_targets_only=True, **keeps)(*batch)
    model = toy.model(last_layer_targets_only=True, recompute_last_layer=True, **keeps)
    want = toy.model(**keeps)(*batch).predictions
    torch.testing.assert_close(model(*batch).predictions, want, rtol=1e-5, atol=1e-6)
    assert model.transducer.last_layer_decision.engaged
    assert [layer.config.recompute_y for layer in model.transducer.stack] == [False, True]


def test_counts_known_on_the_host_are_not_read_again(toy, monkeypatch):
    batch = toy.batch(toy.samples([3, 9]))
    counts = TargetSummary.of(torch.ones(2, dtype=torch.int64))
    monkeypatch.setattr(TargetSummary, "of", None)
    model = toy.model(last_layer_targets_only=True)
    model(*batch, target_counts=counts)
    assert model.transducer.last_layer_decision.engaged
    model(*batch, target_counts=TargetSummary(2, 3, 1, 2))
    assert "not exactly one target" in model.transducer.last_layer_decision.reason


def test_full_embeddings_and_the_gate(toy):
    model = toy.model(last_layer_targets_only=True, return_full_embeddings=True)
    with pytest.raises(UserError, match="full embeddings"):
        model(*toy.batch(toy.samples([3])))


def test_stack_runs_the_other_layers_in_full():
    stack = STUStack([make_layer(), make_layer(use_group_norm=True), make_layer()])
    x, offsets, longest, targets, _ = make_batch("several", torch.float64)
    candidates = CandidateRows.of(offsets, targets)
    torch.manual_seed(1)
    want = stack(x, offsets, longest, targets)[candidates.rows]
    torch.manual_seed(1)
    got = stack.forward_targets_only(x, offsets, longest, targets, candidates)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def train(toy, steps, batches, device="cpu", **changes):
    model = toy.model(**changes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batches[step % len(batches)]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_training_steps_agree(toy, steps):
    """fp32, equal dropout: the loss curves agree to 1e-5."""
    batches = [toy.batch(toy.samples([3, 12, 7], seed=seed)) for seed in range(5)]
    changes = dict(output_dropout_ratio=0.1, input_dropout_ratio=0.1)
    plain = train(toy, steps, batches, **changes)
    gated = train(toy, steps, batches, last_layer_targets_only=True, **changes)
    assert plain[-5:].mean() < plain[:5].mean()
    assert (plain - gated).abs().max() <= 1e-5


def test_config_is_not_read_from_the_environment(monkeypatch, toy):
    monkeypatch.setenv("TRITON_HSTU_LAST_LAYER_TARGETS_ONLY", "1")
    assert not toy.model().transducer.targets_only.enabled
    assert {f.name for f in dataclasses.fields(LastLayerDecision)} == {"engaged", "reason", "computation"}


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_bf16_training_curves_agree(toy, device):
    """200 steps: the targets-only curve strays from fp32 no further than twice what the full bf16 layer does."""
    sizes = dict(hstu_embedding_dim=64, hstu_attn_qk_dim=32, hstu_attn_linear_dim=32, backend=None)
    changes = dict(output_dropout_ratio=0.1, input_dropout_ratio=0.1, **sizes)
    batches = [[f.to(device) for f in toy.batch(toy.samples([3, 12, 30, 7], seed=seed))] for seed in range(5)]
    curves = {
        (precision, on): train(toy, 200, batches, device, autocast=precision, last_layer_targets_only=on, **changes)
        for precision, on in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    }
    exact, full, gated = curves.values()
    assert gated[-5:].mean() < gated[:5].mean()
    noise = (full - exact).abs().max()
    print(f"bf16 noise {noise:.2e}, targets-only against full {(gated - full).abs().max():.2e}")
    assert (gated - exact).abs().max() <= 2 * noise
