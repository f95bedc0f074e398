"""One whole STU layer, forward and backward: time, kernels and peak memory, with and without recomputation.

    python benchmarks/stu_layer.py [--batch 1024 --length 2663 --heads 4 --width 128 --embedding 512]

bf16 autocast over fp32 parameters, bf16 rows, dropout 0.1, one candidate per sequence. Floor: the layer's products and
attention at the rate of a large matrix product measured in the same run. Peak extra memory is what one step allocates
beyond its inputs. Writes benchmarks/results/stu_layer.json.
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


def make_layer(options, recompute: bool) -> STULayer:
    config = STULayerConfig(
        embedding_dim=options.embedding,
        num_heads=options.heads,
        hidden_dim=options.width,
        attention_dim=options.width,
        max_seq_len=4096,
        recompute_normed_x=recompute,
        recompute_uvqk=recompute,
        recompute_y=recompute,
        backend=options.backend,
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 1024), ("length", 2663), ("heads", 4), ("width", 128), ("embedding", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="TRITON")
    options = parser.parse_args()
    rate = common.matrix_rate()
    records, table = [], [f"matrix product {rate:.0f} TFLOP/s"]
    for layout in ("uniform", "ragged"):
        uniform = torch.full((options.batch,), options.length)
        lengths = uniform if layout == "uniform" else ragged_lengths(options.batch, options.length)
        for recompute in (False, True):
            torch.manual_seed(0)
            step = step_of(make_layer(options, recompute), lengths, options)
            timing = common.time_gpu(step)
            extra = peak_extra(step)
            kernels = breakdown(step)
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
                    peak_extra_bytes=extra, kernels_ms={name: round(ms, 3) for name, ms in kernels},
                )
            )  # fmt: skip
            if layout == "uniform":
                table.extend(f"    {ms:7.2f} ms  {name}" for name, ms in kernels[:16])
            table.append(
                f"{layout:8} {kind:12} burst {timing.burst_ms:7.2f} ms  sustained {timing.sustained_ms:7.2f} ms  "
                f"peak extra {extra / 2**30:5.1f} GiB  {100 * share:3.0f} % of the product's rate"
            )
            del step
            torch.cuda.empty_cache()
    path = common.write_records("stu_layer", records)
    common.plot_records(path)
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
