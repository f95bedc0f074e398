"""What would run and why not the better: one table per op, asked without tensors and without a GPU."""

import copy
import pickle

import pytest
import torch

from generative_recommenders.ops import dispatch
from generative_recommenders.ops.attention.backends import ATTENTION
from generative_recommenders.ops.attention.call import AttentionShape
from generative_recommenders.ops.candidate_attention.attention import CANDIDATE_ATTENTION
from generative_recommenders.ops.candidate_attention.call import CandidateShape
from generative_recommenders.ops.candidate_attention.rows import TargetSummary
from generative_recommenders.ops.dispatch import Backend, BackendUnavailable, Preference, explain, pack, unpack
from generative_recommenders.ops.encode.backends import ENCODE, EncodeShape
from generative_recommenders.ops.lmsd.backends import LMSD
from generative_recommenders.ops.lmsd.contract import LmsdConfig, LmsdShape

pytest.importorskip("triton")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
OPS = (ATTENTION, LMSD, ENCODE, CANDIDATE_ATTENTION)


def describe(op, device, dtype):
    """An ordinary call of the op."""
    return {
        ATTENTION: AttentionShape(device, dtype, 128, 128, dtype),
        LMSD: LmsdShape(device, dtype, (dtype, dtype), 10, 512, LmsdConfig(0.1, True, True, True)),
        ENCODE: EncodeShape(device, dtype),
        CANDIDATE_ATTENTION: CandidateShape("absorbed", device, dtype, 512, 4, TargetSummary(2, 2, 1, 1)),
    }[op]


@pytest.fixture(params=OPS, ids=lambda op: op.name)
def op(request):
    return request.param


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("HSTU_BACKEND", *(f"HSTU_{op.name.upper()}_BACKEND" for op in OPS)):
        monkeypatch.delenv(name, raising=False)


def test_a_gpu_takes_the_first_of_the_table(op):
    found = explain(op, describe(op, GPU, torch.bfloat16))
    assert found.backend is next(iter(op.backends)) is Backend.TRITON and not found.reasons
    assert str(found) == f"{op.name}: TRITON (the automatic choice)"


def test_a_dtype_without_kernels_is_named(op):
    found = explain(op, describe(op, GPU, torch.float64))
    assert found.backend is Backend.PYTORCH and "float64" in found.reasons[Backend.TRITON]


def test_a_cpu_takes_pytorch_and_says_why(op, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: False)
    found = explain(op, describe(op, CPU, torch.float32))
    assert found.backend is Backend.PYTORCH and "needs a GPU" in found.reasons[Backend.TRITON]


def test_the_interpreter_is_not_taken_unasked(op, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: True)
    call = describe(op, CPU, torch.float32)
    found = explain(op, call)
    assert found.backend is op.choose(call) is Backend.PYTORCH
    assert "ask for it by name" in found.reasons[Backend.TRITON]
    assert explain(op, call, "triton").backend is op.choose(call, "triton") is Backend.TRITON


def test_who_asked_is_said(op, monkeypatch):
    monkeypatch.setenv("HSTU_BACKEND", "PYTORCH")
    call = describe(op, GPU, torch.bfloat16)
    found = explain(op, call)
    assert found.backend is op.choose(call) is Backend.PYTORCH
    assert "HSTU_BACKEND" in found.source and found.reasons == {Backend.TRITON: "PYTORCH is asked for"}
    assert explain(op, call, "TRITON").source == "the backend argument"


def test_what_cannot_run_is_explained_as_it_is_refused(op):
    call = describe(op, GPU, torch.float64)
    found = explain(op, call, "TRITON")
    assert found.backend is None and "nothing can run" in str(found)
    with pytest.raises(BackendUnavailable) as refusal:
        op.choose(call, "TRITON")
    assert found.reasons[Backend.TRITON] in str(refusal.value)


def test_a_backend_that_an_op_does_not_have():
    call = describe(ATTENTION, GPU, torch.bfloat16)
    assert explain(ATTENTION, call, "CUDNN").reasons[Backend.CUDNN] == "this op has no such backend"
    with pytest.raises(BackendUnavailable, match="no such backend"):
        ATTENTION.choose(call, "CUDNN")


@pytest.mark.parametrize(
    "environment, runs, source",
    [
        ({}, "PYTORCH", "a file"),
        ({"HSTU_BACKEND": "TRITON"}, "TRITON", "environment variable HSTU_BACKEND"),
        ({"HSTU_ATTENTION_BACKEND": "TRITON"}, "TRITON", "environment variable HSTU_ATTENTION_BACKEND"),
        ({"HSTU_LMSD_BACKEND": "TRITON"}, "PYTORCH", "a file"),  # another op's
    ],
)
def test_a_preference_is_weaker_than_any_variable_and_stronger_than_the_table(monkeypatch, environment, runs, source):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    call = describe(ATTENTION, GPU, torch.bfloat16)
    choice = explain(ATTENTION, call, Preference("pytorch", "a file"))
    assert (choice.backend, choice.source) == (Backend[runs], source)
    assert explain(ATTENTION, call, "PYTORCH").backend is Backend.PYTORCH  # an argument beats both


def test_a_preference_that_cannot_serve_names_who_asked():
    with pytest.raises(BackendUnavailable, match=r"backend CUDNN \(from a file\) is unavailable"):
        ATTENTION.choose(describe(ATTENTION, CPU, torch.float32), Preference("CUDNN", "a file"))
    with pytest.raises(ValueError, match="backend 'QUICK' is not known"):
        ATTENTION.choose(describe(ATTENTION, CPU, torch.float32), Preference("QUICK", "a file"))


@pytest.mark.parametrize("request_", [None, Backend.TRITON, "triton", Preference("TRITON", "a file")])
def test_what_is_asked_for_passes_through_an_operators_string(request_):
    text = pack(request_)
    assert type(text) is str
    assert unpack(text) == (request_.value if isinstance(request_, Backend) else request_)
    if isinstance(request_, Preference):
        for again in (unpack(text), copy.deepcopy(request_), pickle.loads(pickle.dumps(request_))):
            assert type(again) is Preference and again.said_by == "a file"


def test_an_op_whose_variable_nobody_declared_is_no_op():
    with pytest.raises(RuntimeError, match="op 'scale' has no variable: declare HSTU_SCALE_BACKEND in settings.py"):
        dispatch.Op("scale", {Backend.PYTORCH: dispatch.Implementation(dispatch.never)})


def test_a_table_that_only_says_which_backend_serves_computes_nothing():
    with pytest.raises(TypeError, match="only says which backend serves"):
        ENCODE.backends[Backend.PYTORCH].forward()
