"""One whole STU layer, forward and backward: time, kernels and peak memory, with and without recomputation.

    python benchmarks/stu_layer.py [--batch 1024 --length 2663 --heads 4 --width 128 --embedding 512]

bf16 autocast over fp32 parameters, bf16 rows, dropout 0.1, one candidate per sequence. First the output and every
gradient of a small batch, the four parts of the UVQK bias each on its own, are held against float64: what is wrong is
not timed. Floor: the layer's products and attention at the rate of a large matrix product measured in the same run.
Peak extra memory is what one step allocates beyond its inputs. Writes benchmarks/results/stu_layer.json.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks import common  # noqa: E402
from benchmarks.attention import ragged_lengths  # noqa: E402
from generative_recommenders.modules.stu import STULayer, STULayerConfig  # noqa: E402


def make_layer(options, recompute: bool, backend: str | None = None) -> STULayer:
    config = STULayerConfig(
        embedding_dim=options.embedding,
        num_heads=options.heads,
        hidden_dim=options.width,
        attention_dim=options.width,
        max_seq_len=4096,
        recompute_normed_x=recompute,
        recompute_uvqk=recompute,
        recompute_y=recompute,
        backend=backend or options.backend,
    )
    return STULayer(config).cuda().train()


def flops(lengths: torch.Tensor, options) -> float:
    """Products and attention of one step: forward + backward, nothing recomputed."""
    columns, rows = options.heads * options.width, float(lengths.sum())
    products = 3 * 2 * rows * options.embedding * (4 * columns + 3 * columns)
    return products + 3.5 * float((lengths.double() ** 2).sum()) * 2 * columns


def step_of(layer: STULayer, lengths: torch.Tensor, options):
    """A function that runs forward and backward once, leaving gradients freed."""
    rows, longest = int(lengths.sum()), int(lengths.max())
    x = torch.empty(rows, options.embedding, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    dout = torch.empty(rows, options.embedding, device="cuda", dtype=torch.bfloat16).normal_()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda()
    targets = torch.ones(lengths.numel(), dtype=torch.int64, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x, offsets, longest, targets)
        torch.autograd.grad(out, [x, *layer.parameters()], dout)

    return step


def breakdown(step) -> list[tuple[str, float]]:
    """(kernel name, milliseconds) of one step, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        name = event.key[:60]
        times[name] = times.get(name, 0.0) + event.self_device_time_total / 1e3
    return sorted(((n, t) for n, t in times.items() if t > 0.05), key=lambda pair: -pair[1])


def peak_extra(step) -> int:
    """Bytes allocated at the height of one step beyond those held before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def gradients(layer: STULayer, options, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of a small ragged batch: under bf16 autocast, or all in float64."""
    lengths, targets = [300, 0, 1, 777, 129, 64], [1, 0, 1, 3, 20, 1]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.02).to(parameter))
    shape = sum(lengths), options.embedding
    x, dout = (torch.randn(shape, generator=generator).bfloat16().cuda().to(dtype) for _ in range(2))
    x.requires_grad_()
    offsets, targets = torch.tensor([0, *lengths]).cumsum(0).cuda(), torch.tensor(targets).cuda()
    torch.manual_seed(3)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = layer(x, offsets, max(lengths), targets)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    results = dict(zip(("out", "dx", *names), (out, *torch.autograd.grad(out, (x, *parameters), dout)), strict=True))
    columns = options.heads * options.width
    parts = results.pop("_uvqk_beta").split(columns)
    return results | {f"bias of {name}": part for name, part in zip("UVQK", parts, strict=True)}


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b; NaN counts as infinite."""
    a, b = a.detach().double(), b.detach().double()
    return float(((a - b).norm() / b.norm()).nan_to_num(nan=float("inf")))


def wrong_results(options) -> list[str]:
    """What is more than twice as far from float64 as PyTorch's own arithmetic under the same autocast."""
    weights = make_layer(options, False, "PYTORCH").state_dict()
    found = []

    def results(recompute, backend, dtype):
        layer = make_layer(options, recompute, backend)
        layer.load_state_dict(weights)
        return gradients(layer.to(dtype) if dtype == torch.float64 else layer, options, dtype)

    want = results(False, "PYTORCH", torch.float64)
    theirs = results(False, "PYTORCH", torch.bfloat16)
    for recompute in (False, True):
        ours, again = (results(recompute, options.backend, torch.bfloat16) for _ in range(2))
        for name, b in want.items():
            error, limit = relative_error(ours[name], b), 2 * relative_error(theirs[name], b) + 1e-4
            if error > limit:
                found.append(f"{name} (recompute {recompute}): error {error:.2e}, limit {limit:.2e}")
            if not torch.equal(ours[name], again[name]):
                found.append(f"{name} (recompute {recompute}): a second run gave other bits")
    return found


def measure(options, rate: float) -> tuple[list[dict], list[str]]:
    """Records, and lines to print, of all layouts with and without recomputation."""
    records, table = [], []
    for layout in ("uniform", "ragged"):
        uniform = torch.full((options.batch,), options.length)
        lengths = uniform if layout == "uniform" else ragged_lengths(options.batch, options.length)
        for recompute in (False, True):
            torch.manual_seed(0)
            step = step_of(make_layer(options, recompute), lengths, options)
            timing = common.time_gpu(step)
            extra = peak_extra(step)
            found = breakdown(step)
            kind = "recompute" if recompute else "norecompute"
            share = flops(lengths, options) / timing.burst_ms / 1e9 / rate
            shape = (
                f"B={options.batch},S={options.length} {layout},H={options.heads},d={options.width},"
                f"D={options.embedding},bf16,dropout 0.1"
            )
            records.append(
                common.record(
                    f"stu_layer/{options.backend.lower()}/{kind}/{layout}", shape, timing.burst_ms, "ms", limit=rate,
                    share_of_limit=share, repeats=timing.repeats, spread=timing.spread, sustained=timing.sustained_ms,
                    peak_extra_bytes=extra, kernels_ms={name: round(ms, 3) for name, ms in found},
                )
            )  # fmt: skip
            if layout == "uniform":
                table.extend(f"    {ms:7.2f} ms  {name}" for name, ms in found[:22])
            table.append(
                f"{layout:8} {kind:12} burst {timing.burst_ms:7.2f} ms  sustained {timing.sustained_ms:7.2f} ms  "
                f"peak extra {extra / 2**30:5.1f} GiB  {100 * share:3.0f} % of the product's rate"
            )
            del step
            torch.cuda.empty_cache()
    return records, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 1024), ("length", 2663), ("heads", 4), ("width", 128), ("embedding", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="TRITON")
    options = parser.parse_args()
    common.require_gpu()
    wrong = wrong_results(options)
    if wrong:
        print("\n".join(["the layer's results are wrong, nothing is timed:", *wrong]))
        return 1
    rate = common.matrix_rate()
    print(f"results are right; matrix product {rate:.0f} TFLOP/s", flush=True)
    records, table = measure(options, rate)
    print("\n".join(table), flush=True)
    common.plot_records(common.write_records("stu_layer", records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
