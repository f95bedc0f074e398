"""The list of every option a configuration can set, as the command line prints it."""

from __future__ import annotations

import dataclasses
import inspect

from generative_recommenders.train.config import SECTIONS, bounds
from generative_recommenders.train.datasets import FACTORIES, parameters

# What the data sets' options mean, by name; a data set checks their ranges itself.
DATA_OPTIONS = {
    "path": "folder of the files",
    "size": "50m, 500m or 5b",
    "cache": "folder of the prepared cache",
    "users": "generated users",
    "items": "generated items",
    "days": "generated days",
    "events_median": "events of the median user",
    "events_mean": "events of the mean user",
    "seed": "of the generator",
    "min_history": "strictly earlier events of its user that an event needs to become a sample",
    "history_length": "events of a history at most",
    "history_strategy": "last_n: the newest; interleaved: a third from each kind of outcome",
    "history_ties": "exclude: only events strictly before the sample; order: the public benchmark's rule",
    "scan_limit": "newest events before the sample that any history_strategy looks through",
    "holdout_fraction": "share of the samples, the newest, that are the hold-out",
    "holdout_days": "days at the end that are the hold-out",
    "train_days": "days before the hold-out that train",
    "gap_seconds": "time before the hold-out that belongs to neither",
    "window_days": "days of a training window",
    "window_seconds": "seconds of a training window",
    "item_features": "of history rows and candidate: the id and its attributes",
    "contextual_features": "one value per sample: uid, context columns, crosses such as user_x_artist",
    "table_rows": "feature → rows of its table, where not the vocabulary's",
    "table_rows_limit": "rows of a cross's table at most; ids are hashed down to it",
    "num_workers": "threads that build batches ahead",
}


def options_table() -> str:
    """Sections and their options with default, range and meaning; data sets with their own options."""
    lines = []
    for name, section in SECTIONS.items():
        lines.append(f"{name}: {(inspect.getdoc(section) or '').splitlines()[0]}")
        for field in dataclasses.fields(section):
            default = getattr(section(), field.name)
            allowed = bounds(field.metadata)
            allowed = f" ({allowed})" if allowed else ""
            knob = f" [environment: {field.metadata['environment']}]" if field.metadata["environment"] else ""
            lines.append(f"  {name}.{field.name} = {default!r}{allowed}: {field.metadata['doc']}{knob}")
        lines.append("")
    lines.append("data sets (data.dataset) and their options:")
    for name, factory in FACTORIES.items():
        lines.append(f"  {name}: {(inspect.getdoc(factory) or '').splitlines()[0]}")
        for parameter in parameters(name).values():
            required = parameter.default is inspect.Parameter.empty
            default = " (required)" if required else f" = {parameter.default!r}"
            meaning = DATA_OPTIONS.get(parameter.name, "")  # a data set registered from outside explains itself
            lines.append(f"    {name}.{parameter.name}{default}: {meaning}".rstrip(": "))
    return "\n".join(lines)
