"""The whole ranker: shapes, invariances, leaks, empty batches, configurations and errors."""

import contextlib
import gc
import itertools
import pathlib
import re
import weakref

import pytest
import torch
from torchrec import KeyedJaggedTensor

from generative_recommenders.modules import stu
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, TaskConfig
from generative_recommenders.modules.table_init import fill_table_rows_

HISTORIES, CANDIDATES = [9, 0, 14, 3], [1, 2, 3, 1]
TASKS = (TaskConfig("listen_plus"), TaskConfig("watch", "regression", label_feature="item_watch_time"))


def same(a, b, tolerance=2e-6):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_output_fields(toy):
    model = toy.model(tasks=TASKS)
    out = model(*toy.batch(toy.samples(HISTORIES, CANDIDATES)))
    total = sum(CANDIDATES)
    assert out.user_embedding.shape == out.item_embedding.shape == (total, 16)
    assert out.predictions.shape == out.labels.shape == out.weights.shape == (2, total)
    assert all(t.dtype == torch.float32 for t in (out.user_embedding, out.item_embedding, out.predictions, out.labels))
    assert ((out.predictions[0] > 0) & (out.predictions[0] < 1)).all()
    assert out.seq_lengths.tolist() == [h + c + 2 for h, c in zip(HISTORIES, CANDIDATES, strict=True)]
    assert out.num_tokens == sum(out.seq_lengths.tolist())
    assert list(out.losses) == ["listen_plus", "watch"]
    same(out.loss, out.losses["listen_plus"] + out.losses["watch"])


def test_labels_and_losses(toy):
    samples = toy.samples(HISTORIES, CANDIDATES)
    out = toy.model(tasks=TASKS)(*toy.batch(samples))
    rows = [c for s in samples for c in s["candidates"]]
    assert out.labels[0].tolist() == [float(row["item_action_weight"] == 1) for row in rows]
    assert out.labels[1].tolist() == [float(row["item_watch_time"]) for row in rows]
    p, y = out.predictions[0].double(), out.labels[0].double()
    same(out.losses["listen_plus"].double(), -(y * p.log() + (1 - y) * (1 - p).log()).mean() * 0.2, 1e-5)
    same(out.losses["watch"], (out.predictions[1] - out.labels[1]).square().mean() * 0.2, 1e-5)


def test_every_parameter_gets_a_gradient(toy):
    model = toy.model(tasks=TASKS)
    model(*toy.batch(toy.samples(HISTORIES, CANDIDATES))).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_a_small_batch_can_be_learned_by_heart(toy):
    model = toy.model(input_dropout_ratio=0.1, output_dropout_ratio=0.1)
    batch = toy.batch(toy.samples([6, 9, 3, 12, 0, 5], [1, 2, 3, 1, 2, 3]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(*batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


# ---- What a score may depend on ----


@pytest.mark.parametrize("sort_by_length", [True, False])
def test_a_score_does_not_depend_on_the_batch(toy, sort_by_length):
    model = toy.model(sort_by_length=sort_by_length).eval()
    samples = toy.samples(HISTORIES, CANDIDATES)
    together = model(*toy.batch(samples)).predictions
    alone = torch.cat([model(*toy.batch([s])).predictions for s in samples], dim=1)
    same(together, alone)
    order = [2, 0, 3, 1]
    shuffled = model(*toy.batch([samples[i] for i in order])).predictions.split([CANDIDATES[i] for i in order], dim=1)
    same(together, torch.cat([shuffled[order.index(i)] for i in range(4)], dim=1))


def test_predicting_equals_evaluating(toy):
    """Without labels, without gradients, with a loose length bound: the same bits as the training-time forward."""
    model = toy.model().eval()
    samples = toy.samples(HISTORIES, CANDIDATES)
    evaluated = model(*toy.batch(samples))
    with torch.no_grad():
        predicted = model(*toy.batch(samples, labels=False), max_seq_len=40)
    assert predicted.labels is None and predicted.losses == {} and predicted.loss == 0
    assert torch.equal(predicted.predictions, evaluated.predictions)
    assert torch.equal(model.train()(*toy.batch(samples)).predictions, evaluated.predictions)  # dropout is 0


def test_training_without_labels_is_refused(toy):
    with pytest.raises(ValueError, match="item_action_weight"):
        toy.model()(*toy.batch(toy.samples([3]), labels=False))


@pytest.mark.parametrize("field", ["item_action_weight", "item_watch_time"])
def test_the_label_does_not_leak(toy, field):
    model = toy.model(tasks=TASKS)
    samples = toy.samples(HISTORIES, CANDIDATES)

    def change(copy):
        for sample in copy:
            for candidate in sample["candidates"]:
                candidate[field] = 5 - candidate[field] if field == "item_action_weight" else candidate[field] + 7

    before, after = model(*toy.batch(samples)), model(*toy.batch(toy.changed(samples, change)))
    assert not torch.equal(before.labels, after.labels)
    for name in ("predictions", "user_embedding", "item_embedding"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name


def test_candidates_do_not_see_each_other(toy):
    """Scored together or one by one, and whatever the other candidates are: the same."""
    model = toy.model().eval()
    samples = toy.samples([9], [4])
    together = model(*toy.batch(samples)).predictions

    def only(i):
        return toy.changed(samples, lambda copy: copy[0].update(candidates=copy[0]["candidates"][i : i + 1]))

    same(together, torch.cat([model(*toy.batch(only(i))).predictions for i in range(4)], dim=1))

    def change(copy):
        for candidate in copy[0]["candidates"][1:]:
            candidate["item_candidate_id"] = (candidate["item_candidate_id"] + 1) % 50

    changed = model(*toy.batch(toy.changed(samples, change))).predictions
    same(changed[:, 0], together[:, 0])
    assert (changed[:, 1:] - together[:, 1:]).abs().min() > 1e-6


def test_permuting_candidates_permutes_scores(toy):
    model = toy.model().eval()
    samples = toy.samples([9, 4], [4, 1])
    order = [2, 0, 3, 1]

    def permute(copy):
        copy[0]["candidates"] = [copy[0]["candidates"][i] for i in order]

    got = model(*toy.batch(toy.changed(samples, permute))).predictions
    same(got, model(*toy.batch(samples)).predictions[:, order + [4]])


@pytest.mark.parametrize("feature", ["item_id", "artist_id", "album_id", "action_weight", "action_timestamp"])
def test_every_history_feature_matters(toy, feature):
    model = toy.model().eval()
    samples = toy.samples([9])

    def change(copy):
        event = copy[0]["history"][4]
        event[feature] = event[feature] - 10**5 if feature == "action_timestamp" else (event[feature] + 1) % 5

    before, after = model(*toy.batch(samples)), model(*toy.batch(toy.changed(samples, change)))
    assert not torch.equal(before.user_embedding, after.user_embedding)
    assert torch.equal(before.item_embedding, after.item_embedding)


# ---- Empty jagged tensors ----


@pytest.mark.parametrize("histories,candidates", [([], []), ([0, 0, 0], [0, 0, 0])], ids=["B = 0", "no rows"])
@pytest.mark.parametrize("context", [(), None], ids=["no context", "context"])
def test_a_batch_without_candidates_has_zero_loss_and_zero_gradients(toy, histories, candidates, context):
    context = toy.contextual_features if context is None else context
    model = toy.model(tasks=TASKS, contextual_feature_names=context, output_dropout_ratio=0.1, input_dropout_ratio=0.2)
    out = model(*toy.batch(toy.samples(histories, candidates), context=context))
    assert out.predictions.shape == (2, 0) and out.user_embedding.shape == (0, 16)
    assert out.num_tokens == len(histories) * len(context)
    assert out.loss == 0
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_sequences_without_history_or_candidates_leave_the_others_alone(toy):
    model = toy.model()
    samples = toy.samples([0, 7, 0, 1], [0, 1, 0, 1])

    def gradients(batch):
        model.zero_grad()
        out = model(*batch)
        out.loss.backward()
        return out.predictions, [p.grad.clone() for p in model.parameters()]

    among, with_empty = gradients(toy.batch(samples))
    alone, without = gradients(toy.batch([samples[1], samples[3]]))
    same(among, alone)
    for a, b in zip(with_empty, without, strict=True):
        same(a, b, 1e-5)


# ---- Configurations ----


@pytest.mark.parametrize("items", [("item_id",), ("item_id", "artist_id"), ("item_id", "artist_id", "album_id")])
@pytest.mark.parametrize("context", [(), ("uid",), ("uid", "user_x_hour")])
def test_any_number_of_attributes_and_contextual_features(toy, items, context):
    model = toy.model(item_feature_names=items, contextual_feature_names=context)
    out = model(*toy.batch(toy.samples(HISTORIES, CANDIDATES), items, context))
    out.loss.backward()
    assert out.predictions.shape == (1, sum(CANDIDATES))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("postprocessor", ["timestamp", "layer_norm", "l2_norm"])
@pytest.mark.parametrize("layers,width", [(0, None), (1, 8), (3, 24)])
def test_postprocessors_layers_and_table_widths(toy, postprocessor, layers, width):
    model = toy.model(postprocessor=postprocessor, hstu_num_layers=layers, embedding_dim=width)
    out = model(*toy.batch(toy.samples(HISTORIES, CANDIDATES)))
    assert model.embedding_collection.embeddings["uid"].weight.shape == (15, width or 16)
    assert out.loss.isfinite()
    if postprocessor == "l2_norm":
        same(out.user_embedding.norm(dim=1), torch.ones(sum(CANDIDATES)))


def test_recomputing_the_preprocessor_changes_nothing(toy):
    samples = toy.samples(HISTORIES, CANDIDATES)
    gradients = []
    for recompute in (False, True):
        model = toy.model(recompute_preprocessor=recompute)
        model(*toy.batch(samples)).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        same(a, b)


def test_looked_up_rows_are_let_go_before_the_stack_runs(toy, monkeypatch):
    """They are fp32 rows of every feature of every event: at full size more than what a layer keeps."""
    model, looked_up = toy.model(), []
    embed, run_stack = model.embed, model.transducer.run_stack

    def remember(*args):
        result = embed(*args)
        looked_up.extend(weakref.ref(rows.values()) for rows in result.values())
        return result

    def check(*args):
        gc.collect()
        assert looked_up and all(rows() is None for rows in looked_up)
        return run_stack(*args)

    monkeypatch.setattr(model, "embed", remember)
    monkeypatch.setattr(model.transducer, "run_stack", check)
    model(*toy.batch(toy.samples(HISTORIES, CANDIDATES))).loss.backward()


def test_full_embeddings_hold_the_candidates_rows(toy):
    samples = toy.samples(HISTORIES, CANDIDATES)
    model = toy.model(return_full_embeddings=True, postprocessor="l2_norm")
    out = model(*toy.batch(samples))
    assert out.full_offsets.diff().tolist() == out.seq_lengths.tolist()
    ends = out.full_offsets[1:].tolist()
    rows = [r for end, count in zip(ends, CANDIDATES, strict=True) for r in range(end - count, end)]
    same(torch.nn.functional.normalize(out.full_embeddings[rows], dim=-1), out.user_embedding)


def test_bfloat16_autocast_stays_close_and_returns_float32(toy):
    samples = toy.samples(HISTORIES, CANDIDATES)
    wide, narrow = toy.model().eval(), toy.model(autocast="bfloat16").eval()
    narrow.load_state_dict(wide.state_dict())
    a, b = wide(*toy.batch(samples)), narrow(*toy.batch(samples))
    assert b.user_embedding.dtype == b.predictions.dtype == b.loss.dtype == torch.float32
    assert torch.equal(a.item_embedding, b.item_embedding)
    with torch.autocast("cpu", torch.bfloat16):  # the configuration says what is cast, not the caller
        assert torch.equal(wide(*toy.batch(samples)).logits, a.logits) and a.logits.dtype == torch.float32
    assert 0 < (a.predictions - b.predictions).abs().max() < 0.05
    b.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in narrow.parameters())


def test_a_device_is_neither_waited_for_nor_left(toy, monkeypatch):
    """On the meta device, reading a value back or mixing in a CPU tensor raises; on a GPU a sync would go unnoticed."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # unknown to this device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)

    def attention(x, parameters, projection, call, *_):
        assert {t.device.type for t in vars(call).values() if isinstance(t, torch.Tensor)} == {"meta"}
        norm_weight, norm_bias, weight, bias = parameters
        uv = (x * norm_weight + norm_bias) @ weight + bias
        return uv[:, : projection.u_columns], uv[:, -projection.u_columns :]

    monkeypatch.setattr(stu, "hstu_preprocess_attention", attention)
    model = toy.model(attn_norm="batch_max", output_dropout_ratio=0.1, tasks=TASKS).to("meta")
    on_device = []
    for features in toy.batch(toy.samples(HISTORIES, CANDIDATES)):
        counts = features.length_per_key()
        on_device.append(
            KeyedJaggedTensor(
                features.keys(),
                features.values().to("meta"),
                lengths=features.lengths().to("meta"),
                stride=features.stride(),
                length_per_key=counts,
                offset_per_key=[0, *itertools.accumulate(counts)],
            )
        )
    out = model(*on_device)
    out.loss.backward()
    assert out.loss.is_meta and out.predictions.shape == (2, sum(CANDIDATES))
    assert all(p.grad is not None for p in model.transducer.stack.parameters())


def test_dropout_is_drawn_from_the_global_generator_only_in_training(toy):
    model = toy.model(input_dropout_ratio=0.2, output_dropout_ratio=0.1)
    batch = toy.batch(toy.samples(HISTORIES, CANDIDATES))

    def score(seed):
        torch.manual_seed(seed)
        return model(*batch).predictions

    assert torch.equal(score(1), score(1)) and not torch.equal(score(1), score(2))
    model.eval()
    assert torch.equal(score(1), score(2))


# ---- Weights ----


def test_weights_depend_on_the_seed_alone(toy):
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = DlrmHSTU(toy.config(), seed=4).state_dict()
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
    torch.manual_seed(12)
    second, other = DlrmHSTU(toy.config(), seed=4).state_dict(), DlrmHSTU(toy.config(), seed=5).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert not torch.equal(first["item_tower.0.weight"], other["item_tower.0.weight"])
    assert not torch.equal(
        first["embedding_collection.embeddings.uid.weight"], other["embedding_collection.embeddings.uid.weight"]
    )


def test_tables_can_stay_unallocated_and_rows_be_filled_by_their_owner(toy):
    model = DlrmHSTU(toy.config(), embedding_device="meta", seed=4)
    whole = DlrmHSTU(toy.config(), seed=4).embedding_collection.embeddings
    assert all(table.weight.is_meta for table in model.embedding_collection.embeddings.values())
    assert not model.item_tower[0].weight.is_meta
    mine = fill_table_rows_(torch.empty(7, 16), 4, "item_id", 50, first_row=20)
    assert torch.equal(mine, whole["item_id"].weight[20:27])


def test_history_and_candidate_share_a_table(toy):
    model = toy.model()
    assert set(model.embedding_collection.embeddings) == set(toy.table_rows)
    samples = toy.samples([0], [1])
    model(*toy.batch(samples)).loss.backward()
    touched = model.embedding_collection.embeddings["item_id"].weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [samples[0]["candidates"][0]["item_candidate_id"]]


# ---- Errors ----


def test_a_sequence_beyond_max_seq_len_is_named(toy):
    with pytest.raises(ValueError, match=r"41 rows .*max_seq_len=40"):
        toy.model()(*toy.batch(toy.samples([38])))


def test_a_missing_feature_is_named(toy):
    uih, candidates = toy.batch(toy.samples([3]), items=("item_id", "artist_id"))
    with pytest.raises(ValueError, match="uih has no feature 'album_id'"):
        toy.model()(uih, candidates)


def test_batches_of_different_size_are_refused(toy):
    uih, _ = toy.batch(toy.samples([3, 4]))
    _, candidates = toy.batch(toy.samples([3]))
    with pytest.raises(ValueError, match="2 sequences but candidates have 1"):
        toy.model()(uih, candidates)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(item_feature_names=()), "item_feature_names is empty"),
        (dict(item_feature_names=("item_id", "genre")), "'genre' has no table"),
        (dict(contextual_feature_names=("uid", "uid")), "must differ"),
        (dict(table_rows={}), "'item_id' has no table"),
        (dict(input_dropout_ratio=1.5), "input_dropout_ratio=1.5"),
        (dict(autocast="half"), "autocast='half'"),
        (dict(num_time_buckets=0), "num_time_buckets=0"),
        (dict(hstu_num_layers=-1), "hstu_num_layers=-1"),
    ],
)
def test_a_wrong_configuration_is_named(toy, changes, message):
    with pytest.raises(ValueError, match=message):
        toy.config(**changes)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(postprocessor="softmax"), "postprocessor='softmax'"),
        (dict(attn_norm="mean"), "attn_norm='mean'"),
        (dict(tasks=(TaskConfig("a"), TaskConfig("a"))), "distinct names"),
        (dict(tasks=()), "tasks must be given"),
        (dict(action_weights=()), "action_weights"),
    ],
)
def test_a_part_that_cannot_be_built_is_named(toy, changes, message):
    with pytest.raises(ValueError, match=message):
        DlrmHSTU(toy.config(**changes))


def test_the_documented_example_runs(capsys):
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "model.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {}
    exec(compile(code, str(page), "exec"), names)
    assert names["out"].labels.tolist() == [[1.0, 0.0]]
    assert names["out"].predictions.shape == (1, 2)
    assert "tensor" in capsys.readouterr().out


# ---- In float64 ----

KINDS = {
    "as it is": {},
    "the last layer for candidates alone": dict(last_layer_targets_only=True, targets_only_several_targets=True),
    "a prefix that sees the history": dict(contextual_seq_len=2),
    "group norm": dict(use_group_norm=True),
    "a window, by the batch's longest": dict(max_attn_len=4, attn_norm="batch_max"),
    "narrow tables, no attributes": dict(embedding_dim=8, item_feature_names=("item_id",)),
    "no context": dict(contextual_feature_names=()),
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=list(KINDS))
def test_float64_agrees_with_float32_and_with_differences(toy, changes):
    """Nothing of it is rounded to float32 on the way: the loss along any direction of all parameters has the slope that
    the gradients say, to far better than float32 could."""
    items = changes.get("item_feature_names", toy.item_features)
    context = changes.get("contextual_feature_names", toy.contextual_features)
    batch = toy.batch(toy.samples(HISTORIES, CANDIDATES), items, context)
    narrow = toy.model(tasks=TASKS, **changes)
    wide = toy.model(tasks=TASKS, **changes).to(torch.float64)
    a, b = narrow(*batch), wide(*batch)
    for name in ("user_embedding", "item_embedding", "predictions", "loss"):
        value = getattr(b, name)
        assert value.dtype == torch.float64, name
        error = (getattr(a, name).double() - value).abs().max() / value.abs().max()
        assert error < 1e-5, name
    b.loss.backward()
    g = torch.Generator().manual_seed(0)
    parameters = list(wide.parameters())
    directions = [torch.randn(p.shape, generator=g, dtype=torch.float64) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True))
    step, losses = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * step)
            losses.append(wide(*batch).loss)
    torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), slope, rtol=1e-7, atol=0)
