"""The list of every option a configuration can set, as the command line prints it."""

from __future__ import annotations

import dataclasses
import inspect

from generative_recommenders.train.config import SECTIONS, bounds
from generative_recommenders.train.datasets import FACTORIES, parameters


def options_table() -> str:
    """Sections and their options with default, range and meaning; data sets with their own options."""
    lines = []
    for name, section in SECTIONS.items():
        lines.append(f"{name}: {inspect.cleandoc(section.__doc__).splitlines()[0]}")
        for field in dataclasses.fields(section):
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
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
            lines.append(f"    {name}.{parameter.name}{'' if required else f' = {parameter.default!r}'}")
    return "\n".join(lines)
