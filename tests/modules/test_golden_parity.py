"""Parity with the public model: outputs to 1e-5, gradients to 1e-4 (relative), fp32, through the importer."""

import json
import os
import pathlib

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig, TaskConfig
from generative_recommenders.modules.importer import from_public_names, import_public_weights
from generative_recommenders.modules.stu import STULayer, STULayerConfig, STUStack

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = pathlib.Path(os.environ.get("HSTU_GOLDEN_DIR", REPOSITORY.parent / "shared" / "golden"))
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no golden files in {GOLDEN}: set HSTU_GOLDEN_DIR to the folder that has them"
)


def golden_files(pattern):
    files = sorted(GOLDEN.glob(pattern)) if GOLDEN.is_dir() else []
    return files or [pytest.param(None, marks=pytest.mark.skip(reason=f"no {pattern} in {GOLDEN}"))]


class Meta(dict):
    """The sizes and choices of a golden file, which must all be made use of: what it says, the model must be told."""

    def __init__(self, values):
        super().__init__(values)
        self.used = set()

    def __getitem__(self, name):
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        return self[name] if name in self else default

    def check(self):
        assert self.keys() == self.used, f"no test passes on {', '.join(sorted(self.keys() - self.used))}"


def read(path):
    arrays = np.load(path)
    tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}
    return Meta(json.loads(str(arrays["meta"]))), tensors


def under(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def assert_close(got, want, tolerance, name):
    """Largest error relative to the largest magnitude of what is wanted."""
    assert got.shape == want.shape, name
    error = (got - want).abs().max() / want.abs().max().clamp_min(1e-12)
    assert error <= tolerance, f"{name}: relative error {error:.2e}"


def assert_gradients(model, golden):
    wanted = from_public_names(under(golden, "grad/"))
    parameters = dict(model.named_parameters())
    assert wanted.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert_close(parameter.grad, wanted[name], GRADIENT_TOLERANCE, f"gradient of {name}")


def make_stack(meta):
    config = STULayerConfig(
        embedding_dim=meta["D"],
        num_heads=meta["H"],
        hidden_dim=meta["d_v"],
        attention_dim=meta["d_qk"],
        max_seq_len=4096,
        attn_norm=meta["attn_norm"],
        max_attn_len=meta.get("max_attn_len", 0),
        contextual_seq_len=meta.get("contextual_seq_len", 0),
        use_group_norm=meta.get("use_group_norm", False),
        output_dropout_ratio=meta["dropout"],
    )
    return STUStack(STULayer(config) for _ in range(meta["layers"]))


@pytest.mark.parametrize("path", golden_files("stu_*.npz"), ids=lambda p: getattr(p, "stem", str(p)))
def test_stack(path):
    meta, golden = read(path)
    stack = make_stack(meta)
    meta.check()
    import_public_weights(stack, under(golden, "param/"))
    x = golden["x"].requires_grad_()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), golden["lengths"].cumsum(0)])
    y = stack(x, offsets, int(golden["max_seq_len"]), golden["num_targets"])
    assert_close(y, golden["y"], OUTPUT_TOLERANCE, "y")
    y.backward(golden["dy"])
    assert_close(x.grad, golden["dx"], GRADIENT_TOLERANCE, "dx")
    assert_gradients(stack, golden)


def features(golden, prefix):
    values = {name.split("/")[0]: t for name, t in under(golden, prefix).items() if name.endswith("/values")}
    lengths = [golden[f"{prefix}{name}/lengths"] for name in values]
    return KeyedJaggedTensor(list(values), torch.cat(list(values.values())), lengths=torch.cat(lengths))


def ranker(meta):
    return DlrmHSTU(
        DlrmHSTUConfig(
            table_rows=meta["tables"],
            contextual_feature_names=meta["contextual"],
            tasks=(TaskConfig("listen_plus", loss_weight=meta["loss_weight"]),),
            max_seq_len=meta["max_seq_len"],
            hstu_embedding_dim=meta["D"],
            hstu_num_heads=meta["H"],
            hstu_attn_qk_dim=meta["d_qk"],
            hstu_attn_linear_dim=meta["d_v"],
            hstu_num_layers=meta["layers"],
            preprocessor_hidden_dim=meta["preprocessor_hidden"],
            action_weights=meta["action_weights"],
            input_dropout_ratio=meta["dropout"],
            output_dropout_ratio=meta["dropout"],
            attn_norm=meta["attn_norm"],
            use_group_norm=meta.get("use_group_norm", False),
            full_turn=2 * 3.14,
        )
    )


@pytest.mark.parametrize("path", golden_files("dlrm_*.npz"), ids=lambda p: getattr(p, "stem", str(p)))
def test_ranker(path):
    check_ranker(path)


@pytest.mark.slow  # an interpreted program per entry of the position table
@pytest.mark.parametrize("path", golden_files("dlrm_three*.npz"), ids=lambda p: getattr(p, "stem", str(p)))
def test_ranker_prepared_in_one_pass(path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("HSTU_ENCODE_BACKEND", "TRITON")
    check_ranker(path)


def check_ranker(path):
    meta, golden = read(path)
    model = ranker(meta)
    assert set(golden["candidate/item_query_time/lengths"].tolist()) == {meta["candidates"]}
    meta.check()
    import_public_weights(model, under(golden, "param/"))
    out = model(features(golden, "uih/"), features(golden, "candidate/"))
    for name in ("user_embedding", "item_embedding", "predictions", "loss"):
        assert_close(getattr(out, name), golden[name], OUTPUT_TOLERANCE, name)
    assert torch.equal(out.labels, golden["labels"])
    out.loss.backward()
    assert_gradients(model, golden)


SIZES = {"D": 32, "H": 2, "d_v": 16, "d_qk": 16, "layers": 2, "attn_norm": "batch_max", "dropout": 0.0}


@pytest.mark.parametrize("choice", [dict(use_group_norm=True), dict(max_attn_len=6), dict(contextual_seq_len=3)])
def test_what_a_file_says_reaches_the_model(choice):
    meta = Meta(SIZES | choice)
    config = make_stack(meta).layers[0].config
    meta.check()
    ((name, value),) = choice.items()
    assert getattr(config, name) == value


def test_what_no_test_knows_fails():
    meta = Meta(SIZES | {"rotary": True})
    make_stack(meta)
    with pytest.raises(AssertionError, match="rotary"):
        meta.check()
