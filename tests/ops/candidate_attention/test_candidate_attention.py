"""Candidate attention against the whole layer in float64: outputs and every gradient, each computation and backend."""

import pytest
import torch

from generative_recommenders.ops.attention import UvqkParameters
from generative_recommenders.ops.candidate_attention import (
    COMPUTATIONS,
    CandidateRows,
    TargetSummary,
    backends,
    candidate_attention,
    why_not_computation,
)
from generative_recommenders.ops.dispatch import BackendUnavailable

from .conftest import CASES, Case, oracle, outputs_and_gradients, relative_errors


def compute(case, dtype, computation, backend, **changes):
    x, offsets, targets, parameters, grads = case.inputs(dtype)

    def op(x, p):
        return candidate_attention(
            x, offsets, targets, UvqkParameters(*p), *case.shape, computation, backend, **changes
        )

    return outputs_and_gradients(op, x, parameters, grads)


def truth(case):
    x, offsets, targets, parameters, grads = case.inputs()
    return outputs_and_gradients(lambda x, p: oracle(case, x, offsets, targets, p), x, parameters, grads)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_reference(case, computation):
    errors = relative_errors(compute(case, torch.float64, computation, "PYTORCH"), truth(case))
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_triton_fp32(case, computation):
    if computation == "materialised" and any(count != 1 for count in case.targets):
        pytest.skip("the materialised kernels take one target per sequence")
    errors = relative_errors(compute(case, torch.float32, computation, "TRITON"), truth(case))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("name", ["one target", "several"])
def test_triton_fp16(name):
    """No worse than twice plain PyTorch's own fp16 error on keys and values."""
    case = CASES[name]
    want = truth(case)
    plain = relative_errors(compute(case, torch.float16, "materialised", "PYTORCH"), want)
    ours = relative_errors(compute(case, torch.float16, "absorbed", "TRITON"), want)
    assert all(ours[part] <= 2 * plain[part] for part in ours), (ours, plain)


def test_history_rows_keep_their_gradient():
    dx = compute(CASES["one target"], torch.float32, "absorbed", "TRITON")[3]
    assert (dx.abs().sum(1) > 0).all()


def test_normaliser_on_the_device():
    """A 0-d tensor divides as the float does."""
    case = CASES["several"]
    as_tensor = Case(case.lengths, case.targets, norm=torch.tensor(40.0))
    for backend in ("PYTORCH", "TRITON"):
        plain = compute(case, torch.float32, "absorbed", backend)
        on_device = compute(as_tensor, torch.float32, "absorbed", backend)
        assert all(torch.equal(a, b) for a, b in zip(plain, on_device, strict=True))


def test_strided_rows():
    """x as columns of a wider buffer."""
    case = CASES["several"]
    x, offsets, targets, parameters, grads = case.inputs(torch.float32)
    wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=1)

    def op(x, p):
        return candidate_attention(x, offsets, targets, UvqkParameters(*p), *case.shape, backend="TRITON")

    plain = op(x, parameters)
    for a, b in zip(op(wide[:, : x.shape[1]], parameters), plain, strict=True):
        assert torch.equal(a, b)


def test_other_parameter_dtype():
    """fp32 parameters beside fp16 rows: gradients in the parameters' dtype."""
    case = CASES["one target"]
    x, offsets, targets, _, _ = case.inputs(torch.float16)
    parameters = [p.requires_grad_() for p in case.inputs(torch.float32)[3]]
    for backend in ("PYTORCH", "TRITON"):
        p = parameters
        out = candidate_attention(x, offsets, targets, UvqkParameters(*p), *case.shape, backend=backend)
        assert all(o.dtype == torch.float16 for o in out)
        grads = torch.autograd.grad(sum(o.float().sum() for o in out), parameters)
        assert all(g.dtype == torch.float32 for g in grads)


def test_candidate_rows():
    rows = CandidateRows.of(torch.tensor([0, 5, 5, 9]), torch.tensor([2, 0, 3]))
    assert rows.rows.tolist() == [3, 4, 6, 7, 8]
    assert rows.offsets.tolist() == [0, 2, 2, 5]
    assert rows.summary == TargetSummary(sequences=3, total=5, smallest=0, largest=3)
    one = CandidateRows.of(torch.tensor([0, 5, 9]), torch.tensor([1, 1]))
    assert one.rows.tolist() == [4, 8] and one.offsets.tolist() == [0, 1, 2] and one.summary.one_each


def test_errors():
    case = CASES["several"]
    x, offsets, targets, p, _ = case.inputs(torch.float32)
    with pytest.raises(ValueError, match="'folded' is not known"):
        candidate_attention(x, offsets, targets, UvqkParameters(*p), *case.shape, computation="folded")
    with pytest.raises(ValueError, match="uvqk_weight must be"):
        candidate_attention(x, offsets, targets, UvqkParameters(*p[:2], p[2][:, 1:], p[3]), *case.shape)
    with pytest.raises(ValueError, match="num_targets must be"):
        candidate_attention(x, offsets, targets[1:], UvqkParameters(*p), *case.shape)
    with pytest.raises(BackendUnavailable, match="exactly one target per sequence"):
        compute(case, torch.float32, "materialised", "TRITON")
    with pytest.raises(BackendUnavailable, match="float64"):
        compute(case, torch.float64, "absorbed", "TRITON")


def test_why_not_computation():
    """On a CPU plain PyTorch serves every batch; a backend asked for by name may not."""
    several = TargetSummary(3, 7, 0, 5)
    x = torch.zeros(2, 2048, dtype=torch.float64)
    assert all(why_not_computation(c, x, 4, several) is None for c in COMPUTATIONS)
    assert "exactly one target per sequence" in why_not_computation("materialised", x.float(), 4, several, "TRITON")
    assert "float64" in why_not_computation("absorbed", x, 4, several, "TRITON")


def test_what_the_absorbed_kernels_refuse():
    why = backends.why_not_absorbed
    for width, dtype, heads in ((512, torch.bfloat16, 16), (1024, torch.float16, 8), (512, torch.float32, 8)):
        assert why(width, dtype, heads) is None
    assert "width 2048 is above 1024" in why(2048, torch.bfloat16, 4)
    assert "32 heads at embedding width 512" in why(512, torch.bfloat16, 32)
    assert "embedding width 1024 in torch.float32" in why(1024, torch.float32, 4)


def test_one_candidate_each_of_int32_offsets_can_be_taken_with_gradients():
    offsets, counts = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    rows = CandidateRows.of(offsets, counts).rows
    assert rows.dtype == torch.int64 and rows.tolist() == [1, 4]
