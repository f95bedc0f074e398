"""The data sets a configuration can name, and the options each of them takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping

from generative_recommenders.train.config import convert

_KNOWN = {
    "synthetic_yambda": "generative_recommenders.data.synthetic",
    "movielens_100k": "generative_recommenders.data.movielens",
    "movielens_small": "generative_recommenders.data.movielens",
    "yambda": "generative_recommenders.data.yambda",
    "events": "generative_recommenders.data.events",
}

# Factories that hand their ``**options`` to another function of their module.
_OPTIONS_OF = {"movielens_100k": "movielens_dataset", "movielens_small": "movielens_dataset"}


# Name → the package that this data set needs and that is not installed.
MISSING_PACKAGES: dict[str, str] = {}


def _find() -> dict[str, Callable]:
    found = {}
    for name, module in _KNOWN.items():
        try:
            found[name] = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as exc:
            MISSING_PACKAGES[name] = exc.name or str(exc)
    return found


# Name → function from keyword options to a ``RankingDataset``; data sets whose packages are missing are left out.
FACTORIES: dict[str, Callable] = _find()


def missing_package(name: str) -> str | None:
    """Why a data set that exists cannot be had here, or ``None``."""
    package = MISSING_PACKAGES.get(name)
    if package is None:
        return None
    return f"data set {name} needs the package {package}, which is not installed; install it (scripts/env.sh does)"


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The options of a data set, by name."""
    factory = FACTORIES[name]
    own = dict(inspect.signature(factory).parameters)
    if name in _OPTIONS_OF:
        target = getattr(inspect.getmodule(factory), _OPTIONS_OF[name])
        rest = inspect.signature(target).parameters
        own = {k: p for k, p in own.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        own.update({k: p for k, p in rest.items() if p.kind is inspect.Parameter.KEYWORD_ONLY})
    return own


_PLAIN = {"int": int, "float": float, "str": str, "bool": bool}


def check_options(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options with whole numbers made floats where those are wanted; ranges are the factory's to check.

    Raises:
        UserError: a value is not of the type that the factory's signature names.
    """
    checked = {}
    for option, value in options.items():
        annotation = parameters(name)[option].annotation
        wanted = [part.strip() for part in getattr(annotation, "__name__", str(annotation)).split("|")]
        kinds = [_PLAIN[part] for part in wanted if part in _PLAIN]
        checked[option] = value
        if not kinds or (value is None and "None" in wanted):
            continue
        checked[option] = convert(f"{name}.{option}", value, kinds[0], {"low": None, "high": None, "choices": None})
    return checked
