"""The bytes of a step: against peaks measured on a GPU, and against what the kernels' own functions keep."""

import itertools
import json
import pathlib

import pytest
import torch

from benchmarks.train_step import CONTEXT_TABLES, ITEM_TABLES, VARIANTS
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig
from generative_recommenders.train import memory_model
from generative_recommenders.train.memory_model import StepShape

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GIB = 2**30
ROWS_CAP = 1_000_000
RECOMPUTE = ("recompute_normed_x", "recompute_uvqk", "recompute_y")


def benchmark_shape(**options):
    """The step that ``benchmarks/train_step.py`` measured, and its tables' bytes."""
    rows = {name: min(count, ROWS_CAP) for name, count in {**CONTEXT_TABLES, **ITEM_TABLES}.items()}
    config = DlrmHSTUConfig(
        table_rows=rows, contextual_feature_names=tuple(CONTEXT_TABLES), attn_norm="batch_max", **options
    )
    with torch.device("meta"):
        model = DlrmHSTU(config, device="meta", embedding_device="meta")
    dense = sum(p.numel() for name, p in model.named_parameters() if "embedding_collection" not in name)
    return StepShape(config, 1024, 2663.0, dense), sum(rows.values()) * (512 * 4 + 4)


def records(file):
    return json.loads((RESULTS / f"{file}.json").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_peaks_of_whole_steps_as_measured_on_a_gpu(variant):
    """The allocator's peak has no context in it, which no tensor shows."""
    record = next(r for r in records("train_step") if r["shape"].endswith(f",{variant}"))
    shape, tables = benchmark_shape(**VARIANTS[variant])
    said = memory_model.peak(shape).total - memory_model.CONTEXT_BYTES + tables
    assert said / GIB == pytest.approx(record["peak_gib"], rel=0.02)


@pytest.mark.parametrize(("name", "recompute"), [("norecompute", False), ("recompute", True)])
def test_peaks_of_one_layer_as_measured_on_a_gpu(name, recompute):
    """There the layer's input lies outside of what was measured, and its output is held instead."""
    record = next(r for r in records("stu_layer") if r["name"] == f"stu_layer/triton/{name}/uniform")
    shape, _ = benchmark_shape(hstu_num_layers=1, **dict.fromkeys(RECOMPUTE, recompute))
    last = [m.parts["working memory"] for m in memory_model.moments(shape) if m.name == "backward of layer 1"]
    said = max(last) - shape.joined * 512 * 2
    assert said == pytest.approx(record["peak_extra_bytes"], rel=0.02)


class Saved:
    """Bytes of the buffers that autograd keeps, each once, without parameters and what is smaller than ``least``."""

    def __init__(self, parameters, least=0):
        self.skip = {p.untyped_storage().data_ptr() for p in parameters}
        self.least, self.found = least, {}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.skip and storage.nbytes() >= self.least:
            self.found[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    def bytes(self, call):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            self.out = call()
        return sum(size for size, _ in self.found.values())


def small_config(**options):
    sizes = dict(hstu_embedding_dim=40, hstu_num_heads=2, hstu_attn_qk_dim=16, hstu_attn_linear_dim=24)
    rows = {"item_id": 5, "artist_id": 5}
    return DlrmHSTUConfig(
        table_rows=rows, item_feature_names=("item_id", "artist_id"), hstu_num_layers=1, backend="TRITON",
        max_seq_len=64, **(sizes | options),
    )  # fmt: skip


@pytest.mark.parametrize("recompute", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_layer_keeps_exactly_these_bytes(recompute, dropout):
    pytest.importorskip("triton")
    from generative_recommenders.modules.stu import STULayer

    config = small_config(output_dropout_ratio=dropout, **dict(zip(RECOMPUTE, recompute, strict=True)))
    layer, lengths = STULayer(config.layer_config()), [20, 13]
    x = torch.randn(sum(lengths), 40, requires_grad=True)
    offsets = torch.tensor([0, 20, 33])
    saved = Saved(layer.parameters(), least=sum(lengths) * 4)  # not the offsets
    found = saved.bytes(lambda: layer(x, offsets, 20))
    shape = StepShape(config, 2, sum(lengths) / 2, 0, half=False)
    assert found == memory_model.layer_bytes(shape, 0)


@pytest.mark.parametrize("computation", ["absorbed", "materialised"])
def test_a_targets_only_layer_keeps_its_input_and_little_else(computation):
    pytest.importorskip("triton")
    from generative_recommenders.modules.stu import STULayer
    from generative_recommenders.ops.candidate_attention import CandidateRows, TargetSummary

    config = small_config(last_layer_targets_only=True, targets_only_computation=computation)
    layer, rows = STULayer(config.layer_config()), 61
    x = torch.randn(2 * rows, 40, requires_grad=True)
    offsets, targets = torch.tensor([0, rows, 2 * rows]), torch.tensor([1, 1])
    candidates = CandidateRows.of(offsets, targets, TargetSummary(2, 2, 1, 1))
    saved = Saved(layer.parameters())
    saved.bytes(lambda: layer.forward_targets_only(x, offsets, candidates, computation))
    found = sum(size for size, tensor in saved.found.values() if tensor.shape[0] == 2 * rows)
    shape = StepShape(config, 2, rows, 0, half=False)
    assert found == pytest.approx(memory_model.layer_bytes(shape, 0), rel=0.02)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_preprocessor_keeps_these_bytes(recompute):
    """Of many rows, so that what is kept of two samples or of patterns is nothing beside them."""
    pytest.importorskip("triton")
    from generative_recommenders.modules.preprocessor import EventRows

    config = small_config(recompute_preprocessor=recompute, hstu_embedding_dim=32, preprocessor_hidden_dim=16)
    model = DlrmHSTU(config, seed=1).train()
    history, samples = 300, 2
    events = samples * (history + 1)
    offsets = torch.arange(samples + 1)
    rows = EventRows(
        torch.randn(events, 32, requires_grad=True),
        torch.randn(events, 32, requires_grad=True),
        offsets * history,
        offsets,
        torch.arange(samples * history),
        torch.full((samples,), 10**6),
    )
    assert model.transducer.why_not_fused(rows) is None
    saved = Saved(model.parameters(), least=events * 4)
    bits = torch.ones(samples * history, dtype=torch.int64)
    saved.bytes(lambda: model.transducer.prepare(rows, bits).x)
    tables = [size for size, tensor in saved.found.values() if tensor.dtype == torch.int64]
    found = sum(size for size, _ in saved.found.values()) - sum(tables)
    shape = StepShape(config, samples, history + 1, 0, half=False)
    assert found == pytest.approx(memory_model.preprocessor_bytes(shape), rel=0.03)


@pytest.mark.parametrize(("samples", "rows", "longest"), [(1024, 2663, 4096), (4, 100, 4096), (16, 16384, 16384)])
def test_room_for_slopes_is_what_the_backward_allocates(samples, rows, longest):
    pytest.importorskip("triton")
    from generative_recommenders.ops.attention.call import AttentionCall
    from generative_recommenders.ops.attention.hopper_launch import SlopePlan

    config = DlrmHSTUConfig({"item_id": 1}, ("item_id",), max_seq_len=longest)
    offsets = torch.arange(samples + 1) * rows
    call = AttentionCall(offsets, longest, 1.0, 1.0)
    tiles = SlopePlan.of(call, samples * rows, 4).tiles
    said = memory_model.slope_bytes(StepShape(config, samples, rows, 0), config.layer_config())
    assert said == tiles * 64 * 64 * 2


def test_every_recompute_option_makes_a_step_smaller_and_more_rows_make_it_larger():
    options = {"hstu_num_layers": 3, **dict.fromkeys(RECOMPUTE, False)}
    full = memory_model.peak(benchmark_shape(**options)[0]).total
    for name in (*RECOMPUTE, "recompute_preprocessor"):
        assert memory_model.peak(benchmark_shape(**(options | {name: True}))[0]).total < full, name
    shape, _ = benchmark_shape(**options)
    assert memory_model.peak(StepShape(shape.model, 1024, 3000.0, shape.dense_parameters)).total > full
    assert memory_model.peak(StepShape(shape.model, 1024, 2663.0, shape.dense_parameters, ranks=8)).total > full
