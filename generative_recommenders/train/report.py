"""``report.html``: one self-contained page with the curves, the figures and the configuration of a run."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from generative_recommenders.train.run_folder import Result

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 26, 12, 36

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2430; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.ok { color: #1a7f4b; } .failed { color: #b3261e; }
.curves { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; } figcaption { font-weight: 600; }
table { border-collapse: collapse; } td { padding: .25rem .8rem; border-bottom: 1px solid #dfe3ea; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #4a5568; }
svg .label { paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round; }
pre { background: #f5f7fa; padding: 1rem; overflow-x: auto; font-size: 12.5px; }
"""


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that cover [low, high]."""
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The ticks as text with one unit (k, M, G) and one number of decimals for all; 0 stays bare."""
    largest = max(map(abs, ticks))
    size, unit = next(((s, u) for s, u in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if largest >= s), (1.0, ""))
    scaled = [tick / size for tick in ticks]
    decimals = next(d for d in range(13) if all(math.isclose(x, round(x, d), abs_tol=1e-12) for x in scaled))
    return [f"{x:.{decimals}f}{unit}" if x else "0" for x in scaled]


def curve(
    title: str, points: Sequence[tuple[float, float]], lines: Mapping[str, float] | None = None, x_name: str = "samples"
) -> str:
    """An SVG figure of one curve; ``lines`` are named horizontal lines (baseline, best reachable)."""
    if not points:
        return ""
    lines = lines or {}
    xs, ys = [x for x, _ in points], [y for _, y in points] + list(lines.values())
    x_ticks, y_ticks = nice_ticks(min(0.0, *xs), max(xs)), nice_ticks(min(ys), max(ys))
    to_x = _scale(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT)
    to_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">']
    for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = to_y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e9ef"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        parts.append(f'<text x="{to_x(tick):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">{x_name}</text>')
    for name, value in lines.items():
        y = to_y(value)
        dashes = 'stroke="#c2772b" stroke-dasharray="5 4"'
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {dashes}/>')
        parts.append(f'<text class="label" x="{LEFT + 4}" y="{y - 4:.1f}">{html.escape(name)} {value:.4f}</text>')
    path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#2b6cb0" stroke-width="1.8"/>')
    if len(points) <= 40:
        parts += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="2.6" fill="#2b6cb0"/>' for x, y in points]
    parts.append("</svg>")
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{''.join(parts)}</figure>"


def _scale(low: float, high: float, start: float, end: float):
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _points(rows: Sequence[Mapping], kind: str, name: str) -> list[tuple[float, float]]:
    return [(row["samples"], row[name]) for row in rows if row["kind"] == kind and row.get(name) is not None]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f'<tr><td>{html.escape(a)}</td><td class="n">{html.escape(b)}</td></tr>' for a, b in rows)
    return f"<table>{cells}</table>"


def page(
    name: str, result: Result, figures: Sequence[tuple[str, str]], metrics: Sequence[Mapping], config_text: str
) -> str:
    """The whole page.

    Args:
        name: of the run.
        figures: name and value of every closing figure, as the final table shows them.
        metrics: rows of ``metrics.jsonl``.
        config_text: the resolved configuration.
    """
    levels = {"baseline": result.baseline_auc, "best reachable": result.best_auc}
    lines = {label: value for label, value in levels.items() if value is not None}
    curves = [curve("Training loss", _points(metrics, "train", "loss"))]
    evaluations = [row for row in metrics if row["kind"] == "eval"]
    tasks = [key.removesuffix("/auc") for row in evaluations for key in row if key.endswith("/auc")]
    for index, task in enumerate(dict.fromkeys(tasks)):
        curves.append(
            curve(f"Hold-out AUC, {task}", _points(metrics, "eval", f"{task}/auc"), lines if index == 0 else None)
        )
    errors = dict.fromkeys(key for row in evaluations for key in row if key.endswith("/rmse"))
    curves += [curve(f"Hold-out RMSE, {key.removesuffix('/rmse')}", _points(metrics, "eval", key)) for key in errors]
    curves.append(curve("Samples per second", _points(metrics, "train", "samples_per_second")))
    outcome = result.status if result.reason is None else f"{result.status}: {result.reason}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(name)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(name)}</h1>
<p class="{result.status}">{html.escape(outcome)}</p>
<div class="curves">{"".join(curves)}</div>
<h2>Figures</h2>
{_table(figures)}
<h2>Configuration</h2>
<pre>{html.escape(config_text)}</pre>
</body></html>
"""
