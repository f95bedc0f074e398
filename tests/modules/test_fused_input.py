"""The prepared sequence in one pass against its composition: scores, every gradient, dropout, empty batches, graphs."""

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HISTORIES, CANDIDATES = [9, 0, 14, 3], [1, 2, 3, 1]


def to_device(batch):
    return [features.to(DEVICE) for features in batch]


@pytest.fixture
def choose(monkeypatch):
    """Fused ("TRITON") or composed ("PYTORCH"), whatever the device would take by itself."""
    return lambda backend: monkeypatch.setenv("HSTU_ENCODE_BACKEND", backend)


def run(toy, samples, items=None, context=None, seed=None, fused=True, **changes):
    """(prepared x, output, gradients by name) of one forward and backward."""
    items, context = items or toy.item_features, toy.contextual_features if context is None else context
    model = toy.model(item_feature_names=items, contextual_feature_names=context, backend=None, **changes).to(DEVICE)
    prepared, prepare = [], model.transducer.prepare

    def remember(events, *args):
        reason = model.transducer.why_not_fused(events)
        assert (reason is None) == fused, reason
        prepared.append(prepare(events, *args))
        return prepared[0]

    model.transducer.prepare = remember
    if seed is not None:
        torch.manual_seed(seed)
    out = model(*to_device(toy.batch(samples, items, context)))
    out.loss.backward()
    return prepared[0].x.detach(), out, {name: p.grad for name, p in model.named_parameters()}


def same(a, b, tolerance=1e-5):
    for name, left in a.items():
        say = lambda text, n=name: f"{n}: {text}"
        torch.testing.assert_close(left, b[name], rtol=tolerance, atol=tolerance, msg=say)


@pytest.mark.parametrize("items", [("item_id",), ("item_id", "artist_id"), ("item_id", "artist_id", "album_id")])
@pytest.mark.parametrize("context", [(), ("uid", "user_x_hour")])
@pytest.mark.parametrize("sort_by_length", [False, True])
def test_one_pass_equals_the_composition(toy, choose, items, context, sort_by_length):
    samples, found = toy.samples(HISTORIES, CANDIDATES), {}
    for backend in ("PYTORCH", "TRITON"):
        choose(backend)
        fused = backend == "TRITON"
        options = dict(fused=fused, sort_by_length=sort_by_length, autocast="float32")
        found[backend] = run(toy, samples, items, context, **options)
    (x, out, grads), (right_x, right, right_grads) = found["TRITON"], found["PYTORCH"]
    assert x.dtype == right_x.dtype == torch.float32
    torch.testing.assert_close(x, right_x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.predictions, right.predictions, rtol=1e-5, atol=1e-5)
    same(grads, right_grads)


@pytest.mark.parametrize("histories,candidates", [([], []), ([0, 0], [0, 0]), ([0, 5], [0, 1])])
@pytest.mark.parametrize("context", [(), None])
def test_empty_sequences_and_batches(toy, choose, histories, candidates, context):
    found = []
    for backend in ("PYTORCH", "TRITON"):
        choose(backend)
        options = dict(context=context, fused=backend == "TRITON", autocast="float32")
        found.append(run(toy, toy.samples(histories, candidates), **options)[1:])
    (right, right_grads), (out, grads) = found
    assert out.num_tokens == right.num_tokens
    torch.testing.assert_close(out.loss, right.loss, rtol=1e-5, atol=1e-5)
    assert all(grad is not None for grad in grads.values())
    same(grads, right_grads)


def test_recomputing_the_preprocessor_changes_nothing(toy, choose):
    choose("TRITON")
    samples = toy.samples(HISTORIES, CANDIDATES)
    kept, redone = (
        run(toy, samples, seed=5, input_dropout_ratio=0.3, recompute_preprocessor=recompute)
        for recompute in (False, True)
    )
    assert torch.equal(kept[0], redone[0])
    same(kept[2], redone[2], 1e-6)


def test_input_dropout_follows_the_global_generator_in_training_only(toy, choose):
    choose("TRITON")
    samples = toy.samples([30, 30])
    first, again, other = (run(toy, samples, seed=s, input_dropout_ratio=0.25)[0] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    whole = run(toy, samples)[0]
    kept = first != 0
    assert 0.6 < float(kept.float().mean()) < 0.9
    torch.testing.assert_close(first[kept], whole[kept] / 0.75)


def test_a_width_without_kernels_is_composed(toy, choose):
    choose("TRITON")
    sizes = dict(hstu_embedding_dim=12, hstu_attn_qk_dim=4, hstu_attn_linear_dim=4)
    x, out, _ = run(toy, toy.samples(HISTORIES, CANDIDATES), fused=False, **sizes)
    assert x.shape[1] == 12 and out.loss.isfinite()


@pytest.mark.gpu
def test_autocast_strays_no_further_than_the_composition(toy, choose):
    """bf16 against fp32: the fused pass rounds less often, so its error may not exceed twice the composition's."""
    samples = toy.samples([30, 0, 50, 7], [1, 1, 2, 1])
    sizes = dict(max_seq_len=80, hstu_embedding_dim=64, hstu_attn_qk_dim=32, hstu_attn_linear_dim=32)
    found = {}
    for backend, autocast in (("PYTORCH", "float32"), ("PYTORCH", "bfloat16"), ("TRITON", "bfloat16")):
        choose(backend)
        found[backend, autocast] = run(toy, samples, fused=backend == "TRITON", autocast=autocast, **sizes)
    exact, theirs, ours = found.values()
    assert ours[0].dtype == theirs[0].dtype == torch.bfloat16
    error = lambda a, b: float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-9))  # noqa: E731
    assert error(ours[0], exact[0]) <= error(theirs[0], exact[0]) * 1.1
    for name, grad in exact[2].items():
        assert error(ours[2][name], grad) <= 2 * error(theirs[2][name], grad) + 1e-3, name
