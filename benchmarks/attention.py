"""HSTU attention forward and backward against the rate of a large matrix product measured in the same run.

    python benchmarks/attention.py [--batch 1024 --length 2663 --heads 4 --width 128] [--variants hopper,plain]

Checks every variant against float64 first, then times it by the burst and sustained protocols (benchmarks/common.py),
on uniform lengths and on ragged ones (±50 %) of equal sum of squares, one candidate per sequence. FLOPs by the causal
formula: forward sum(L^2) * H * (d_qk + d_v), backward 2.5 times that. Writes benchmarks/results/attention.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks import common  # noqa: E402
from generative_recommenders.ops.attention import launch  # noqa: E402
from generative_recommenders.ops.attention.call import AttentionCall  # noqa: E402
from generative_recommenders.ops.attention.hopper_launch import why_not_hopper  # noqa: E402


@dataclasses.dataclass
class Problem:
    """Fused U, V, Q, K rows, upstream gradient and buffers of one batch."""

    lengths: torch.Tensor
    heads: int
    width: int

    def __post_init__(self):
        rows, columns = int(self.lengths.sum()), self.heads * self.width
        make = lambda n: torch.empty(rows, n, device="cuda", dtype=torch.bfloat16).normal_()
        self.buffer, self.grads = make(4 * columns), torch.empty(rows, 4 * columns, device="cuda", dtype=torch.bfloat16)
        self.dout = make(columns).unflatten(1, (self.heads, self.width))
        self.out = torch.empty_like(self.dout)
        split = lambda t: [c.unflatten(1, (self.heads, self.width)) for c in t.split(columns, dim=1)]
        _, self.v, self.q, self.k = split(self.buffer)
        _, self.dv, self.dq, self.dk = split(self.grads)
        offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).cuda()
        targets = torch.ones(self.lengths.numel(), dtype=torch.int64, device="cuda")
        longest = int(self.lengths.max())
        self.call = AttentionCall(offsets, longest, self.width**-0.5, float(longest), targets).on(self.q.device)
        self.flops = float((self.lengths.double() ** 2).sum()) * self.heads * 2 * self.width

    def forward(self) -> None:
        launch.forward_into(self.q, self.k, self.v, self.out, self.call)

    def backward(self) -> None:
        launch.backward_into(self.dout, self.q, self.k, self.v, self.dq, self.dk, self.dv, self.call)

    def both(self) -> None:
        self.forward()
        self.backward()


def ragged_lengths(batch: int, length: int) -> torch.Tensor:
    """Lengths drawn from ±50 % around a mean such that their squares add up to ``batch * length ** 2``."""
    drawn = 0.5 + torch.rand(batch, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn * length / drawn.square().mean().sqrt()).round().long()


def worst_error(heads: int, width: int) -> float:
    """Largest relative error of output and gradients over a small ragged batch, against float64."""
    problem = Problem(torch.tensor([0, 1, 64, 500, 193, 1000]), heads, width)
    problem.grads.fill_(float("nan"))
    problem.both()
    leaves = [t.double().requires_grad_() for t in (problem.q, problem.k, problem.v)]
    outputs, bounds = [], problem.call.seq_offsets.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        q, k, v = (t[start:end].transpose(0, 1) for t in leaves)
        weights = torch.nn.functional.silu(q @ k.transpose(1, 2) * problem.call.alpha) / problem.call.attn_norm
        outputs.append((weights.tril() @ v).transpose(0, 1))
    want = torch.cat(outputs)
    grads = torch.autograd.grad(want, leaves, problem.dout.double())
    got = (problem.out, problem.dq, problem.dk, problem.dv)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, (want.detach(), *grads), strict=True)]
    return max(errors) if all(e == e for e in errors) else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 1024), ("length", 2663), ("heads", 4), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variants", default="hopper,plain")
    options = parser.parse_args()
    common.require_gpu()
    rate = common.matrix_rate()
    lengths = {
        "uniform": torch.full((options.batch,), options.length),
        "ragged": ragged_lengths(options.batch, options.length),
    }
    records, table = [], [f"matrix product {rate:.0f} TFLOP/s"]
    for layout, chosen in lengths.items():
        problem = Problem(chosen, options.heads, options.width)
        for variant in options.variants.split(","):
            reason = why_not_hopper(problem.q, problem.k, problem.v, problem.call) if variant == "hopper" else None
            if reason is not None:
                table.append(f"{variant}: not run: {reason}")
                continue
            with launch.variant(variant):
                error = worst_error(options.heads, options.width)
                if not error < 1e-2:
                    print(f"{variant}: relative error {error:.2e} against float64: not timed")
                    return 1
                for what, factor in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
                    timing = common.time_gpu(getattr(problem, what))
                    done = problem.flops * factor / timing.burst_ms / 1e9
                    size = f"B={options.batch},S={options.length} {layout},H={options.heads},d={options.width}"
                    records.append(
                        common.record(
                            f"attention/triton-{variant}/{what}", f"{size},bf16,1 target", timing.burst_ms, "ms",
                            limit=rate, share_of_limit=done / rate, repeats=timing.repeats, spread=timing.spread,
                            sustained=timing.sustained_ms, tflops=done, relative_error=error,
                        )
                    )  # fmt: skip
                    table.append(
                        f"{layout:8} {variant:7} {what:9} burst {timing.burst_ms:7.2f} ms  sustained "
                        f"{timing.sustained_ms:7.2f} ms  {done:4.0f} TFLOP/s  {100 * done / rate:3.0f} % of the product"
                    )
        del problem
    path = common.write_records("attention", records)
    common.plot_records(path)
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
