"""How an option is declared: once, as a field of a dataclass, with all that any room wants to know of it.

Commands that list options load this module, so it loads nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing

from generative_recommenders.errors import UserError

# Whole numbers of options stay below it, so that sums of a few fit 64 bits.
LARGEST = 2**62


class OnResume(enum.Enum):
    """Whether an option may differ between a checkpoint and the run that goes on from it."""

    FIXED = "no: it decides what the run computes"
    FREE = "yes: it decides how long, how loud or how fast"
    ASKS = "yes, and then it asks for something else than what the run has done"
    PLACE = "yes, where the content of the data is compared: it says where that lies"


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable that sets an option: it beats the gin file, and ``--bind`` beats both.

    Attributes:
        doc: what ``docs/knobs.md`` says of it.
        shows_default: whether unset it has the option's default, or none.
    """

    name: str
    doc: str
    shows_default: bool = True


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of an option beside its name, type and default, which its field has.

    Attributes:
        doc: its meaning in one line.
        low, high, multiple_of: bounds of a number. choices: the strings allowed.
        variable: the environment variable that sets it.
        on_resume: whether it may change when a run is resumed.
        changes_meaning: whether weights that fit mean something else under another value.
        ranks_may_differ: whether each rank may have a value of its own.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    multiple_of: int | None = None
    choices: tuple[str, ...] | None = None
    variable: Variable | None = None
    on_resume: OnResume = OnResume.FIXED
    changes_meaning: bool = False
    ranks_may_differ: bool = False

    @property
    def variable_name(self) -> str:
        """Name of the variable of an option that one sets."""
        assert self.variable is not None
        return self.variable.name

    @property
    def bounds(self) -> str:
        """Range or choices, for messages and the options listing; empty where there are none."""
        if self.choices is not None:
            return ", ".join(self.choices)
        if self.low is None and self.high is None:
            return ""
        multiple = f", a multiple of {self.multiple_of}" if self.multiple_of else ""
        return f"{'-inf' if self.low is None else self.low} to {'inf' if self.high is None else self.high}{multiple}"


def option(default: object, doc: str, **about: typing.Any) -> typing.Any:
    """A dataclass field that declares an option; ``about`` as in ``Option``."""
    metadata = {"option": Option(doc, **about)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def with_default(owner: typing.Any, name: str, default: object) -> typing.Any:
    """The option ``name`` of ``owner`` for a dataclass that inherits it and begins with another value."""
    inherited = owner.__dataclass_fields__[name]
    return dataclasses.field(default=default, metadata=inherited.metadata, kw_only=inherited.kw_only)


def declared(field: dataclasses.Field) -> Option:
    """What is declared of a field."""
    return field.metadata["option"]


def options_of(owner: type) -> dict[str, Option]:
    """The options that a dataclass declares, by name."""
    return {field.name: declared(field) for field in dataclasses.fields(owner) if "option" in field.metadata}


def convert(name: str, value: typing.Any, hint: object, about: Option) -> object:
    """The value in the field's type, or ``UserError`` naming the field, the value and what it may be."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(k for k in kinds if k is not type(None))
    kind = typing.get_origin(kind) or kind
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < LARGEST else math.inf
    if kind is tuple and type(value) is list:
        value = tuple(value)
    if type(value) is not kind:
        raise UserError(f"{name} = {value!r}: expected {_DESCRIBED[kind]}")
    low, high, choices = about.low, about.high, about.choices
    if choices is not None and value not in choices:
        raise UserError(f"{name} = {value!r}: expected one of {', '.join(choices)}")
    if kind in (int, float):
        if abs(value) >= LARGEST if kind is int else not math.isfinite(value):
            raise UserError(f"{name} = {value!r}: expected a finite number{' below 2**62' if kind is int else ''}")
        too_low, too_high = low is not None and value < low, high is not None and value > high
        if too_low or too_high or (about.multiple_of and value % about.multiple_of):
            raise UserError(f"{name} = {value!r}: expected a value in {about.bounds}")
    return value


_DESCRIBED = {
    int: "a whole number (digits only: 1000, not 1e3)",
    float: "a number",
    bool: "True or False",
    str: "a string in quotes",
    tuple: "a list in brackets",
    dict: "a dictionary in braces",
}
