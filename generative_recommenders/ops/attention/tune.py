"""Search launch configurations of the plain Triton attention kernels on this GPU, on request only.

    python -m generative_recommenders.ops.attention.tune --d-qk 128 --d-v 128 --length 2048 --batch 64

Works on scratch tensors of its own, never on live gradient buffers; the winners go to a file that later processes read
(``configs.tuned_file``). A candidate that does not compile or fit is passed over and named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable

import torch

from generative_recommenders.disk import write_atomically
from generative_recommenders.ops.attention import configs, triton_launch
from generative_recommenders.ops.attention.call import AttentionCall
from generative_recommenders.terminal import guarded, show

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CANDIDATES = tuple(
    configs.LaunchConfig(block_m, block_n, warps, stages)
    for block_m, block_n in ((64, 64), (128, 64), (64, 128), (32, 64), (64, 32), (32, 32))
    for warps in (4, 8)
    for stages in (1, 2, 3)
)


@dataclasses.dataclass
class Scratch:
    """Random tensors of one shape, and the calls that launch each kernel on them."""

    batch: int
    length: int
    heads: int
    d_qk: int
    d_v: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self):
        rows = self.batch * self.length
        make = lambda width: torch.randn(rows, self.heads, width, device=self.device).to(self.dtype)
        self.q, self.k, self.v = make(self.d_qk), make(self.d_qk), make(self.d_v)
        self.dout, self.out = make(self.d_v), make(self.d_v)
        self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.q, self.k, self.v))
        offsets = torch.arange(self.batch + 1, device=self.device) * self.length
        self.call = AttentionCall(offsets, self.length, self.d_qk**-0.5, float(self.length))

    def launcher(self, kernel: str) -> Callable[[], None]:
        """The launch that ``kernel`` decides the speed of (both backward kernels run in one launch)."""
        if kernel == "forward":
            return lambda: triton_launch.launch_forward(self.q, self.k, self.v, self.out, self.call)
        buffers = self.dout, self.q, self.k, self.v, self.dq, self.dk, self.dv
        return lambda: triton_launch.launch_backward(*buffers, self.call)


def tune(
    scratch: Scratch, time_call: Callable[[Callable[[], None]], float], candidates=CANDIDATES, report=show
) -> dict[str, configs.LaunchConfig]:
    """Fastest candidate of each kernel by ``time_call`` (milliseconds of one launch); stores and returns them."""
    found = {}
    architecture = configs.architecture_of(scratch.device)
    for kernel in configs.KERNELS:
        best = None
        for candidate in candidates:
            try:
                with configs.forced(kernel, candidate):
                    elapsed = time_call(scratch.launcher(kernel))
            except Exception as exc:  # a tile too large for this GPU: the compiler or the launch says so
                report(f"{kernel} {candidate}: passed over ({type(exc).__name__}: {str(exc).splitlines()[0][:80]})")
                continue
            if best is None or elapsed < best[0]:
                best = (elapsed, candidate)
        if best is None:
            raise ValueError(f"no candidate launches {kernel} at d_qk={scratch.d_qk}, d_v={scratch.d_v}")
        report(f"{kernel}: {best[1]} {best[0]:.3f} ms")
        found[configs.table_key(kernel, architecture, scratch.d_qk, scratch.d_v, scratch.dtype)] = best[1]
    store(found)
    return found


def store(found: dict[str, configs.LaunchConfig], path: pathlib.Path | None = None) -> None:
    """Merge configurations into the tuned file, replacing it in one step."""
    path = path or configs.tuned_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    configs.tuned_table.cache_clear()
    table = {key: dataclasses.asdict(value) for key, value in {**configs.tuned_table(), **found}.items()}
    write_atomically(path, json.dumps(table, indent=1) + "\n")
    configs.tuned_table.cache_clear()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 64), ("length", 2048), ("heads", 4), ("d-qk", 128), ("d-v", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: tuning times kernels on an NVIDIA GPU, and none is visible\n")
    import triton

    scratch = Scratch(
        options.batch, options.length, options.heads, options.d_qk, options.d_v, DTYPES[options.dtype],
        torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip
    tune(scratch, lambda fn: triton.testing.do_bench(fn, warmup=20, rep=60, return_mode="median"))
    show(f"written to {configs.tuned_file()}")


if __name__ == "__main__":
    sys.exit(guarded(main))
