"""An option is declared once: whoever has it reads the same declaration, and begins with the same value."""

import dataclasses
import re

import pytest

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_config import DlrmHSTUConfig
from generative_recommenders.modules.stu import STULayerConfig
from generative_recommenders.modules.targets_only import COMPUTATION_CHOICES, TargetsOnlyGate
from generative_recommenders.ops.candidate_attention import COMPUTATIONS
from generative_recommenders.ops.dispatch import Backend
from generative_recommenders.options import OnResume, Option, convert, options_of
from generative_recommenders.shared_options import BACKEND_NAMES, RankerOptions
from generative_recommenders.train.config import SECTIONS, ModelConfig, section_options
from generative_recommenders.train.datasets import DATA_OPTIONS, FACTORIES, parameters


@pytest.mark.parametrize("owner", [DlrmHSTUConfig, ModelConfig])
def test_who_inherits_an_option_has_its_declaration(owner):
    for name, option in options_of(RankerOptions).items():
        assert options_of(owner)[name] is option


def test_a_model_and_its_layers_begin_with_the_declared_values():
    config = DlrmHSTUConfig(table_rows={"item_id": 2}, item_feature_names=("item_id",))
    layer = STULayerConfig(embedding_dim=8, num_heads=1, hidden_dim=8, attention_dim=8, max_seq_len=9)
    for field in dataclasses.fields(RankerOptions):
        if field.name != "max_seq_len":  # of the data, where there is none yet
            assert getattr(config, field.name) == field.default
        if field.name not in ("max_seq_len", "embedding_dim") and hasattr(layer, field.name):
            assert getattr(layer, field.name) == field.default
    gate = vars(TargetsOnlyGate()).items()
    assert dict(gate) == dict(vars(TargetsOnlyGate.of(config)))


def test_a_layer_takes_every_option_that_has_its_name():
    changed = {"causal": False, "max_attn_len": 7, "recompute_y": False, "attn_norm": "batch_max", "attn_alpha": 0.5}
    changed |= {"use_group_norm": True, "output_dropout_ratio": 0.4, "is_inference": True, "sort_by_length": False}
    config = DlrmHSTUConfig(table_rows={"item_id": 2}, item_feature_names=("item_id",), embedding_dim=16, **changed)
    layer = config.layer_config()
    assert {name: getattr(layer, name) for name in changed} == changed
    assert (layer.embedding_dim, layer.max_seq_len) == (config.hstu_embedding_dim, config.max_seq_len)


def test_a_variable_that_sets_an_option_has_its_range():
    found = {name: option for name, option in section_options().items() if option.variable}
    assert len(found) == 6
    for name, option in found.items():
        knob = settings.knobs()[option.variable.name]
        assert (knob.low, knob.high, knob.choices) == (option.low, option.high, option.choices)
        section, own = name.split(".")
        default = getattr(SECTIONS[section](), own)
        assert knob.default == default if option.variable.shows_default else (knob.default, default) == (None, 0.0)


def test_the_ops_have_what_options_and_variables_offer():
    assert BACKEND_NAMES == tuple(backend.value for backend in Backend)
    assert COMPUTATION_CHOICES == ("auto", *COMPUTATIONS)


def test_what_changes_on_resume():
    may = {kind: {n for n, option in section_options().items() if option.on_resume is kind} for kind in OnResume}
    assert {"train.epochs", "train.mode", "checkpoint.load"} <= may[OnResume.ASKS]
    assert {"train.log_every", "checkpoint.keep", "sharding.tables"} <= may[OnResume.FREE]
    fixed = may[OnResume.FIXED]
    assert {"train.seed", "train.batch_size", "optimizer.dense_lr", "data.dataset", "mlperf.enabled"} <= fixed
    assert {name for name in section_options() if name.startswith(("model.", "optimizer."))} <= fixed
    assert {n for n, option in DATA_OPTIONS.items() if option.on_resume is OnResume.PLACE} == {"path", "cache"}


def test_every_option_of_a_shipped_data_set_is_declared():
    shipped = {"synthetic_yambda", "movielens_100k", "movielens_small", "yambda", "events"} & FACTORIES.keys()
    assert {option for name in shipped for option in parameters(name)} <= DATA_OPTIONS.keys()


@pytest.mark.parametrize(
    "value, kind, about, said",
    [
        (1.5, int, Option(""), "a whole number"),
        (9, int, Option("", low=1, high=8), "a value in 1 to 8"),
        (6, int, Option("", low=4, multiple_of=4), "a value in 4 to inf, a multiple of 4"),
        ("c", str, Option("", choices=("a", "b")), "one of a, b"),
        (float("nan"), float, Option(""), "a finite number"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(value, kind, about, said):
    with pytest.raises(UserError, match=re.escape(f"x.y = {value!r}: expected {said}")):
        convert("x.y", value, kind, about)
