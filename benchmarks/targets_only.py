"""The targets-only last layer on one GPU: full layer, materialised and absorbed side by side, forward + backward.

    python benchmarks/targets_only.py [--rows 0,1,2,3] [--arms full,materialised,absorbed] [--plot]

The layer of the public benchmark's yambda-5b model: 512 wide, 4 heads of 128, bf16, dropout 0.1, fp32 parameters. Every
arm backpropagates from the candidate rows only and computes the gradients of x and of all parameters. First each arm's
outputs and gradients are held against the full layer in float64, on a small ragged batch and from poisoned memory.
``limit`` is the time the least traffic takes at the copy bandwidth of the same run: x read twice and dx written once
(the full layer has none: its attention is arithmetic). An absorbed step is shorter than the launches of its small
products, so its value is a replayed CUDA graph's and the eager time stands beside it; the other arms run eagerly.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import common  # noqa: E402
from generative_recommenders.modules.stu import STULayer, STULayerConfig  # noqa: E402
from generative_recommenders.ops.candidate_attention import CandidateRows, TargetSummary  # noqa: E402
from generative_recommenders.ops.checks import counts_settled  # noqa: E402

ARMS = ("full", "materialised", "absorbed")
CONFIG = STULayerConfig(embedding_dim=512, num_heads=4, hidden_dim=128, attention_dim=128, max_seq_len=4096)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; ``reported``: the public change on one MI350X, full and targets-only, in ms."""

    batch: int
    length: int
    ragged: bool
    goal: float
    reported: tuple[float, float]

    def lengths(self) -> torch.Tensor:
        if not self.ragged:
            return torch.full((self.batch,), self.length)
        g = torch.Generator().manual_seed(0)
        return torch.randint(self.length // 2, self.length * 3 // 2 + 1, (self.batch,), generator=g)

    def shape(self) -> str:
        kind = "ragged" if self.ragged else "uniform"
        return f"B={self.batch},S={self.length} {kind},H=4,d=128,D=512,bf16"


ROWS = (
    Row(256, 2663, False, 1.3, (41.26, 13.64)),
    Row(1024, 2663, False, 4.0, (160.31, 30.56)),
    Row(1024, 2663, True, 4.2, (186.94, 27.02)),
    Row(1024, 4086, False, 6.0, (333.64, 41.42)),
)


class Step:
    """Forward + backward of one arm on one batch."""

    def __init__(self, layer: STULayer, lengths: torch.Tensor, arm: str, dtype: torch.dtype) -> None:
        self.layer, self.arm, self.dtype = layer, arm, dtype
        lengths = lengths.sort(descending=True).values  # as the transducer lays a batch out
        self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).cuda()
        self.longest, self.total = int(lengths.max()), int(lengths.sum())
        g = torch.Generator(device="cuda").manual_seed(1)
        self.x = torch.randn(self.total, 512, device="cuda", generator=g, dtype=torch.float32).to(dtype)
        self.x.requires_grad_()
        self.grad = torch.randn(lengths.numel(), 512, device="cuda", generator=g).to(dtype)
        self.targets = torch.ones(lengths.numel(), dtype=torch.int64, device="cuda")
        self.summary = TargetSummary(lengths.numel(), lengths.numel(), 1, 1)

    def __call__(self) -> torch.Tensor:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        autocast = torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)
        with autocast, counts_settled():  # the model asserts a batch's counts once, not in every layer
            candidates = CandidateRows.of(self.offsets, self.targets, self.summary)
            if self.arm == "full":
                out = self.layer(self.x, self.offsets, self.longest, self.targets)[candidates.rows]
            else:
                out = self.layer.forward_targets_only(self.x, self.offsets, candidates, self.arm)
        out.backward(self.grad)
        return out

    def results(self) -> dict[str, torch.Tensor]:
        """Output and all gradients, from memory that held NaN before, with one dropout seed."""
        junk = torch.full((2**28,), float("nan"), device="cuda")
        del junk
        torch.cuda.manual_seed(7)
        out = self()
        gradients = {name: p.grad for name, p in self.layer.named_parameters()}
        return {"out": out.detach(), "dx": self.x.grad} | gradients


def make_layer(dtype: torch.dtype = torch.float32, backend: str | None = None) -> STULayer:
    torch.manual_seed(0)
    layer = STULayer(dataclasses.replace(CONFIG, backend=backend)).cuda()
    g = torch.Generator(device="cuda").manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, device="cuda", generator=g))
    return layer.to(dtype)


def check(arms: list[str]) -> None:
    """Stop unless every arm's error against float64 is at most twice the full layer's own (or 0.5 %)."""
    lengths = torch.tensor([700, 33, 1, 64, 65, 128, 2, 333])
    want = Step(make_layer(torch.float64, "PYTORCH"), lengths, "full", torch.float64)
    want.x = want.x.detach().to(torch.bfloat16).double().requires_grad_()  # the same rounded rows
    want = want.results()
    errors = {}
    for arm in dict.fromkeys(["full", *arms]):
        got = Step(make_layer(), lengths, arm, torch.bfloat16).results()
        errors[arm] = {k: ((got[k].double() - want[k]).norm() / want[k].norm()).item() for k in want}
        print(f"check {arm:13s}" + " ".join(f"{k.strip('_')} {v:.1e}" for k, v in errors[arm].items()), flush=True)
    for arm in arms:
        for name, error in errors[arm].items():
            if not error <= max(2 * errors["full"][name], 5e-3):
                raise SystemExit(f"{arm}: error of {name} is {error:.2e}, the full layer's {errors['full'][name]:.2e}")


def time_graph(step: Step, sustained_s: float) -> common.Timing:
    """The same step as a replayed CUDA graph: the device's time, without gaps between launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return common.time_gpu(graph.replay, sustained_s=sustained_s)


def measure(row: Row, arm: str, bandwidth: float, sustained_s: float) -> dict:
    step = Step(make_layer(), row.lengths(), arm, torch.bfloat16)
    eager = common.time_gpu(step, sustained_s=sustained_s)
    timing = time_graph(step, sustained_s) if arm == "absorbed" else eager
    moved = None if arm == "full" else 3 * step.total * 512 * 2
    least = None if moved is None else moved / bandwidth / 1e6
    return common.record(
        f"targets_only/{arm}/{'ragged' if row.ragged else 'uniform'}",
        row.shape(),
        timing.burst_ms,
        "ms",
        limit=least,
        share_of_limit=None if least is None else least / timing.burst_ms,
        repeats=timing.repeats,
        spread=timing.spread,
        sustained=timing.sustained_ms,
        eager=eager.burst_ms,
        bytes=moved,
        copy_gb_s=bandwidth,
        goal=row.goal,
        reported_mi350x=row.reported,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="0,1,2,3", help="lines of the table")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--sustained", type=float, default=1.0, help="seconds of sustained timing, 0 for burst only")
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    common.require_gpu()
    arms = args.arms.split(",")
    check(arms)
    bandwidth = common.copy_bandwidth()
    print(f"copy bandwidth {bandwidth:.0f} GB/s")
    records = []
    for row in (ROWS[int(i)] for i in args.rows.split(",")):
        done = {}
        for arm in arms:
            torch.cuda.empty_cache()
            done[arm] = measure(row, arm, bandwidth, args.sustained)
            r = done[arm]
            share = "" if r["limit"] is None else f"  {100 * r['share_of_limit']:.0f} % of the copy limit"
            eager = f"  (eager {r['eager']:.2f})"
            print(f"{r['shape']:45s} {arm:13s} {r['value']:8.2f} ms{eager}{share}  goal {row.goal}", flush=True)
        if "full" in done:
            for arm in done.keys() - {"full"}:
                done[arm]["baseline"] = {"name": done["full"]["name"], "value": done["full"]["value"]}
        records += done.values()
    path = common.write_records("targets_only", records)
    if args.plot:
        common.plot_records(path)


if __name__ == "__main__":
    main()
