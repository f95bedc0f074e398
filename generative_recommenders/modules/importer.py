"""Weights of the public HSTU code ↔ ours: the same tensors under other names.

Two layouts differ: tables and layers map one to one, but the public code has one prediction MLP whose last layer has a
row per task, while here each task has its own head. Importing copies the shared hidden layer into every head, which
computes the same; exporting needs heads that share it (always so with one task).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from generative_recommenders.errors import UserError

# Prefix of a public name → prefix of ours; the first that matches counts.
RENAMES = (
    ("_embedding_collection.", "embedding_collection."),
    ("_item_embedding_mlp.", "item_tower."),
    ("_hstu_transducer._stu_module._stu_layers.", "transducer.stack.layers."),
    (
        "_hstu_transducer._input_preprocessor._batched_contextual_linear_weights",
        "transducer.preprocessor.contextual_weight",
    ),
    ("_hstu_transducer._input_preprocessor._batched_contextual_linear_bias", "transducer.preprocessor.contextual_bias"),
    ("_hstu_transducer._input_preprocessor._content_embedding_mlp.", "transducer.preprocessor.content_mlp."),
    ("_hstu_transducer._input_preprocessor._additional_embedding_mlp.", "transducer.preprocessor.attribute_mlp."),
    ("_hstu_transducer._input_preprocessor._action_embedding_mlp.", "transducer.preprocessor.action_encoder.mlp."),
    (
        "_hstu_transducer._input_preprocessor._action_encoder._action_embedding_table",
        "transducer.preprocessor.action_encoder.action_embedding",
    ),
    (
        "_hstu_transducer._input_preprocessor._action_encoder._target_action_embedding_table",
        "transducer.preprocessor.action_encoder.target_action_embedding",
    ),
    (
        "_hstu_transducer._positional_encoder._position_embeddings_weight",
        "transducer.positional_encoder.position_embedding",
    ),
    (
        "_hstu_transducer._positional_encoder._timestamp_embeddings_weight",
        "transducer.positional_encoder.time_embedding",
    ),
    ("_hstu_transducer._output_postprocessor._layer_norm.", "transducer.postprocessor.layer_norm."),
    (
        "_hstu_transducer._output_postprocessor._time_feature_combiner.",
        "transducer.postprocessor.time_feature_combiner.",
    ),
    ("_stu_layers.", "layers."),  # a stack of layers alone
)
PUBLIC_HEAD = "_multitask_module._prediction_module."
OUR_HEADS = "head.heads."
LAST_HEAD_LAYER = "2."


def import_public_weights(model: nn.Module, public: Mapping[str, torch.Tensor]) -> None:
    """Copy public weights into ``model`` (a ``DlrmHSTU``, or an ``STUStack`` for a public stack alone), in place.

    Raises:
        UserError: a name is unknown, a parameter of the model is not among them, or a shape differs. The model is left
            as it was.
    """
    with torch.no_grad():
        ours = dict(model.named_parameters())
        renamed = from_public_names(public, num_tasks=_num_tasks(ours))
        for name in renamed:
            if name not in ours:
                raise UserError(f"public weights have {_origin(name)!r}, which this model ({name}) does not have")
        for name, parameter in ours.items():
            if name not in renamed:
                raise UserError(f"public weights lack {_origin(name)!r}, which the model's {name} needs")
            if renamed[name].shape != parameter.shape:
                raise UserError(
                    f"public weight {_origin(name)!r} has shape {tuple(renamed[name].shape)}, the model's {name} "
                    f"has {tuple(parameter.shape)}: build the model with the same sizes"
                )
        for name, parameter in ours.items():
            parameter.copy_(renamed[name])


def export_public_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters under public names (detached, shared memory where the layout is the same)."""
    return to_public_names({name: parameter.detach() for name, parameter in model.named_parameters()})


def from_public_names(public: Mapping[str, torch.Tensor], num_tasks: int = 1) -> dict[str, torch.Tensor]:
    """Rename tensors (weights, or gradients) from public names to ours.

    Raises:
        UserError: a name is unknown, or the last layer of the head has another number of tasks.
    """
    ours = {}
    for name, tensor in public.items():
        if name.startswith(PUBLIC_HEAD):
            layer = name.removeprefix(PUBLIC_HEAD)
            if layer.startswith(LAST_HEAD_LAYER) and len(tensor) != num_tasks:
                raise UserError(
                    f"public weight {name!r} has {len(tensor)} rows, one for each task, and the model has {num_tasks} "
                    "tasks: build the model with the same tasks"
                )
            for task in range(num_tasks):
                own = tensor[task : task + 1] if layer.startswith(LAST_HEAD_LAYER) else tensor
                ours[f"{OUR_HEADS}{task}.{layer}"] = own
            continue
        ours[_rename(name, RENAMES)] = tensor
    return ours


def to_public_names(ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of ``from_public_names``; heads that do not share their hidden layer raise ``UserError``."""
    public: dict[str, torch.Tensor] = {}
    heads: dict[str, list[torch.Tensor]] = {}
    for name, tensor in ours.items():
        if name.startswith(OUR_HEADS):
            _, layer = name.removeprefix(OUR_HEADS).split(".", 1)
            heads.setdefault(layer, []).append(tensor)
        else:
            public[_rename(name, [(own, theirs) for theirs, own in RENAMES])] = tensor
    for layer, tensors in heads.items():
        if layer.startswith(LAST_HEAD_LAYER):
            public[PUBLIC_HEAD + layer] = torch.cat(tensors)
            continue
        if any(not torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            raise UserError(
                f"the {len(tensors)} task heads differ in layer {layer!r}; the public layout shares it: export a model "
                "with one task"
            )
        public[PUBLIC_HEAD + layer] = tensors[0]
    return public


def _rename(name: str, renames) -> str:
    for old, new in renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    raise UserError(f"parameter name {name!r} is not known to the importer: expected one of the public model's names")


def _origin(our_name: str) -> str:
    """The public name of one of our parameters."""
    if our_name.startswith(OUR_HEADS):
        return PUBLIC_HEAD + our_name.removeprefix(OUR_HEADS).split(".", 1)[1]
    return _rename(our_name, [(own, theirs) for theirs, own in RENAMES])


def _num_tasks(names) -> int:
    return len({name.removeprefix(OUR_HEADS).split(".", 1)[0] for name in names if name.startswith(OUR_HEADS)}) or 1
