"""Compile every kernel of ops.encode ahead of time for GPUs that are not there; run as a script.

Usage, without TRITON_INTERPRET: compile_kernels.py [--few] [arch ...] (80, 90, 100 by default; --few: bf16 at 512
columns only). Prints one line per kernel: registers, stack bytes, shared bytes. Exits non-zero where a compilation
fails or spills more than a few registers.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from generative_recommenders.ops.common.launch import row_launch
from generative_recommenders.ops.encode import triton_copy, triton_encode, triton_swish, triton_table_sums
from generative_recommenders.ops.encode.launch import BACKWARD_LAUNCH
from tests.ops.cubin import resources

ROWS = ("C", "A", "X", "Y", "DX", "DY", "DC", "DA", "Action", "Source")  # tensors in the dtype of the rows
INT64 = ("Place", "Pattern", "PositionIndex", "TimeIndex", "Seed", "Rows", "Entry", "Bounds", "FirstPiece")
FLOATS = ("eps", "c_eps", "a_eps", "scale", "root", "factor")


def source_of(fn, kind: str, constants: dict) -> ASTSource:
    """The kernel as the launchers would specialise it."""
    signature, hints = {}, {}
    for position, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ROWS:
            signature[name] = f"*{kind}"
        elif name in INT64:
            signature[name] = "*i64"
        elif name == "Mask":
            signature[name] = "*u8"
        elif name[0].isupper():
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        undivided = triton_copy.copy_rows_kernel is fn or fn.__name__.startswith("swish")
        if name[0].isupper() or (name.endswith("_stride") and undivided):
            hints[(position,)] = [["tt.divisibility", 16]]
    constexprs = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=hints)


def cases(kind: str, width: int):
    """(label, source, launch options) of each kernel at one dtype and width."""
    gpu = torch.device("cuda")
    ahead, sums = row_launch(width, gpu), row_launch(width, gpu, resident=16)
    rows_and_sums = row_launch(width, gpu, **BACKWARD_LAUNCH)
    shape = dict(D=width, BD=ahead.block)
    rows = shape | dict(ROWS=ahead.rows)
    for fn, launch in (
        (triton_swish.swish_layer_norm_forward_kernel, ahead),
        (triton_swish.swish_layer_norm_backward_kernel, sums),
    ):
        yield fn.__name__, source_of(fn, kind, rows), launch.options()
    events = rows | dict(EVENTS=True, ATTRIBUTES=True, DROPOUT=True)
    context = rows | dict(EVENTS=False, ATTRIBUTES=False, DROPOUT=True)
    for fn, launch in (
        (triton_encode.encode_forward_kernel, ahead),
        (triton_encode.encode_backward_kernel, rows_and_sums),
    ):
        yield f"{fn.__name__} events", source_of(fn, kind, events), launch.options()
        absent = dict.fromkeys(n for n in ("A", "CWeight", "AWeight", "CBias", "ABias") if n in fn.arg_names)
        absent |= dict.fromkeys(n for n in ("Action", "Pattern", "Stats", "DA", "Partial") if n in fn.arg_names)
        if fn is triton_encode.encode_backward_kernel:
            absent["C"] = None
        yield f"{fn.__name__} context", source_of(fn, kind, context | absent), launch.options()
    tile, warps = triton_table_sums.piece_launch(ahead.block)
    pieces = shape | dict(ROWS=tile, LENGTH=triton_table_sums.PIECE, DROPOUT=True)
    yield "piece_sums", source_of(triton_table_sums.piece_sums_kernel, kind, pieces), dict(num_warps=warps)
    entries = dict(D=width, BC=min(128, ahead.block), ROWS=16)
    yield "entry_sums", source_of(triton_table_sums.entry_sums_kernel, kind, entries), dict(num_warps=4)
    copy = shape | dict(ROWS=max(1, 4096 // ahead.block))
    yield "copy_rows", source_of(triton_copy.copy_rows_kernel, kind, copy), dict(num_warps=4)


def main(arguments: list[str]) -> int:
    good, few = True, "--few" in arguments
    shapes = [("bf16", 512)] if few else [("bf16", 512), ("bf16", 256), ("fp32", 512), ("fp16", 96), ("bf16", 1024)]
    for arch in [int(a) for a in arguments if a != "--few"] or [80, 90, 100]:
        for kind, width in shapes:
            for label, source, options in cases(kind, width):
                compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
                registers, stack = resources(compiled.asm["cubin"])
                shared = compiled.metadata.shared
                print(f"sm_{arch} {label} {width} {kind}: {registers} registers, {stack} stack, {shared} shared")
                good &= stack <= 64
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
