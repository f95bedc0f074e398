"""Counts, offsets and indices that do not fit their sequences are refused by name, by every op that takes them."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from generative_recommenders.ops import jagged
from generative_recommenders.ops.attention import (
    AttentionCall,
    Projection,
    UvqkParameters,
    hstu_mha,
    hstu_preprocess_attention,
)
from generative_recommenders.ops.candidate_attention import CandidateRows, TargetSummary, candidate_attention
from generative_recommenders.ops.checks import check_indices, check_sequences, counts_settled
from generative_recommenders.ops.encode import EncodeCall, encode_sequence
from generative_recommenders.ops.lmsd import hstu_lmsd, hstu_lmsd_forward
from generative_recommenders.ops.position import (
    SequenceRows,
    add_timestamp_positional_embeddings,
    position_indices,
    time_indices,
)
from generative_recommenders.ops.stu import OutputParameters, hstu_layer

D, H, WIDTH = 8, 2, 4


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


# ---- Every op that takes sequences and candidates, as a function of (offsets, targets, rows) ----


def run_mha(offsets, targets, rows, backend=None, **changes):
    q = torch.ones(rows, H, WIDTH)
    return hstu_mha(q, q, q, offsets, 100, 1.0, 1.0, targets, backend=backend, **changes)


def weights(width=D):
    columns = 2 * H * (WIDTH + WIDTH)
    return UvqkParameters(torch.ones(width), torch.zeros(width), torch.ones(width, columns), torch.zeros(columns))


def run_front(offsets, targets, rows, backend=None):
    call = AttentionCall(offsets, 100, 1.0, 1.0, targets)
    return hstu_preprocess_attention(torch.ones(rows, D), weights(), Projection(H, WIDTH, WIDTH), call, backend)


def run_layer(offsets, targets, rows):
    output = OutputParameters(torch.ones(H * WIDTH), torch.zeros(H * WIDTH), torch.ones(3 * H * WIDTH, D))
    call = AttentionCall(offsets, 100, 1.0, 1.0, targets)
    return hstu_layer(torch.ones(rows, D), weights(), output, Projection(H, WIDTH, WIDTH), call)


def run_candidate_attention(offsets, targets, rows):
    x, projection = torch.ones(rows, D), Projection(H, WIDTH, WIDTH)
    return candidate_attention(x, offsets, targets, weights(), projection, 1.0, 1.0, backend="PYTORCH")


def run_positions(offsets, targets, rows):
    return position_indices(SequenceRows.from_offsets(offsets, rows), targets, 0, 8)


OPS = {
    "attention": run_mha,
    "attention on kernels": lambda *a: run_mha(*a, backend="TRITON"),
    "front of a layer": run_front,
    "front of a layer on kernels": lambda *a: run_front(*a, backend="TRITON"),
    "layer": run_layer,
    "candidate attention": run_candidate_attention,
    "positions": run_positions,
}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
BAD_TARGETS = {
    "more than there are rows": ([3], ints(5), r"num_targets\[0\] is 5"),
    "more, behind another sequence": ([1, 1, 3, 70], ints(1, 1, 4, 70), r"num_targets\[2\] is 4.*has 3"),
    "negative": ([3, 4], ints(1, -1), r"num_targets\[1\] is -1"),
    "negative, with an equal sum": ([3, 4], ints(3, -1), r"num_targets\[1\] is -1"),
    "one count too few": ([3, 4], ints(1), "num_targets must"),
    "one count too many": ([3, 4], ints(1, 1, 1), "num_targets must"),
    "two dimensions": ([3], ints(1)[None], "num_targets must"),
    "fractions": ([3], torch.ones(1), "num_targets must"),
    "truth values": ([3], torch.ones(1, dtype=torch.bool), "num_targets must"),
}
BAD_OFFSETS = {
    "do not start at 0": (ints(1, 4), 4, "rise from 0"),
    "start below 0": (ints(-1, 4), 4, "rise from 0"),
    "end before the rows do": (ints(0, 3), 4, "rise from 0"),
    "end after the rows": (ints(0, 5), 4, "rise from 0"),
    "decrease": (ints(0, 3, 2, 4), 4, "rise from 0"),
    "fractions": (torch.tensor([0.0, 4.0]), 4, "offsets must"),
    "truth values": (torch.tensor([False, True]), 1, "offsets must"),
    "two dimensions": (ints(0, 4)[None], 4, "offsets must"),
    "no entry": (ints(), 0, "offsets must"),
}


@each_op
@pytest.mark.parametrize("lengths,targets,message", BAD_TARGETS.values(), ids=list(BAD_TARGETS))
def test_targets_that_do_not_fit_are_named(op, lengths, targets, message):
    with pytest.raises(ValueError, match=message):
        op(offsets_of(lengths), targets, sum(lengths))


@each_op
@pytest.mark.parametrize("offsets,rows,message", BAD_OFFSETS.values(), ids=list(BAD_OFFSETS))
def test_offsets_that_do_not_fit_are_named(op, offsets, rows, message):
    with pytest.raises(ValueError, match=message):
        op(offsets, torch.zeros(max(offsets.numel() - 1, 0), dtype=torch.int64), rows)


@each_op
@pytest.mark.parametrize("lengths,targets", [([3, 0, 4], [0, 0, 4]), ([0, 0], [0, 0]), ([], []), ([2], [2])])
def test_counts_that_fit_are_taken(op, lengths, targets):
    """Zero candidates, nothing but candidates, empty sequences, no sequences; in either integer type."""
    for dtype in (torch.int64, torch.int32):
        op(offsets_of(lengths), torch.tensor(targets, dtype=dtype), sum(lengths))


# ---- Context and candidates in one sequence ----


@pytest.mark.parametrize("backend", ["PYTORCH", "TRITON"])
def test_context_and_candidates_share_no_row(backend):
    with pytest.raises(ValueError, match=r"num_targets\[1\] is 3.*4 rows.*2 of them contextual"):
        run_mha(offsets_of([5, 4]), ints(3, 3), 9, backend, contextual_seq_len=2)
    with pytest.raises(ValueError, match=r"num_targets\[1\] is 1.*1 row,.*0 to 0 candidates"):
        run_mha(offsets_of([5, 1]), ints(3, 1), 6, backend, contextual_seq_len=2)
    run_mha(offsets_of([5, 0, 4, 1]), ints(3, 0, 2, 0), 10, backend, contextual_seq_len=2)


def test_context_and_candidates_share_no_position():
    rows = SequenceRows.from_offsets(offsets_of([4]), 4)
    with pytest.raises(ValueError, match=r"num_targets\[0\] is 3"):
        position_indices(rows, ints(3), 2, 8)
    with pytest.raises(ValueError, match="num_contextual=-1"):
        position_indices(rows, ints(1), -1, 8)
    with pytest.raises(ValueError, match="num_buckets=0"):
        position_indices(rows, ints(1), 0, 0)


# ---- Candidates' rows ----


def test_candidate_rows_are_of_their_own_sequence():
    with pytest.raises(ValueError, match=r"num_targets\[2\] is 4"):
        CandidateRows.of(offsets_of([1, 1, 3, 70]), ints(1, 1, 4, 70))
    with pytest.raises(ValueError, match=r"num_targets\[1\] is -1"):
        CandidateRows.of(offsets_of([3, 4]), ints(1, -1))
    with pytest.raises(ValueError, match=r"num_targets\[1\] is 1.*has 0"):
        CandidateRows.of(offsets_of([3, 0]), ints(1, 1))  # one each: taken from the offsets alone


@pytest.mark.parametrize("summary", [TargetSummary(2, 2, 1, 1), TargetSummary(2, 3, 1, 2), TargetSummary(3, 2, 0, 2)])
def test_a_summary_of_other_counts_is_refused(summary):
    with pytest.raises(ValueError, match="summary"):
        CandidateRows.of(offsets_of([4, 3]), ints(2, 0), summary)


def test_a_summary_of_counts_that_cannot_be():
    for counts in (ints(1, -1), ints(1, 1).float(), ints(1, 1).bool(), ints(1)[None]):
        with pytest.raises(ValueError, match="num_targets"):
            TargetSummary.of(counts)


def test_candidate_rows_of_another_batch_are_refused():
    other = CandidateRows.of(offsets_of([2, 5]), ints(1, 1))
    with pytest.raises(ValueError, match="candidates"):
        run_candidate_attention(offsets_of([4, 3]), other, 7)
    with pytest.raises(ValueError, match="candidates"):
        run_candidate_attention(offsets_of([7]), other, 7)
    run_candidate_attention(offsets_of([2, 5]), other, 7)


# ---- Jagged ops ----

V = torch.ones(4, 2)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: jagged.complete_cumsum(ints(2, -1, 3)), r"lengths\[1\] is -1"),
        (lambda: jagged.complete_cumsum(torch.tensor([1.5, 2.5])), "lengths must"),
        (lambda: jagged.complete_cumsum(torch.tensor([True, True])), "lengths must"),
        (lambda: jagged.row_sequence_ids(ints(0, 3, 2, 4), 4), "rise from 0"),
        (lambda: jagged.row_sequence_ids(ints(0, 3), 4), "rise from 0"),
        (lambda: jagged.jagged_to_padded_dense(V, ints(0, 6), 6), "rise from 0"),
        (lambda: jagged.jagged_to_padded_dense(V, ints(0, 3), 6), "rise from 0"),
        (lambda: jagged.jagged_to_padded_dense(V, ints(2, 4), 6), "rise from 0"),
        (lambda: jagged.jagged_to_padded_dense(V.double(), ints(0, 5, 4), 6), "rise from 0"),
        (lambda: jagged.jagged_to_padded_dense(V, torch.tensor([0.0, 4.0]), 6), "offsets must"),
        (lambda: jagged.dense_to_jagged(torch.ones(2, 3, 1), ints(0, 5, 4), 4), "rise from 0"),
        (lambda: jagged.dense_to_jagged(torch.ones(2, 3, 1), ints(0, 3, 4), 9), "rise from 0"),
        (lambda: jagged.dense_to_jagged(torch.ones(1, 3, 1), ints(-3, 3), 6), "rise from 0"),
        (lambda: jagged.concat_2d_jagged(V, V, ints(0, 4), ints(0, 3)), "rise from 0"),
        (lambda: jagged.concat_2d_jagged(V, V, ints(0, 3, 2, 4), ints(0, 1, 2, 4)), "rise from 0"),
        (lambda: jagged.split_2d_jagged(V, ints(0, 3), ints(0, 1), (2, 2)), "rise from 0"),
        (lambda: jagged.split_2d_jagged(V, ints(0, 5), ints(0, -1)), "rise from 0"),
        (lambda: jagged.interleave([ints(0, 2, 4)], [4], ints(0, 0)), "order"),
        (lambda: jagged.interleave([ints(0, 2, 4)], [4], ints(1, 2)), "order"),
        (lambda: jagged.interleave([ints(0, 2, 4)], [4], ints(0)), "order"),
        (lambda: jagged.interleave([ints(0, 2, 4)], [4], torch.tensor([True, False])), "order"),
        (lambda: jagged.interleave([ints(0, 4)], [4]).place([V[:3]]), "rows"),
        (lambda: jagged.interleave([ints(0, 4)], [4]).split(V[:3]), "4 rows"),
        (lambda: jagged.place_rows(4, [ints(0, 1, 1, 2)], [V]), "exactly once"),
        (lambda: jagged.place_rows(4, [ints(0, 1, 2, 4)], [V]), r"below 4"),
        (lambda: jagged.place_rows(4, [ints(0, 1, 2, -1)], [V]), r"is -1"),
        (lambda: jagged.place_rows(4, [ints(0, 1, 2)], [V]), "must be"),
        (lambda: jagged.take_rows(V, ints(1, 1)), "distinct"),
        (lambda: jagged.take_rows(V, ints(4)), "below 4"),
        (lambda: jagged.take_rows(V, ints(-1)), "is -1"),
    ],
)
def test_jagged_ops_refuse_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- Position, encode, LMSD ----


def test_position_and_time_take_one_entry_per_row():
    rows = SequenceRows.from_offsets(offsets_of([3, 1]), 4)
    tables = torch.ones(6, D), torch.ones(5, D)
    for stamps in (ints(1, 2, 3), ints(1, 2, 3, 4, 5)):
        with pytest.raises(ValueError, match=r"timestamps must be \[4\]"):
            time_indices(rows, stamps, 4)
    with pytest.raises(TypeError, match="integer seconds"):
        time_indices(rows, torch.ones(4, dtype=torch.bool), 4)
    with pytest.raises(ValueError, match=r"x must be \[4"):
        add_timestamp_positional_embeddings(torch.ones(1, D), rows, ints(1, 2, 3, 4), ints(1, 1), *tables)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(places=ints(0, 1, 1)), "places.*exactly once"),
        (dict(places=ints(0, 1, 3)), r"places\[2\] is 3"),
        (dict(patterns=ints(0, -1, 1)), r"patterns\[1\] is -1"),
        (dict(patterns=ints(0, 2, 1)), r"patterns\[1\] is 2"),
        (dict(positions=ints(0, 4, 1)), r"positions\[1\] is 4"),
        (dict(times=ints(0, 5, 1)), r"times\[1\] is 5"),
        (dict(times=torch.zeros(3)), "times must"),
    ],
)
def test_encode_refuses_indices_outside_their_tables(change, message):
    call = EncodeCall(ints(2, 0, 1), ints(0, 1, 1), ints(0, 1, 3), ints(4, 0, 1), torch.float32)
    norm = torch.ones(D), torch.zeros(D), 1e-5

    def encode(call):
        tables = torch.ones(2, D), None, torch.ones(4, D), torch.ones(5, D)
        return encode_sequence(torch.randn(3, D), norm, None, None, *tables, call)

    encode(call)
    with pytest.raises(ValueError, match=message):
        encode(dataclasses.replace(call, **change))


@pytest.mark.parametrize("op", [hstu_lmsd, hstu_lmsd_forward])
def test_lmsd_row_indices_are_row_numbers(op):
    x, weight, bias = torch.ones(2, D), torch.ones(D), torch.zeros(D)
    with pytest.raises(ValueError, match=r"row_indices\[1\] is -1"):
        op(x, x, weight, bias, row_indices=ints(3, -1))


# ---- On a device: by an assertion, without reading anything back ----


def on_device(monkeypatch):
    """Run the device's own check on CPU tensors: the assertion raises at once there."""
    monkeypatch.setattr("generative_recommenders.ops.checks._on_host", lambda *tensors: False)


@pytest.mark.parametrize("lengths,targets,message", list(BAD_TARGETS.values())[:4], ids=list(BAD_TARGETS)[:4])
def test_the_device_refuses_the_same_targets(lengths, targets, message, monkeypatch):
    on_device(monkeypatch)
    with pytest.raises(RuntimeError, match="num_targets"):
        check_sequences(offsets_of(lengths), sum(lengths), 100, targets)


@pytest.mark.parametrize("offsets,rows,message", list(BAD_OFFSETS.values())[:5], ids=list(BAD_OFFSETS)[:5])
def test_the_device_refuses_the_same_offsets(offsets, rows, message, monkeypatch):
    on_device(monkeypatch)
    for targets in (None, torch.zeros(offsets.numel() - 1, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="seq_offsets"):
            check_sequences(offsets, rows, None, targets)


def test_the_device_takes_and_refuses_as_the_host_does(monkeypatch):
    on_device(monkeypatch)
    fits = [
        ([3, 0, 4], [0, 0, 4], 0),
        ([], [], 0),
        ([0], [0], 2),
        ([5, 0, 4], [3, 0, 2], 2),
        ([2], [0], 2),
        ([1], [0], 2),
    ]
    for lengths, targets, prefix in fits:
        check_sequences(offsets_of(lengths), sum(lengths), 5, torch.tensor(targets, dtype=torch.int32), prefix)
        check_sequences(offsets_of(lengths), sum(lengths), prefix=prefix)
    for lengths, targets, prefix, longest in [([4], [3], 2, 9), ([1], [1], 2, 9), ([6], [0], 0, 5)]:
        with pytest.raises(RuntimeError, match="num_targets"):
            check_sequences(offsets_of(lengths), sum(lengths), longest, torch.tensor(targets), prefix)
    check_indices("rows", ints(0, 3), 4)
    check_indices("rows", ints(), 0)
    for values in (ints(0, 4), ints(-1, 2)):
        with pytest.raises(RuntimeError, match="rows"):
            check_indices("rows", values, 4)


def test_what_the_caller_has_settled_is_not_asserted_again(monkeypatch):
    on_device(monkeypatch)
    with counts_settled():
        check_sequences(ints(0, 9), 4)
    with pytest.raises(RuntimeError, match="seq_offsets"):
        check_sequences(ints(0, 9), 4)


def test_on_a_host_nothing_is_settled():
    with counts_settled(), pytest.raises(ValueError, match="rise from 0"):
        check_sequences(ints(0, 9), 4)


def test_assertions_compile(monkeypatch):
    """As one graph, and the assertion is still in it."""
    on_device(monkeypatch)

    def checked(offsets, targets):
        check_sequences(offsets, 7, 9, targets)
        return offsets + 1

    compiled = torch.compile(checked, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(offsets_of([3, 4]), ints(1, 4)), offsets_of([3, 4]) + 1)
    with pytest.raises(RuntimeError, match="num_targets"):
        compiled(offsets_of([3, 4]), ints(1, 5))


# A failed assertion ends the process's CUDA context, so each is a process of its own.
GPU_PRELUDE = """
import torch
from generative_recommenders.ops.attention import hstu_mha
from generative_recommenders.ops.candidate_attention import CandidateRows, TargetSummary
from generative_recommenders.ops.jagged import concat_2d_jagged
ints = lambda *v: torch.tensor(v, device="cuda")
q = torch.ones(7, 2, 32, device="cuda", dtype=torch.bfloat16)
"""
GPU_FAULTS = {
    "more candidates than rows": "hstu_mha(q, q, q, ints(0, 3, 7), 8, 1.0, 1.0, ints(1, 5))",
    "negative candidates": "CandidateRows.of(ints(0, 3, 7), ints(1, -1), TargetSummary(2, 2, 1, 1))",
    "offsets past the rows": "concat_2d_jagged(q[:, 0], q[:, 0], ints(0, 3, 9), ints(0, 3, 7))",
}


@pytest.mark.gpu
@pytest.mark.parametrize("fault", GPU_FAULTS.values(), ids=list(GPU_FAULTS))
def test_the_device_refuses(fault):
    program = GPU_PRELUDE + fault + "\ntorch.cuda.synchronize()\nprint('believed')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode and "believed" not in done.stdout
    assert "device-side assert" in done.stderr and "illegal memory access" not in done.stderr, done.stderr[-2000:]


@pytest.mark.gpu
def test_assertions_wait_for_nothing_and_replay():
    offsets, targets = offsets_of([3, 4]).cuda(), ints(1, 4).cuda()
    q = torch.randn(7, H, 32, device="cuda", dtype=torch.bfloat16)
    run = lambda: hstu_mha(q, q, q, offsets, 8, 1.0, 8.0, targets)  # noqa: E731
    want = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        CandidateRows.of(offsets, targets, TargetSummary(2, 5, 1, 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        graph.replay()
    assert torch.equal(out, want)
