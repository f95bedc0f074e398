"""What the benchmarks share: the timing protocol, the chip's measured ceilings, the result records and their plot.

Protocol (GPU): *burst* is an idle second, two warm-ups, then the median of five timed calls; *sustained* is about a
second of calls back to back after the burst. Ceilings are measured in the same run: a device-to-device copy (bytes read
plus bytes written) and a large bf16 matrix product on random data.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from generative_recommenders.disk import write_atomically
from generative_recommenders.terminal import speak_any_encoding

speak_any_encoding()
RESULTS = pathlib.Path(__file__).parent / "results"


def require_gpu() -> None:
    """End the script with one line and status 2 where there is no GPU to measure on."""
    if not torch.cuda.is_available():
        why = "this torch build has no CUDA" if torch.version.cuda is None else "none is visible"
        print(f"error: {pathlib.Path(sys.argv[0]).name} measures an NVIDIA GPU, and {why}", file=sys.stderr)
        sys.exit(2)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: burst and sustained medians, and the spread (max - min) / median of the burst."""

    burst_ms: float
    sustained_ms: float
    spread: float
    repeats: int


def _events(fn: Callable[[], object], repeats: int) -> list[float]:
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def time_gpu(fn: Callable[[], object], repeats: int = 5, idle_s: float = 1.0, sustained_s: float = 1.0) -> Timing:
    """Time ``fn`` on the current CUDA device by the protocol above."""
    fn()
    torch.cuda.synchronize()
    time.sleep(idle_s)
    _events(fn, 2)
    burst = _events(fn, repeats)
    median = statistics.median(burst)
    sustained = median
    if sustained_s > 0:
        sustained = statistics.median(_events(fn, max(3, min(2000, int(sustained_s * 1e3 / max(median, 1e-3))))))
    return Timing(median, sustained, (max(burst) - min(burst)) / median, repeats)


def copy_bandwidth(gib: float = 2.0) -> float:
    """Device-to-device copy bandwidth in GB/s, bytes read plus bytes written."""
    source = torch.randn(int(gib * 2**30 / 4), device="cuda")
    target = torch.empty_like(source)
    timing = time_gpu(lambda: target.copy_(source), sustained_s=0)
    return 2 * source.numel() * 4 / timing.burst_ms / 1e6


def matrix_rate(size: int = 8192) -> float:
    """Rate of a size³ bf16 matrix product on random data, TFLOP/s, burst."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    timing = time_gpu(lambda: a @ b, sustained_s=0)
    return 2 * size**3 / timing.burst_ms / 1e9


def device_name() -> str:
    """The GPU as the driver names it, else the CPU model."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"


def versions() -> dict[str, str]:
    """Versions of torch, triton and fbgemm, and the commit of this checkout."""
    found = {"torch": torch.__version__}
    for name, packages in {"triton": ("triton",), "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu")}.items():
        for package in packages:
            try:
                found[name] = importlib.metadata.version(package)
                break
            except importlib.metadata.PackageNotFoundError:
                found[name] = "absent"
    found["commit"] = os.environ.get("BENCH_COMMIT") or _commit()
    return found


def _commit() -> str:
    try:
        here = pathlib.Path(__file__).parent
        out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        return out.stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def record(
    name: str,
    shape: str,
    value: float,
    unit: str,
    *,
    limit: float | None = None,
    share_of_limit: float | None = None,
    baseline: dict | None = None,
    repeats: int = 1,
    spread: float | None = None,
    **extra: object,
) -> dict:
    """One benchmark record; ``extra`` fields (bytes, sustained value, …) are kept beside the fixed ones."""
    return {
        "name": name,
        "device": device_name(),
        "shape": shape,
        "value": value,
        "unit": unit,
        "limit": limit,
        "share_of_limit": share_of_limit,
        "baseline": baseline,
        "repeats": repeats,
        "spread": spread,
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        **extra,
    }


def write_records(file: str, records: list[dict], folder: pathlib.Path | None = None) -> pathlib.Path:
    """Merge records into ``<folder>/<file>.json``: same name, shape and device are replaced, the rest is kept.

    The folder is ``benchmarks/results`` or, where set, ``$BENCH_RESULTS``.
    """
    folder = folder or pathlib.Path(os.environ.get("BENCH_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file}.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    key = lambda r: (r["name"], r["shape"], r["device"])  # noqa: E731
    fresh = {key(r) for r in records}
    merged = [r for r in old if key(r) not in fresh] + records
    merged.sort(key=key)
    write_atomically(path, json.dumps(merged, indent=1) + "\n")
    return path


def plot_records(path: pathlib.Path) -> None:
    """Draw ``<file>.png`` beside the JSON: a bar per record, its share of the limit in the label. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot drawn")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = json.loads(path.read_text(encoding="utf-8"))
    labels = [f"{r['name']}\n{r['shape']}" for r in records]
    figure, axes = pyplot.subplots(figsize=(11, 0.45 * len(records) + 1.5))
    bars = axes.barh(range(len(records)), [r["value"] for r in records], color="#4878a8")
    texts = []
    for r in records:
        share = "" if r["share_of_limit"] is None else f"  ({100 * r['share_of_limit']:.0f} % of limit)"
        texts.append(f"{r['value']:.4g} {r['unit']}{share}")
    axes.bar_label(bars, texts, padding=3, fontsize=7)
    axes.set_yticks(range(len(records)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_title(f"{path.stem} - {', '.join(sorted({r['device'] for r in records}))}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    pyplot.close(figure)
