"""Public parameter names ↔ ours: there and back, several tasks, and clear errors."""

import pytest
import torch

from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, TaskConfig
from generative_recommenders.modules.importer import (
    export_public_weights,
    from_public_names,
    import_public_weights,
    to_public_names,
)
from generative_recommenders.modules.stu import STULayer, STULayerConfig, STUStack

TWO_TASKS = (TaskConfig("listen_plus"), TaskConfig("like", label_bit=2))


def test_there_and_back(toy):
    source, target = toy.model(seed=1), toy.model(seed=2)
    public = export_public_weights(source)
    assert all(name.startswith("_") for name in public)
    import_public_weights(target, public)
    for (name, a), b in zip(source.named_parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b), name
    batch = toy.batch(toy.samples([5, 3]))
    assert torch.equal(source(*batch).predictions, target(*batch).predictions)


def test_a_stack_alone():
    config = STULayerConfig(embedding_dim=8, num_heads=1, hidden_dim=8, attention_dim=8, max_seq_len=8)
    source, target = (STUStack([STULayer(config), STULayer(config)]) for _ in range(2))
    public = export_public_weights(source)
    assert "_stu_layers.1._uvqk_weight" in public
    import_public_weights(target, public)
    assert torch.equal(source.layers[1]._output_weight, target.layers[1]._output_weight)


def test_one_public_prediction_mlp_feeds_every_task_head(toy):
    """The public last layer has one row per task; here each task's own head computes exactly that row."""
    public = export_public_weights(toy.model(seed=1))
    last = torch.randn(2, 24)
    public["_multitask_module._prediction_module.2.weight"] = last
    public["_multitask_module._prediction_module.2.bias"] = torch.tensor([0.25, -0.5])
    model = toy.model(seed=2, tasks=TWO_TASKS)
    import_public_weights(model, public)
    joint = torch.randn(6, 16)
    hidden = model.head.heads[0][1](model.head.heads[0][0](joint))
    want = hidden @ last.T + torch.tensor([0.25, -0.5])
    torch.testing.assert_close(torch.cat([head(joint) for head in model.head.heads], dim=1), want)
    again = export_public_weights(model)
    for name, tensor in public.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("rows", [1, 3])
def test_a_public_head_of_more_or_fewer_tasks_is_refused(toy, rows):
    """Its last layer has a row per task: a row that no task takes would be dropped, one too few would be missing."""
    public = export_public_weights(toy.model(seed=1))
    public["_multitask_module._prediction_module.2.weight"] = torch.randn(rows, 24)
    public["_multitask_module._prediction_module.2.bias"] = torch.randn(rows)
    model = toy.model(seed=2, tasks=TWO_TASKS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=f"_prediction_module.2.* has {rows} .*the model has 2 tasks"):
        import_public_weights(model, public)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_heads_that_differ_cannot_be_exported(toy):
    with pytest.raises(UserError, match="2 task heads differ"):
        export_public_weights(toy.model(tasks=TWO_TASKS))


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda p: p.update({"_tower.weight": torch.zeros(1)}), "'_tower.weight' is not known"),
        (lambda p: p.update({"_item_embedding_mlp.7.weight": torch.zeros(1)}), "'_item_embedding_mlp.7.weight'"),
        (lambda p: p.pop("_item_embedding_mlp.2.bias"), "lack '_item_embedding_mlp.2.bias'"),
        (lambda p: p.pop("_multitask_module._prediction_module.2.bias"), "_prediction_module.2.bias"),
        (
            lambda p: p.update({"_embedding_collection.embeddings.uid.weight": torch.zeros(3, 16)}),
            r"embeddings.uid.weight' has shape \(3, 16\)",
        ),
    ],
)
def test_a_wrong_name_or_shape_is_named_and_leaves_the_model_alone(toy, change, message):
    public = export_public_weights(toy.model(seed=1))
    change(public)
    model = toy.model(seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        import_public_weights(model, public)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_renaming_is_one_to_one(toy):
    ours = dict(DlrmHSTU(toy.config()).named_parameters())
    back = from_public_names(to_public_names(ours))
    assert back.keys() == ours.keys()
    assert all(back[name] is ours[name] for name in ours if "heads" not in name)
