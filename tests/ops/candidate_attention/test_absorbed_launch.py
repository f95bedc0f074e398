"""Launches of the absorbed kernels: splits, tiles, no recompilation, and compilation for GPUs that are not here."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from generative_recommenders.ops.candidate_attention import CandidateRows, launch
from generative_recommenders.ops.candidate_attention.call import Sizes

REPOSITORY = pathlib.Path(__file__).parents[3]
SIZES = Sizes(num_heads=2, attn_dim=8, hidden_dim=8, alpha=0.3, eps=1e-6, attn_norm=20.0)


def batch(lengths, targets, width=32, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x = torch.randn(sum(lengths), width, generator=g).to(dtype)
    candidates = CandidateRows.of(offsets, torch.tensor(targets))
    qw, gs = (torch.randn(sum(targets), 2, width + 8, generator=g) * 0.2 for _ in range(2))
    return x, offsets, candidates, qw, gs


@pytest.mark.parametrize("targets", [[1, 1, 1], [3, 0, 6]], ids=["one", "several"])
def test_splits_change_rounding_only(targets):
    x, offsets, candidates, qw, gs = batch([50, 9, 17], targets)
    sums, stats = launch.absorbed_forward(x, offsets, candidates, qw, SIZES, splits=1)
    dx, ds = launch.absorbed_backward(x, offsets, candidates, qw, gs, stats, SIZES, splits=1)
    for splits in (2, 5):
        again, again_stats = launch.absorbed_forward(x, offsets, candidates, qw, SIZES, splits=splits)
        again_dx, again_ds = launch.absorbed_backward(x, offsets, candidates, qw, gs, stats, SIZES, splits=splits)
        for got, want in ((again, sums), (again_dx, dx), (again_ds, ds)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        rows = torch.cat([torch.arange(offsets[b], offsets[b + 1]) for b in range(3) if targets[b]])
        assert torch.equal(again_stats[rows], stats[rows])


def test_two_runs_are_bit_equal():
    x, offsets, candidates, qw, gs = batch([50, 9, 17], [1, 1, 1])
    runs = []
    for _ in range(2):
        sums, stats = launch.absorbed_forward(x, offsets, candidates, qw, SIZES, splits=3)
        runs.append((sums, *launch.absorbed_backward(x, offsets, candidates, qw, gs, stats, SIZES, splits=3)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("width, dtype", [(32, torch.float16), (96, torch.float16), (1024, torch.float16)])
def test_blocks_and_descriptors(width, dtype, monkeypatch):
    """Hopper's tile and the generic one, with and without descriptors, give the same result."""
    x, offsets, candidates, qw, gs = batch([40, 3], [1, 1], width, dtype)
    results = []
    for hopper in (False, True):
        for descriptors in (False, True):
            device = launch.Device(4, hopper, descriptors)
            monkeypatch.setattr(launch, "INTERPRETER", device)
            sums, stats = launch.absorbed_forward(x, offsets, candidates, qw, SIZES)
            results.append((sums, *launch.absorbed_backward(x, offsets, candidates, qw, gs, stats, SIZES)))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=2e-3, atol=2e-3)


def test_rows_with_a_far_mean():
    """Raw rows enter the products: a mean 100 times the deviation must not show."""
    x, offsets, candidates, qw, _ = batch([40], [1])
    sums, stats = launch.absorbed_forward(x, offsets, candidates, qw, SIZES)
    far, far_stats = launch.absorbed_forward(x + 100, offsets, candidates, qw, SIZES)
    torch.testing.assert_close(far_stats[:, 0], stats[:, 0] + 100)
    torch.testing.assert_close(far, sums, rtol=1e-3, atol=1e-4)


class _Recorder:
    """Stands for a kernel: keeps what a compilation would depend on."""

    def __init__(self, kernel):
        self.kernel, self.seen = kernel, set()

    def __getitem__(self, grid):
        def launch(**kwargs):
            key = []
            for param in self.kernel.params:
                value = kwargs[param.name]
                if param.is_constexpr:
                    key.append((param.name, value))
                elif isinstance(value, int) and not param.do_not_specialize:
                    key.append((param.name, value == 1, value % 16 == 0))
            self.seen.add(tuple(key))

        return launch


def test_no_recompilation_for_other_lengths_and_batches(monkeypatch):
    recorders = {}
    for name in ("absorbed_forward_kernel", "absorbed_backward_kernel"):
        kernel = getattr(launch.absorbed, name)
        recorders[name] = _Recorder(_parameters(kernel))
        monkeypatch.setattr(launch.absorbed, name, recorders[name])
    monkeypatch.setattr(launch, "INTERPRETER", launch.Device(64, False, False))
    for longest in range(1, 2400, 100):  # 24 maximum lengths
        x, offsets, candidates, qw, gs = batch([longest, 1 + longest // 3], [1, 1])
        _, stats = launch.absorbed_forward(x, offsets, candidates, qw, SIZES)
        launch.absorbed_backward(x, offsets, candidates, qw, gs, stats, SIZES)
    assert [len(recorder.seen) for recorder in recorders.values()] == [1, 1]


def _parameters(kernel):
    """The kernel as Triton's compiler sees its parameters (the interpreter's stand-in has none)."""
    from triton.runtime.jit import JITFunction

    if isinstance(kernel, JITFunction):
        return kernel
    hidden = ("splits", "columns", "chunks")
    return JITFunction(kernel.fn, do_not_specialize=hidden)


def test_kernels_do_not_specialise_on_counts():
    source = pathlib.Path(launch.absorbed.__file__).read_text()
    assert source.count('@triton.jit(do_not_specialize=["splits", "columns", "chunks"])') == 2
    assert source.count('@triton.jit(do_not_specialize=["splits"])') == 1


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import torch
from generative_recommenders.ops.candidate_attention import triton_absorbed as k, launch
from generative_recommenders.ops.candidate_attention import triton_materialised as m

POINTERS = dict(OFFSETS="*i64", TARGET_OFFSETS="*i64", QW="*fp32", GS="*fp32", SUMS="*fp32", STATS="*fp32",
    NORM="*fp32", ROWS="*i64", OUT="*fp32", DQ="*fp32")
SCALARS = dict(stride_x="i32", stride_dx="i32", splits="i32", columns="i32", chunks="i32", sequences="i32",
    alpha="fp32", eps="fp32", norm="fp32")

def compile(kernel, dtype, arch, constants, warps, stages, descriptor=None):
    names = kernel.arg_names
    signature = {}
    for name in names:
        kind = "constexpr" if name in constants else SCALARS.get(name, POINTERS.get(name, "*" + dtype))
        signature[name] = descriptor if name == "DESC" and descriptor else kind
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name].startswith("*") or name.startswith("stride")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    options = dict(num_warps=warps, num_stages=stages)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    limit = {80: 163, 90: 227, 100: 227}[arch] * 1024
    assert len(done.asm["cubin"]) > 0 and done.metadata.shared <= limit, (kernel, arch, done.metadata.shared)

arch, kind = int(sys.argv[1]), sys.argv[2]
dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
for backward in (False, True):
    tile = launch.tile_for(512, dtype, backward, arch == 90)
    tma = arch >= 90 and kind == "bf16"
    block = f"tensordesc<{kind}[{tile.rows},{tile.block_dim}]>" if tma else None
    shape = dict(D=512, DQ=520, H=4, NB=tile.blocks, DC=tile.block_dim, BN=tile.rows, NORM_TENSOR=False,
        PRECISION="tf32x3")
    options = (tile.warps, tile.stages)
    if backward:
        own = dict(TC=2, KH=8)
        compile(k.absorbed_backward_kernel, kind, arch,
            shape | own | dict(STAGES=tile.stages, TMA=tma, WRITE_DX=True), *options, block)
        small = launch.tile_for(512, dtype, backward, False)
        shape |= dict(NB=small.blocks, DC=small.block_dim, BN=small.rows)
        compile(k.absorbed_dx_kernel, kind, arch, shape | dict(TC=2, KH=8), small.warps, small.stages)
    else:
        compile(k.absorbed_forward_kernel, kind, arch,
            shape | dict(TC=3, KC=16, STAGES=tile.stages, TMA=tma), *options, block)
compile(k.candidate_rows_backward_kernel, "bf16", arch, dict(D=512, DP=512, HAS_RESIDUAL=True), 4, 3)
shape = dict(H=4, DK=128, DV=128, PK=128, PV=128, BN=32, NORM_TENSOR=False)
compile(m.materialised_forward_kernel, "bf16", arch, shape, 4, 3)
compile(m.materialised_backward_kernel, "bf16", arch, shape, 4, 3)
print("compiled")
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_compiles_for(arch, dtype):
    """Cubins of every kernel within the chip's shared memory, without such a GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-c", COMPILE, str(arch), dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    assert done.stdout.strip().endswith("compiled"), done.stderr[-2000:]
