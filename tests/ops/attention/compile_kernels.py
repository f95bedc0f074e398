"""Compile every attention kernel ahead of time for GPUs that are not there; run as a script without TRITON_INTERPRET.

Usage: compile_kernels.py [--few] [arch ...] (80, 90, 100 by default; --few leaves out most sizes and masks). Prints one
line per kernel: registers, stack bytes, shared bytes. Exits non-zero where a compilation fails or a kernel needs more
shared memory than the architecture has.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from generative_recommenders.ops.attention import configs, triton_bwd, triton_fwd
from generative_recommenders.ops.common import triton_column_sums, triton_layer_norm
from generative_recommenders.ops.common.launch import row_launch
from tests.ops.cubin import resources

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KERNELS = {
    "forward": triton_fwd.attention_forward_kernel,
    "backward_kv": triton_bwd.attention_backward_kv_kernel,
    "backward_q": triton_bwd.attention_backward_q_kernel,
}
FLAGS = {
    "plain": dict(HAS_TARGETS=True, CAUSAL=True, HAS_WINDOW=False, HAS_CONTEXT=False),
    "all masks": dict(HAS_TARGETS=True, CAUSAL=True, HAS_WINDOW=True, HAS_CONTEXT=True),
    "both ways": dict(HAS_TARGETS=False, CAUSAL=False, HAS_WINDOW=False, HAS_CONTEXT=False),
}
ROW_TENSORS = ("Q", "K", "V", "Out", "DOut", "DQ", "DK", "DV", "DV_")


def attention_source(kernel: str, arch: int, d_qk: int, d_v: int, dtype: torch.dtype, flags: dict, norm_tensor: bool):
    """The kernel as the launcher would specialise it, with its launch options."""
    config = configs.default_config(kernel, f"sm_{arch}", d_qk, d_v, dtype)
    constants = dict(
        DQK=d_qk,
        DV=d_v,
        BQK=max(16, triton.next_power_of_2(d_qk)),
        BV=max(16, triton.next_power_of_2(d_v)),
        BM=config.block_m,
        BN=config.block_n,
        NORM_IS_TENSOR=norm_tensor,
        FAST=dtype != torch.float32,
        PRECISION="ieee",
        STAGES=config.num_stages,
        **flags,
    )
    return _source(KERNELS[kernel], constants, TYPES[dtype], norm_tensor), config


def _source(fn, constants: dict, kind: str, norm_tensor: bool = False) -> ASTSource:
    signature, hints = {}, {}
    for position, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ROW_TENSORS or name in ("X", "N", "Copy", "DN", "Residual", "DX", "Source"):
            signature[name] = f"*{kind}"
        elif name in ("Offsets", "Targets"):
            signature[name] = "*i64"
        elif name in ("Counter", "Starts", "Chunk"):
            signature[name] = "*i32"
        elif name[0].isupper() or (name == "norm" and norm_tensor):
            signature[name] = "*fp32"
        elif name in ("norm", "alpha", "eps"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        if name[0].isupper() or name.endswith(("_stride", "_head")) or name == "columns":
            hints[(position,)] = [["tt.divisibility", 16]]
    constexprs = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=hints)


def layer_norm_sources(kind: str):
    """The LayerNorm and column-sum kernels at 512 columns, with their launch options."""
    launch = row_launch(512, torch.device("cuda"), resident=16)
    forward = dict(D=512, BD=512, ROWS=8, HAS_COPY=True)
    backward = dict(D=512, BD=512, ROWS=launch.rows, HAS_RESIDUAL=True)
    kernels = (
        (triton_layer_norm.layer_norm_forward_kernel, forward, dict(num_warps=4)),
        (triton_layer_norm.layer_norm_backward_kernel, backward, launch.options()),
        (triton_column_sums.column_sums_kernel, dict(ROWS=8, BC=512), dict(num_warps=4)),
    )
    for fn, constants, options in kernels:
        yield fn.__name__, _source(fn, constants, kind), options


def compile_one(label: str, source, arch: int, **options) -> bool:
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = resources(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    fits = shared <= SHARED_LIMIT[arch]
    print(f"sm_{arch} {label}: {registers} registers, {stack} stack, {shared} shared{'' if fits else '  DOES NOT FIT'}")
    return fits


def hopper_sources(few: bool):
    """The Gluon kernels (sm_90 only) at the product's sizes."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from generative_recommenders.ops.attention import hopper_launch, triton_hopper_bwd, triton_hopper_fwd

    strides = {f"{name}_{kind}": value for name in ("out", "dq", "dk", "dv") for kind, value in STRIDES.items()}
    options = dict(heads=4, **strides)
    kernels = (
        (triton_hopper_fwd.attention_hopper_forward_kernel, dict(WARPGROUPS=3, **hopper_launch.FORWARD_DEPTH)),
        (triton_hopper_bwd.attention_hopper_backward_kv_kernel, hopper_launch.KV_DEPTH),
        (triton_hopper_bwd.attention_hopper_backward_q_kernel, dict(WARPGROUPS=4, **hopper_launch.Q_DEPTH)),
    )
    for width, kind, has_targets in ((128, "bf16", True),) if few else HOPPER_CASES:
        element = gl.bfloat16 if kind == "bf16" else gl.float16
        for fn, depth in kernels:
            flags = dict(D=width, NORM_IS_TENSOR=False, HAS_TARGETS=has_targets, **options, **depth)
            constants = {name: value for name, value in flags.items() if name in fn.arg_names}
            plain = _source(fn, constants, kind)
            for name in fn.arg_names:
                if name.endswith("_desc"):
                    columns = 64 if name == "ds_desc" else width
                    layout = gl.NVMMASharedLayout.get_default_for([64, columns], element)
                    plain.signature[name] = f"tensordesc<{kind}[64, {columns}],{layout!r}>"
            source = GluonASTSource(fn, plain.signature, plain.constants, plain.attrs)
            yield f"{fn.__name__} {width} {kind} {'targets' if has_targets else 'causal'}", source


HOPPER_CASES = ((128, "bf16", True), (128, "fp16", False), (64, "bf16", True))
STRIDES = dict(stride=2048, head=128)


def cases(few: bool):
    if few:
        for kernel in KERNELS:
            yield kernel, 128, 128, torch.bfloat16, "all masks", False
        return
    for kernel in KERNELS:
        for d_qk, d_v in ((128, 128), (64, 64), (32, 16), (256, 256), (96, 40)):
            yield kernel, d_qk, d_v, torch.bfloat16, "plain", False
        yield kernel, 128, 128, torch.bfloat16, "all masks", True
        yield kernel, 64, 64, torch.float16, "both ways", False
        yield kernel, 64, 128, torch.float32, "plain", True


def main(arguments: list[str]) -> int:
    good, few = True, "--few" in arguments
    for arch in [int(a) for a in arguments if a != "--few"] or [80, 90, 100]:
        for kernel, d_qk, d_v, dtype, flags, norm_tensor in cases(few):
            source, config = attention_source(kernel, arch, d_qk, d_v, dtype, FLAGS[flags], norm_tensor)
            label = f"{kernel} {d_qk}/{d_v} {TYPES[dtype]} {flags}"
            good &= compile_one(label, source, arch, num_warps=config.num_warps, num_stages=config.num_stages)
        for name, source, options in layer_norm_sources("bf16"):
            good &= compile_one(name, source, arch, **options)
        for name, source in hopper_sources(few) if arch == 90 else ():
            good &= compile_one(name, source, arch, num_warps=4)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
