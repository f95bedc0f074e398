"""The data sets a configuration can name, and the options each of them takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping

from generative_recommenders.options import OnResume, Option, convert

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


# What the data sets' options are, by name; a data set has their defaults in its signature and checks their ranges.
DATA_OPTIONS: dict[str, Option] = {
    "path": Option("folder of the files", on_resume=OnResume.PLACE, ranks_may_differ=True),
    "size": Option("50m, 500m or 5b"),
    "cache": Option("folder of the prepared cache", on_resume=OnResume.PLACE, ranks_may_differ=True),
    "users": Option("generated users"),
    "items": Option("generated items"),
    "days": Option("generated days"),
    "events_median": Option("events of the median user"),
    "events_mean": Option("events of the mean user"),
    "seed": Option("of the generator"),
    "min_history": Option("strictly earlier events of its user that an event needs to become a sample"),
    "history_length": Option("events of a history at most"),
    "history_strategy": Option("last_n: the newest; interleaved: a third from each kind of outcome"),
    "history_ties": Option("exclude: only events strictly before the sample; order: the public benchmark's rule"),
    "scan_limit": Option("newest events before the sample that any history_strategy looks through"),
    "holdout_fraction": Option("share of the samples, the newest, that are the hold-out"),
    "holdout_days": Option("days at the end that are the hold-out"),
    "train_days": Option("days before the hold-out that train"),
    "gap_seconds": Option("time before the hold-out that belongs to neither"),
    "window_days": Option("days of a training window"),
    "window_seconds": Option("seconds of a training window"),
    "item_features": Option("of history rows and candidate: the id and its attributes"),
    "contextual_features": Option("one value per sample: uid, context columns, crosses such as user_x_artist"),
    "table_rows": Option("feature → rows of its table, where not the vocabulary's"),
    "table_rows_limit": Option("rows of a cross's table at most; ids are hashed down to it"),
    "num_workers": Option("threads that build batches ahead", on_resume=OnResume.FREE, ranks_may_differ=True),
}


def data_option(name: str) -> Option:
    """What is declared of an option of a data set; nothing where the data set was registered from outside."""
    return DATA_OPTIONS.get(name, Option(""))


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
        checked[option] = convert(f"{name}.{option}", value, kinds[0], data_option(option))
    return checked
