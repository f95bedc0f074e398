"""Every kernel compiles ahead of time for every architecture the project names, on a machine without a GPU."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Runs in its own interpreter: the interpreter mode of this process is fixed when Triton is imported.
PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import torch
from generative_recommenders.ops.lmsd import launch
from generative_recommenders.ops.lmsd.triton_kernels import lmsd_backward_kernel, lmsd_forward_kernel

INTEGERS = ("total x_stride u_stride y_stride dx_stride du_stride mask_stride seed_low seed_high threshold").split()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_one(kernel, dtype, columns, groups, dropout, tensors, architecture):
    backward = kernel is lmsd_backward_kernel
    width = columns // groups
    block = triton.next_power_of_2(width)
    config = launch.choose_launch(block, DTYPES[dtype], backward, dropout)
    constants = dict(WIDTH=width, BLOCK=block, GROUPS=groups, UNITS=config.rows, VECTOR=config.vector, SILU=True)
    constants |= dict(CONCAT_U=True, CONCAT_X=True, DROPOUT=dropout)
    if not backward and not tensors:
        constants |= dict(ROWS=None, SEED=None)
    if not dropout:
        constants |= dict(MASK=None)
    if backward:  # with one group also what a whole layer asks for
        constants |= dict(RESTORE_Y=True) if groups == 1 else dict(RESTORE_Y=False, DU_SUMS=None)
    types = {name: "i32" for name in INTEGERS} | {name: "fp32" for name in ("scale", "keep", "eps")}
    types |= {name: f"*{dtype}" for name in ("X", "U", "W", "B", "Y", "DY", "DX", "DU")}
    types |= {name: "*fp32" for name in ("MEAN", "RSTD", "DW", "DB", "DU_SUMS")}
    types |= {"MASK": "*i8" if backward else "*i32", "ROWS": "*i64", "SEED": "*i64"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=config.options())
    assert len(compiled.asm["cubin"]) > 0


architecture = int(sys.argv[1])
compile_one(lmsd_forward_kernel, "bf16", 512, 1, True, True, architecture)
compile_one(lmsd_backward_kernel, "bf16", 512, 1, True, False, architecture)
compile_one(lmsd_forward_kernel, "fp32", 96, 1, False, False, architecture)
compile_one(lmsd_backward_kernel, "fp16", 512, 4, True, False, architecture)
print("compiled")
"""


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_kernels_compile(architecture, tmp_path):
    root = pathlib.Path(__file__).resolve().parents[3]
    program = tmp_path / "compile_lmsd.py"  # a file: the compiler reads the source of what it compiles
    program.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(program), str(architecture)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compiled" in done.stdout
