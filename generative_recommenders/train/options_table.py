"""The list of every option a configuration can set, as the command line prints it."""

from __future__ import annotations

import dataclasses
import inspect

from generative_recommenders.options import declared
from generative_recommenders.train.config import SECTIONS
from generative_recommenders.train.datasets import FACTORIES, data_option, parameters


def options_table() -> str:
    """Sections and their options with default, range and meaning; data sets with their own options."""
    lines = []
    for name, section in SECTIONS.items():
        lines.append(f"{name}: {(inspect.getdoc(section) or '').splitlines()[0]}")
        for field in dataclasses.fields(section):
            default = getattr(section(), field.name)
            about = declared(field)
            allowed = f" ({about.bounds})" if about.bounds else ""
            knob = f" [environment: {about.variable.name}]" if about.variable else ""
            lines.append(f"  {name}.{field.name} = {default!r}{allowed}: {about.doc}{knob}")
        lines.append("")
    lines.append("data sets (data.dataset) and their options:")
    for name, factory in FACTORIES.items():
        lines.append(f"  {name}: {(inspect.getdoc(factory) or '').splitlines()[0]}")
        for parameter in parameters(name).values():
            required = parameter.default is inspect.Parameter.empty
            default = " (required)" if required else f" = {parameter.default!r}"
            lines.append(f"    {name}.{parameter.name}{default}: {data_option(parameter.name).doc}".rstrip(": "))
    return "\n".join(lines)
