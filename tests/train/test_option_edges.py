"""The range that is documented is the one that works: every numeric option at its edges, in a step of a tiny run.

An edge either trains and scores, or is refused in one line that names it; which ones are refused is written down here.
"""

import dataclasses
import itertools
import re

import pytest
import torch

from generative_recommenders.errors import UserError
from generative_recommenders.options import declared
from generative_recommenders.train import build, config, datasets, distributed, gin_files
from generative_recommenders.train.__main__ import main
from generative_recommenders.train.evaluation import run_model

STEP_SECTIONS = ("model", "optimizer", "sharding")  # what a step shows; the others need a run
# Edges that are inside the option's own range and refused for what stands beside them.
REFUSED = {
    **{f"model.hstu_embedding_dim={width}": "give model.embedding_dim" for width in (2, 3, 33)},
    **{f"model.hstu_attn_linear_dim={width}": "a multiple of 8" for width in (1, 2, 33)},
    **{f"model.max_seq_len={rows}": "a sample can have 10 rows" for rows in (1, 2)},
    **{f"model.contextual_seq_len={rows}": "must be 0 .* or the number of" for rows in (33, 2**20)},
}
# Too large for a test in full: the tables or the weights beside them take the memory.
WITH_EDGE = {"model.hstu_embedding_dim=8192": ["model.hstu_num_layers=1", "model.embedding_dim=4"]}


def edges(field):
    """Low, low + 1, an odd number and high of a field with a range; fractions: both ends."""
    about = declared(field)
    low, high, step = about.low, about.high, about.multiple_of or 1
    if low is None:
        return []
    whole = "int" in str(field.type)
    some = [low, low + step, *([33] if step == 1 else [9 * step])] if whole else [low]
    return [*(value for value in some if high is None or value < high), *([high] if high is not None else [])]


def numeric(sections):
    return [
        (f"{name}.{field.name}", value)
        for name in sections
        for field in dataclasses.fields(config.SECTIONS[name])
        for value in edges(field)
    ]


@pytest.fixture
def step(small_config, world):
    """``step("model.hstu_num_heads=1", …)``: forward, backward, update and a score with the real sharding."""
    return make_step(small_config(), world)


@pytest.fixture
def gpu_step(small_config):
    """The same on a GPU, in bf16, with the backends that are chosen there."""
    joined = distributed.join(torch.device("cuda", 0))
    yield make_step(small_config({"model.backend": "None", "model.autocast": "'auto'"}), joined)
    torch.distributed.destroy_process_group()


def make_step(path, world):
    dataset = datasets.FACTORIES["tiny"](users=4)
    batch = lambda: next(iter(dataset.batches(dataset.windows, 4)))

    def run(*bindings):
        resolved = gin_files.load([path], bindings)
        model, optimizers, _ = build.build_model(resolved, dataset, world)
        optimizers.start_step(0)
        out, _ = run_model(model.train(), batch(), world.device)
        out.loss.backward()
        norm = optimizers.finish_step()
        with torch.no_grad():
            scored, _ = run_model(model.eval(), batch(), world.device)
        assert out.loss.isfinite() and norm.isfinite() and scored.logits.isfinite().all()

    return run


def check_edges(step, sections):
    for name, value in numeric(sections):
        edge = f"{name}={value}"
        if edge in REFUSED:
            with pytest.raises(UserError, match=REFUSED[edge]) as refused:
                step(edge)
            assert name in str(refused.value) and "\n" not in str(refused.value)
            continue
        try:
            step(edge, *WITH_EDGE.get(edge, ()))
        except Exception as error:
            raise AssertionError(f"{edge} is documented and does not work") from error


@pytest.mark.parametrize("section", STEP_SECTIONS)
def test_every_edge_of_an_option_works_or_is_refused_by_name(step, section):
    assert len(numeric([section])) >= {"model": 50, "optimizer": 15, "sharding": 1}[section]
    check_edges(step, [section])


@pytest.mark.gpu
def test_the_edges_of_the_model_work_on_a_gpu(gpu_step):
    check_edges(gpu_step, ["model"])


def test_beyond_an_edge_is_refused_with_the_range():
    for name, cls in config.SECTIONS.items():
        for field in dataclasses.fields(cls):
            low, high = declared(field).low, declared(field).high
            beyond = [low - 1] if low is not None else []
            beyond += [high + 1] if high is not None else []
            beyond += [2**62, 10**400, float("nan"), float("inf")] if low is not None else []
            for value in beyond:
                with pytest.raises(UserError, match=re.escape(f"{name}.{field.name} = ")):
                    cls(**{field.name: value})


@pytest.mark.parametrize("width", [1, 6, 30, 8191])
def test_a_table_width_that_fbgemm_does_not_take_is_refused_with_the_widths_that_it_takes(small_config, width):
    with pytest.raises(UserError, match=f"model.embedding_dim = {width}: expected .*4 to 2048, a multiple of 4"):
        gin_files.load([small_config()], [f"model.embedding_dim={width}"])


def test_a_model_wider_than_a_table_can_be_asks_for_the_tables_width(small_config):
    with pytest.raises(UserError, match="model.hstu_embedding_dim = 4096: .* give model.embedding_dim = 2048"):
        gin_files.load([small_config()], ["model.hstu_embedding_dim=4096"])


def test_widths_that_do_not_fit_each_other_work_with_another_beside_them(step):
    for heads, value_width in ((8, 1), (4, 2), (8, 33)):
        step(f"model.hstu_num_heads={heads}", f"model.hstu_attn_linear_dim={value_width}", "model.use_group_norm=True")
    with pytest.raises(UserError, match="model.use_group_norm = True: needs model.hstu_num_heads of 2"):
        step("model.hstu_num_heads=1", "model.use_group_norm=True")
    for width, after in itertools.product((2, 3, 33), ("timestamp", "layer_norm", "l2_norm")):
        step(f"model.hstu_embedding_dim={width}", "model.embedding_dim=4", f"model.postprocessor={after}")
    for width in (4, 132):
        step(f"model.embedding_dim={width}", "sharding.tables={'item_id': 'column_wise'}")
    step("model.hstu_attn_qk_dim=1", "model.last_layer_targets_only=True")
    step("model.hstu_num_layers=0", "model.hstu_attn_linear_dim=1")


RUNS = {
    "low": "seed=0 batch_size=1 eval_batch_size=0 epochs=1 max_steps=2 log_every=1 eval_every_samples=1 target_auc=0.0",
    "high": "seed=2147483647 batch_size=1048576 eval_batch_size=1048576 epochs=3 eval_every_epochs=2 log_every={big} "
    "max_steps={big} eval_every_samples={big} max_gap_to_best=1.0",
    "off": "eval_every_epochs=0 mode=streaming-train-eval eval_every_windows=0 max_steps=0",
    "windows": "mode=streaming-train-eval eval_every_windows={big} eval_batch_size=1",
}
MORE = {
    "low": "checkpoint.every_steps=1 checkpoint.keep=1 optimizer.warmup_steps=1 optimizer.decay_until_step=2",
    "high": "checkpoint.every_steps={big} checkpoint.keep={big} checkpoint.every_seconds=1e9 "
    "optimizer.warmup_steps={big} optimizer.clip_norm=1e30 data.dataset=tiny",
    "off": "optimizer.clip_norm=0.0 optimizer.dense_lr=0.0 optimizer.sparse_lr=0.0",
    "windows": "checkpoint.every_windows=1 mlperf.target_auc=0.5 mlperf.first_eval_samples={big}",
}


@pytest.mark.parametrize("which", RUNS)
def test_a_run_at_the_edges_of_what_steers_it(small_config, tmp_path, capfd, which):
    options = [f"train.{option}" for option in RUNS[which].split()] + MORE[which].split()
    bindings = [word for option in options for word in ("--bind", option.format(big=2**62 - 1))]
    status = main(["--config", small_config(), "--runs-dir", str(tmp_path), "--run-name", "x", *bindings])
    assert status == 0, capfd.readouterr().err


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A prepared cache of own events, a MovieLens folder, and a place for generated data."""
    from generative_recommenders.data.events.__main__ import main as main_of_events  # a GPU's machine may lack DuckDB

    folder = tmp_path_factory.mktemp("edges")
    rows = [f"{u},{i % 7},{1_700_000_000 + 4000 * i + u},{i % 2}" for u in range(6) for i in range(30)]
    (folder / "events.csv").write_text("user,item,time,label\n" + "\n".join(rows) + "\n")
    more = ["--min-history", "2", "--memory", "1GiB", "--threads", "1", "--no-space-check"]
    source = ["--events", str(folder / "events.csv"), "--columns", "label=label", "--cache", str(folder / "cache")]
    assert main_of_events(["prepare", *source, *more]) == 0
    ratings = [f"{k % 9},{k % 7},{(k % 9 + k % 7) % 9 / 2 + 0.5},{1000 + 10000 * k}" for k in range(300)]
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(ratings) + "\n")
    movies = [f"{m},Film ({1990 + m}),Drama" for m in range(7)]
    (folder / "movies.csv").write_text("movieId,title,genres\n" + "\n".join(movies) + "\n")
    return folder


NAN, BIG = float("nan"), 2**62
# Option of a data set → values that work, values that are refused by its name.
DATA_EDGES = {
    "history_length": ((1, 2, 3, 4), (-1, 0, 2**20 + 1, BIG)),
    "scan_limit": ((1, BIG - 1), (-1, 0, BIG)),
    "holdout_fraction": ((1e-9, 0.5), (-0.1, 0.0, 1.0, NAN)),
    "train_days": ((1 / 24, 1.0, 1e4), (-1.0, 0.0, 1e9, NAN)),
    "window_days": ((1 / 86_400, 1e9), (-1.0, 0.0, 1e-9, NAN, float("inf"))),
    "window_seconds": ((1, BIG - 1), (-1, 0, BIG)),
    "table_rows_limit": ((1, BIG - 1), (-1, 0, BIG)),
    "num_workers": ((0, 1, 3), (-1, 1025, BIG)),
    "min_history": ((0, 1), (-1, BIG)),
    "holdout_days": ((0.5, 1.0), (-1.0, 0.0, 1e-9, NAN)),
    "users": ((1, 2), (-1, 0)),
    "items": ((1, 2), (-1, 0)),
    "days": ((6, 7), (-1, 0)),
    "events_median": ((1.0,), (0.0, 0.5, NAN)),
    "events_mean": ((30.0,), (0.5, -1.0, NAN)),
    "seed": ((0, BIG - 1), (-1, BIG)),
}
# In an interleaved history each of the three kinds needs a row; a prepared cache has the min_history that it has.
OTHERWISE = {
    ("synthetic_yambda", "history_length"): ((3, 4), (-1, 0, 1, 2, 2**20 + 1)),
    ("events", "min_history"): ((2,), (-1, 0, 1, 3)),
}


@pytest.mark.parametrize("name", ["events", "movielens_small", "synthetic_yambda"])
def test_every_edge_of_a_data_set_s_own_options(files, name):
    factory = datasets.FACTORIES[name]
    given = {
        "events": {"cache": str(files / "cache")},
        "movielens_small": {"path": str(files)},
        "synthetic_yambda": {"path": str(files / "made"), "users": 20, "days": 6, "items": 30},
    }[name]
    if name == "synthetic_yambda":
        given |= {"events_median": 30.0, "events_mean": 40.0}
    tried = 0
    for option in datasets.parameters(name).keys() & DATA_EDGES.keys():
        good, bad = OTHERWISE.get((name, option), DATA_EDGES[option])
        for value in good:
            dataset = factory(**datasets.check_options(name, {**given, option: value}))
            for windows in (dataset.windows, [dataset.holdout]):
                assert next(iter(dataset.batches(windows, 4))).batch_size > 0, f"{option}={value}"
        for value in bad:
            with pytest.raises(UserError) as refused:
                factory(**datasets.check_options(name, {**given, option: value}))
            assert option in str(refused.value) and "\n" not in str(refused.value)
        tried += len(good) + len(bad)
    numbers = [p for p in datasets.parameters(name).values() if re.match("int|float", str(p.annotation))]
    assert tried > 3 * len(numbers)
    assert {p.name for p in numbers} <= DATA_EDGES.keys()
