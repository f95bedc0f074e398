"""LMSD on one GPU: correctness first, then milliseconds, GB/s and the share of the measured copy bandwidth.

    python benchmarks/lmsd.py            check, time, write benchmarks/results/lmsd.json and lmsd.png
    python benchmarks/lmsd.py --sweep    check, then time candidate launches of each kernel; writes nothing
    python benchmarks/lmsd.py --check    check only

The baseline is ``torch.compile`` of the plain formula, forward and backward, in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import common  # noqa: E402
from generative_recommenders.ops.common.launch import RowLaunch, padded  # noqa: E402
from generative_recommenders.ops.lmsd import launch, reference  # noqa: E402
from generative_recommenders.ops.lmsd.contract import LmsdConfig  # noqa: E402

ROWS = 2_727_000
WIDTHS = (256, 512, 1024)
RATIOS = (0.0, 0.1)
SEED = 20_240_607_123_456_789
DTYPE = torch.bfloat16


def config(dropout_ratio: float) -> LmsdConfig:
    """All segments, SiLU on."""
    return LmsdConfig(dropout_ratio, apply_u_silu=True, concat_u=True, concat_x=True)


def inputs(rows: int, columns: int, dtype: torch.dtype = DTYPE) -> tuple[torch.Tensor, ...]:
    """Random x, u, weight, bias."""
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,))
    return tuple(torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)


def poison(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Leave NaN in the allocator's free blocks of the sizes that the next outputs take."""
    blocks = [torch.full((rows, wide), float("nan"), device="cuda", dtype=dtype) for wide in (3 * columns, columns)]
    blocks += [torch.full((rows,), float("nan"), device="cuda") for _ in range(2)]
    del blocks


def relative_error(value: torch.Tensor, oracle: torch.Tensor) -> float:
    """Norm of the difference over the norm of the oracle; NaN counts as infinite."""
    error = (value.double() - oracle).norm() / oracle.norm().clamp_min(1e-30)
    return float(torch.nan_to_num(error, nan=float("inf")))


def check_case(rows: int, columns: int, dtype: torch.dtype, ratio: float, launches=(None, None)) -> float:
    """Worst relative error against the float64 reference; masks must be equal bit for bit."""
    cfg = config(ratio)
    x, u, weight, bias = inputs(rows, columns, dtype)
    poison(rows, columns, dtype)
    y, mean, rstd, mask = launch.forward(x, u, weight, bias, SEED, None, cfg, launches[0])
    dy = torch.randn_like(y)
    nan = [torch.full_like(t, float("nan")) for t in (x, u, weight, bias)]
    grads = launch.backward(dy, x, u, weight, bias, mean, rstd, mask, cfg, True, tuple(nan), launches[1])
    if ratio > 0:
        kept = reference.draw_mask(torch.arange(rows, device="cuda"), columns, SEED, ratio, True, True)
        assert torch.equal(mask, kept), f"mask differs at N={rows}, D={columns}, {dtype}"
    wide = [t.double() for t in (x, u, weight, bias)]
    y64, mean64, rstd64 = reference.forward(*wide, mask, cfg.eps, ratio)
    grads64 = reference.backward(dy.double(), *wide, mean64, rstd64, mask, ratio)
    return max(
        relative_error(a, b) for a, b in zip((y, mean, rstd, *grads), (y64, mean64, rstd64, *grads64), strict=True)
    )


TOLERANCE = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


CASES = (
    (1000, 512, torch.float32),
    (1000, 512, torch.bfloat16),
    (257, 64, torch.bfloat16),
    (4099, 768, torch.bfloat16),
)


def check(cases: tuple = CASES) -> None:
    """Shapes, dtypes and ratios against float64; raises at the first that is off."""
    worst = {}
    for rows, columns, dtype in cases:
        for ratio in RATIOS:
            error = check_case(rows, columns, dtype, ratio)
            assert error < TOLERANCE[dtype], f"N={rows}, D={columns}, {dtype}, p={ratio}: error {error:.2e}"
            worst[dtype] = max(worst.get(dtype, 0.0), error)
    print(
        "check: masks equal; worst relative errors " + ", ".join(f"{k}: {v:.1e}" for k, v in worst.items()), flush=True
    )


@dataclasses.dataclass
class Problem:
    """Tensors of one timed size; ``forward`` and ``backward`` run with a given launch."""

    columns: int
    ratio: float

    def __post_init__(self) -> None:
        self.cfg = config(self.ratio)
        self.tensors = inputs(ROWS, self.columns)
        self.y, *self.saved = self.forward()
        self.dy = torch.randn_like(self.y)

    def forward(self, chosen: RowLaunch | None = None):
        return launch.forward(*self.tensors, SEED, None, self.cfg, chosen)

    def backward(self, chosen: RowLaunch | None = None):
        return launch.backward(self.dy, *self.tensors, *self.saved, self.cfg, True, config=chosen)

    def moved(self, backward: bool) -> int:
        """Bytes that must cross the memory bus: inputs and outputs once."""
        per_element = (14 if backward else 10) + (1 if self.ratio > 0 else 0)
        return per_element * ROWS * self.columns + 8 * ROWS

    def check_tail(self) -> None:
        """The last rows, past 2**31 elements of y, equal the same rows run alone under their row numbers."""
        rows = torch.arange(ROWS - 100, ROWS, device="cuda")
        x, u = (t[-100:] for t in self.tensors[:2])
        alone = launch.forward(x, u, *self.tensors[2:], SEED, rows, self.cfg)
        for whole, part in zip((self.y, *self.saved), alone, strict=True):
            assert whole is None or torch.equal(whole[-100:], part), f"tail differs at D={self.columns}"


def quick_ms(fn) -> float:
    """Median of five calls after two warm-ups."""
    for _ in range(2):
        fn()
    return statistics.median(common._events(fn, 5))


def candidates(columns: int, backward: bool, dropout: bool) -> list[RowLaunch]:
    """Launches worth timing: rows and warps per program, register caps, programs per multiprocessor."""
    vector = 4 if dropout and not backward else 8
    warps = max(1, columns // 512)
    shapes = [(1, warps, None), (1, warps, 168), (1, warps, 128), (1, 2 * warps, None), (2, warps, 128)]
    if dropout and not backward:
        shapes += [(1, warps, 96), (1, 2 * warps, 80)]
    programs = (12, 16, 24, 64, 256)
    return [RowLaunch(padded(columns), u, w, n // w, r, vector) for u, w, r in shapes for n in programs]


def sweep(columns: int) -> None:
    """Time every candidate; print each launch's best number of programs."""
    copy = common.copy_bandwidth()
    print(f"copy {copy:.0f} GB/s; D={columns}, N={ROWS}")
    for ratio in reversed(RATIOS):
        problem = Problem(columns, ratio)
        for backward in (False, True):
            run = problem.backward if backward else problem.forward
            rows, started = [], time.monotonic()
            for chosen in candidates(columns, backward, ratio > 0):
                rows.append((quick_ms(lambda run=run, chosen=chosen: run(chosen)), chosen))
            default = quick_ms(run)
            best = {}
            for ms, chosen in sorted(rows, key=lambda r: r[0]):
                best.setdefault(dataclasses.replace(chosen, programs_per_sm=0), (ms, chosen))
            took = time.monotonic() - started
            print(
                f"{'backward' if backward else 'forward'} p={ratio}: default {default:.3f} ms, took {took:.0f} s",
                flush=True,
            )
            for ms, chosen in best.values():
                share = problem.moved(backward) / ms / 1e6 / copy
                print(f"  {ms:.3f} ms {100 * share:.1f} %  {chosen}")
        del problem
        torch.cuda.empty_cache()


def plain(x, u, weight, bias, ratio: float):
    """The formula as one would write it, for ``torch.compile``."""
    functional = torch.nn.functional
    a = functional.silu(u)
    ell = functional.layer_norm(x, x.shape[1:], weight, bias, 1e-6)
    return torch.cat([functional.dropout(part, ratio, training=ratio > 0) for part in (a, x, ell * a)], dim=1)


def time_baseline(columns: int, ratio: float) -> tuple[float, float]:
    """Forward and backward milliseconds of the compiled plain formula."""
    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in inputs(ROWS, columns)]
    compiled = torch.compile(plain, dynamic=False)
    y = compiled(*leaves, ratio)
    dy = torch.randn_like(y)
    forward = common.time_gpu(lambda: compiled(*leaves, ratio), sustained_s=0)
    backward = common.time_gpu(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), sustained_s=0)
    return forward.burst_ms, backward.burst_ms


def timed_record(problem: Problem, backward: bool, copy: float) -> dict:
    """Time one pass and make its record; ``copy`` is the copy bandwidth in GB/s."""
    timing = common.time_gpu(problem.backward if backward else problem.forward, sustained_s=0.5)
    rate = problem.moved(backward) / timing.burst_ms / 1e6
    return common.record(
        f"lmsd/triton/{'backward' if backward else 'forward'}/p={problem.ratio}",
        f"N={ROWS},D={problem.columns},bf16",
        timing.burst_ms,
        "ms",
        limit=copy,
        share_of_limit=rate / copy,
        repeats=timing.repeats,
        spread=timing.spread,
        limit_unit="GB/s, device-to-device copy, read plus written",
        bytes=problem.moved(backward),
        gb_per_s=rate,
        sustained_ms=timing.sustained_ms,
    )


def measure(widths: tuple[int, ...]) -> list[dict]:
    """The records of these D, without baselines."""
    copy = common.copy_bandwidth()
    records = []
    for columns in widths:
        for ratio in RATIOS:
            problem = Problem(columns, ratio)
            problem.check_tail()
            records += [timed_record(problem, backward, copy) for backward in (False, True)]
            del problem
            torch.cuda.empty_cache()
    return records


def add_baselines(records: list[dict], widths: tuple[int, ...]) -> None:
    """Time the compiled plain formula and note it in the records, writing after each, as compiling takes a while."""
    for columns in widths:
        for ratio in reversed(RATIOS):
            times = time_baseline(columns, ratio)
            torch.cuda.empty_cache()
            for record in records:
                name, shape = record["name"], record["shape"]
                if name.endswith(f"p={ratio}") and f"D={columns}," in shape:
                    value = times["backward" in name]
                    record["baseline"] = {"name": "torch.compile of the plain formula", "value": value}
            common.write_records("lmsd", records)


def table(records: list[dict]) -> None:
    """The short table at the end of a run."""
    print(f"{'name':34s} {'shape':26s} {'ms':>7s} {'sust.':>7s} {'GB/s':>6s} {'share':>6s} {'compile':>8s}")
    for r in records:
        known = "-" if r["baseline"] is None else f"{r['baseline']['value']:.2f}"
        print(
            f"{r['name']:34s} {r['shape']:26s} {r['value']:7.3f} {r['sustained_ms']:7.3f} {r['gb_per_s']:6.0f} "
            f"{100 * r['share_of_limit']:5.1f}% {known:>8s}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time candidate launches instead of recording")
    parser.add_argument("--width", type=int, default=512, help="D of the sweep")
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="D to measure")
    parser.add_argument("--baseline", default="512,1024,256", help="widths that also time torch.compile; empty: none")
    options = parser.parse_args()
    common.require_gpu()
    torch.manual_seed(int(time.time()))
    print(f"{common.device_name()}, torch {torch.__version__}")
    check(CASES[:2] if options.sweep else CASES)
    if options.check:
        return
    if options.sweep:
        sweep(options.width)
        return
    records = measure(tuple(int(w) for w in options.widths.split(",")))
    path = common.write_records("lmsd", records)
    table(records)
    add_baselines(records, tuple(int(w) for w in options.baseline.split(",") if w))
    common.plot_records(path)
    print(f"wrote {path}")
    table(records)


if __name__ == "__main__":
    main()
