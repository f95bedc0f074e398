"""Configuration: nothing is ignored in silence, precedence, ranges, and a resolved form that reloads to itself."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.train import config as sections
from generative_recommenders.train import gin_files

REPO = pathlib.Path(__file__).resolve().parents[2]


def refused(files, *bindings):
    with pytest.raises(UserError) as caught:
        gin_files.load(files, bindings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dataset", ["yambda", "events", "movielens_small", "synthetic_yambda"])
def test_the_section_of_the_chosen_data_set_is_suggested_first(tmp_path, dataset):
    path = tmp_path / "x.gin"
    path.write_text(f"data.dataset = '{dataset}'\n")
    assert f"did you mean {dataset}.history_length?" in refused([str(path)], "yambda_50m.history_length=3")
    assert "did you mean synthetic_yambda.history_length?" in refused([], "yambda_50m.history_length=3")


@pytest.mark.parametrize(
    "binding, wanted",
    [
        ("train.bacth_size=3", "train.batch_size"),
        ("train.batchsize=3", "train.batch_size"),
        ("trian.seed=3", "train.seed"),
        ("optimiser.dense_lr=0.1", "optimizer.dense_lr"),
        ("train.dense_lr=0.1", "optimizer.dense_lr"),
        ("model.max_seqlen=8", "model.max_seq_len"),
        ("tiny.user=3", "tiny.users"),
        ("data.dataset='tiyn'", "tiny"),
        ("movielens_100k.histroy_length=3", "movielens_100k.history_length"),
    ],
)
def test_a_misspelt_binding_is_refused_with_the_nearest_name(small_config, binding, wanted):
    message = refused([small_config()], binding)
    assert f"did you mean {wanted}?" in message
    assert binding.split("=")[0] in message


def test_a_name_like_no_other_lists_the_options_of_its_section(small_config):
    assert "train has mode, seed, batch_size" in refused([small_config()], "train.zzz=1")


@pytest.mark.parametrize(
    "text, line",
    [("train.bacth_size = 3\n", 2), ("trian.seed = 3\n", 2), ("train.seed = (\n", None), ("train.seed 3\n", None)],
)
def test_a_mistake_in_a_file_names_the_file(small_config, tmp_path, text, line):
    path = tmp_path / "wrong.gin"
    path.write_text("# first line\n" + text)
    message = refused([small_config(), str(path)])
    assert "wrong.gin" in message
    assert line is None or f"line {line}" in message


def test_a_missing_file_is_named():
    assert "nowhere.gin: no such file" in refused(["nowhere.gin"])


@pytest.mark.parametrize(
    "binding, wanted",
    [
        ("train.batch_size=0", "expected a value in 1 to"),
        ("train.batch_size=1e3", "whole number"),
        ("train.batch_size='many'", "whole number"),
        ("train.batch_size=True", "whole number"),
        ("train.batch_size=None", "whole number"),
        ("train.batch_size=", "expected section.option=value"),
        ("train.batch_size", "expected section.option=value"),
        ("train.shuffle=0", "True or False"),
        ("train.shuffle=false", "True or False"),
        ("train.mode=evla", "expected one of train, eval, train-eval, streaming-train-eval"),
        ("train.target_auc=1.5", "0.0 to 1.0"),
        ("optimizer.dense_lr=-1", "0.0 to 10.0"),
        ("optimizer.dense_lr=float('nan')", "not valid gin"),
        ("optimizer.decay_until_step=0.5", "whole number"),
        ("model.output_dropout_ratio=1.0", "0.0 to 0.99"),
        ("model.tasks=('dislike',)", "listen_plus, like, skip"),
        ("model.tasks=()", "listen_plus, like, skip, rating"),
        ("model.tasks=('rating', 'skip')", "begins with 'rating'"),
        ("sharding.tables={'uid': 'rowwise'}", "row_wise, table_wise, column_wise"),
        ("train.stop_at_target=True", "needs train.target_auc"),
        ("tiny.users=2.5", "whole number"),
        ("train.seed=@tiny()", "train.seed = @tiny(): references are not used here"),
        ("model.tasks=[@tiny()]", "references are not used here"),
        ("sharding.tables={'uid': @tiny()}", "references are not used here"),
        ("macro.value=3", "not an option of a run"),
        ("optimizer.clip_norm=1e999", "finite number"),
        ("optimizer.beta1=1.0", "0.0 to 0.999999"),
        ("train.epochs=1000000000", "1 to 100000"),
        ("model.tasks=([1],)", "model.tasks names [1]"),
        ("sharding.tables={1: 'row_wise'}", "sharding.tables names 1"),
    ],
)
def test_a_wrong_type_or_range_is_refused(small_config, binding, wanted):
    assert wanted in refused([small_config()], binding)


@pytest.mark.parametrize("binding", ["SIZE=3", "scope/train.seed=3", "movielens_100k.history_length=9"])
def test_a_binding_without_effect_is_refused(small_config, binding):
    assert binding.split("=")[0] in refused([small_config()], binding)


def test_a_macro_without_a_value_is_refused(small_config):
    assert "%SIZE" in refused([small_config()], "train.seed=%SIZE")


def test_the_last_value_of_a_macro_wins_and_is_what_is_saved(small_config, tmp_path):
    path = tmp_path / "macro.gin"
    path.write_text("SIZE = 32\ntrain.batch_size = %SIZE\nSIZE = 48\n")
    assert gin_files.load([small_config(), str(path)]).train.batch_size == 48
    config = gin_files.load([small_config(), str(path)], ["SIZE=64"])
    assert config.train.batch_size == 64
    assert "train.batch_size = 64" in config.to_gin()


def test_a_macro_that_a_binding_makes_idle_is_no_error(small_config, tmp_path):
    path = tmp_path / "macro.gin"
    path.write_text("SIZE = 32\ntrain.batch_size = %SIZE\n")
    assert gin_files.load([small_config(), str(path)], ["train.batch_size=8"]).train.batch_size == 8


def test_the_resolved_configuration_reloads_to_the_same_values(small_config, tmp_path):
    bindings = ["train.batch_size=8", "sharding.tables={'uid': 'row_wise'}", "model.tasks=('listen_plus', 'skip')"]
    config = gin_files.load([small_config()], bindings)
    saved = tmp_path / "resolved.gin"
    saved.write_text(config.to_gin())
    again = gin_files.load([str(saved)])
    assert again.values() == config.values()
    every = {f"{s}.{f.name}" for s, c in sections.SECTIONS.items() for f in dataclasses.fields(c)}
    assert set(config.values()) >= every


@pytest.fixture
def cap_in_gin(small_config):
    return small_config({"sharding.hbm_cap_gb": "10", "train.epochs": "3"})


def test_precedence_is_bind_then_environment_then_gin_then_code(small_config, cap_in_gin, monkeypatch):
    read = lambda *bindings: gin_files.load([cap_in_gin], bindings)
    assert gin_files.load([small_config(name="none.gin")]).sharding.hbm_cap_gb == 0.0
    assert read().sharding.hbm_cap_gb == 10
    monkeypatch.setenv("HSTU_HBM_CAP_GB", "20")
    config = read()
    assert config.sharding.hbm_cap_gb == 20
    assert config.sources["sharding.hbm_cap_gb"] == "environment HSTU_HBM_CAP_GB"
    config = read("sharding.hbm_cap_gb=30")
    assert config.sharding.hbm_cap_gb == 30
    assert config.sources["sharding.hbm_cap_gb"] == "--bind"


def test_an_environment_value_changes_its_own_option_only(cap_in_gin, monkeypatch):
    before = gin_files.load([cap_in_gin]).values()
    monkeypatch.setenv("HSTU_HBM_CAP_GB", "200")
    after = gin_files.load([cap_in_gin]).values()
    assert {name for name in after if after[name] != before[name]} == {"sharding.hbm_cap_gb"}


@pytest.mark.parametrize("text", ["", "  ", "much", "-1", "nan", "inf"])
def test_a_bad_environment_value_is_named(small_config, monkeypatch, text):
    monkeypatch.setenv("HSTU_HBM_CAP_GB", text)
    assert "HSTU_HBM_CAP_GB" in refused([small_config()])


@pytest.mark.parametrize("text, wanted", [("false", False), ("0", False), ("True", True), ("1", True), ("off", False)])
def test_boolean_environment_values(monkeypatch, text, wanted):
    monkeypatch.setenv("HSTU_TRACEBACK", text)
    assert settings.get("HSTU_TRACEBACK") is wanted


@pytest.mark.parametrize("text", ["", "1e3", "1.5", "x"])
def test_integer_environment_values_are_digits_only(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(UserError, match="WORLD_SIZE"):
        settings.get("WORLD_SIZE")


def test_one_load_leaves_nothing_for_the_next(small_config):
    assert gin_files.load([small_config()], ["train.seed=77"]).train.seed == 77
    assert gin_files.load([small_config()]).train.seed == 1


def test_every_environment_option_is_a_declared_knob():
    variables = [option.variable for option in sections.section_options().values()]
    assert {variable.name for variable in variables if variable} <= set(settings.knobs())


@pytest.mark.parametrize(
    "arguments", [["configs/movielens_100k.gin"], ["configs/synthetic.gin", "data.dataset=movielens_small"]]
)
def test_a_data_set_whose_package_is_missing_says_which(arguments):
    program = """
import sys
sys.modules["polars"] = None  # importing it raises ModuleNotFoundError
from generative_recommenders.errors import UserError
from generative_recommenders.train import gin_files
try:
    gin_files.load(sys.argv[1:2], sys.argv[2:])
except UserError as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=REPO)
    assert "needs the package polars, which is not installed" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
