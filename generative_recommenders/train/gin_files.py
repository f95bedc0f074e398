"""Reading the configuration: gin files and ``--bind`` into the typed sections, with nothing ignored.

Precedence: ``--bind`` > environment > gin file > code. Unknown sections, options, macros and scopes stop the run with
the nearest valid name. The result prints as gin text and reloads from that text to the same values.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from generative_recommenders import settings
from generative_recommenders.errors import UserError
from generative_recommenders.options import OnResume, Option
from generative_recommenders.paths import user_path
from generative_recommenders.train import config as sections
from generative_recommenders.train.datasets import FACTORIES, check_options, data_option, missing_package, parameters
from generative_recommenders.train.spelling import nearest


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Every section, the options of the chosen data set, and where each value that is not a default came from."""

    train: sections.TrainConfig
    data: sections.DataConfig
    model: sections.ModelConfig
    optimizer: sections.OptimizerConfig
    sharding: sections.ShardingConfig
    checkpoint: sections.CheckpointConfig
    mlperf: sections.MlperfConfig
    dataset_options: Mapping[str, Any]
    sources: Mapping[str, str]

    def values(self) -> dict[str, object]:
        """Full option name → resolved value, sections in a fixed order."""
        found = {}
        for section in sections.SECTIONS:
            for field in dataclasses.fields(sections.SECTIONS[section]):
                found[f"{section}.{field.name}"] = getattr(getattr(self, section), field.name)
        found.update({f"{self.data.dataset}.{name}": value for name, value in self.dataset_options.items()})
        return found

    @property
    def target_auc(self) -> float:
        """Hold-out AUC the run must reach, 0 for none."""
        return self.mlperf.target_auc if self.mlperf.enabled else self.train.target_auc

    @property
    def stops_at_target(self) -> bool:
        """Whether training ends as soon as the target is reached."""
        return self.mlperf.enabled or self.train.stop_at_target

    def to_gin(self) -> str:
        """The resolved configuration as gin text; values that are not the code's defaults say where they came from."""
        lines = ["# Resolved configuration: every option of the run. Reloads to the same values."]
        for section, options in self._by_section().items():
            lines.append("")
            for option, value in options.items():
                name = f"{section}.{option}"
                note = f"  # {self.sources[name]}" if name in self.sources else ""
                lines.append(f"{name} = {value!r}{note}")
        return "\n".join(lines) + "\n"

    def _by_section(self) -> dict[str, dict[str, object]]:
        grouped: dict[str, dict[str, object]] = {}
        for name, value in self.values().items():
            section, option = name.split(".", 1)
            grouped.setdefault(section, {})[option] = value
        return grouped

    def defaults(self) -> dict[str, object]:
        """Full option name → the code's default, of every option that has one."""
        found = {}
        for section, cls in sections.SECTIONS.items():
            found.update({f"{section}.{name}": value for name, value in dataclasses.asdict(cls()).items()})
        own = {name: p.default for name, p in parameters(self.data.dataset).items()}
        names = {f"{self.data.dataset}.{n}": value for n, value in own.items() if value is not inspect.Parameter.empty}
        return found | names

    def options(self) -> dict[str, Option]:
        """Full option name → what is declared of it, in the order of ``values``."""
        own = {f"{self.data.dataset}.{name}": data_option(name) for name in self.dataset_options}
        return sections.section_options() | own

    def free_on_resume(self, data_compared: bool = True) -> frozenset[str]:
        """Options that may differ between a checkpoint and the run that resumes it.

        ``data_compared``: the content of the data is compared, so the place where it lies is free as well.
        """
        free = {OnResume.FREE, OnResume.ASKS} | ({OnResume.PLACE} if data_compared else set())
        return frozenset(name for name, option in self.options().items() if option.on_resume in free)


def load(files: Sequence[str], bindings: Sequence[str] = ()) -> RunConfig:
    """Read gin files, the environment and command-line bindings (``"section.option=value"``), in rising precedence.

    Raises:
        UserError: unreadable file, syntax, unknown or misspelt name, wrong type, value out of range.
    """
    for knob in settings.knobs():
        settings.get(knob)  # a malformed variable is said now, not when an op first reads it
    gin.clear_config()
    try:
        _register()
        sources: dict[str, str] = {}
        macros_used: set[str] = set()
        for path in files:
            path = str(user_path(path))
            if not os.path.isfile(path):
                raise UserError(f"configuration file {path}: no such file; give the path of a gin file (see configs/)")
            _parse(functools.partial(_parse_file, path), path)
            sources.update(dict.fromkeys(_bound_names(), "gin"))
            macros_used |= _macros_used()
        for name, knob in _environment_names().items():
            if knob in settings.knobs() and settings.is_set(knob):
                gin.bind_parameter(name, settings.get(knob))
                sources[name] = f"environment {knob}"
        for binding in bindings:
            text = _quote_bare_word(binding)
            before = set(_bound_names())
            _parse(functools.partial(gin.parse_config, [text]), f"--bind {binding!r}")
            named = text.split("=", 1)[0].strip()
            sources.update(dict.fromkeys((set(_bound_names()) - before) | {named}, "--bind"))
        _refuse_idle_bindings(macros_used | _macros_used())
        return _build(sources)
    finally:
        gin.clear_config()


_known_to_gin: set[str] = set()


def _register() -> None:
    """Tell gin of sections and data sets it does not know yet (its registry outlives ``clear_config``)."""
    for name, configurable in {**sections.SECTIONS, **FACTORIES}.items():
        if name not in _known_to_gin:
            gin.external_configurable(configurable, name=name, module="hstu")
            _known_to_gin.add(name)


def _environment_names() -> dict[str, str]:
    """Option name → knob, of the options that an environment variable can set."""
    return {
        name: option.variable.name for name, option in sections.section_options().items() if option.variable is not None
    }


def _bound_names() -> list[str]:
    """Names bound so far, as gin prints them (``train.seed``, ``scope/train.seed`` or a macro)."""
    return re.findall(r"^(\S+) = ", gin.config_str(), re.MULTILINE)


def option_names() -> list[str]:
    """Every name a binding may have; of the data sets' those of the chosen one first: others have no effect."""
    names = [f"{s}.{f.name}" for s, cls in sections.SECTIONS.items() for f in dataclasses.fields(cls)]
    try:
        chosen = gin.query_parameter("data.dataset")
    except ValueError:  # not bound
        chosen = sections.DataConfig().dataset
    for factory in sorted(FACTORIES, key=lambda name: name != chosen):
        names += [f"{factory}.{parameter}" for parameter in parameters(factory)]
    return names


def _parse_file(path: str) -> None:
    """``gin.parse_config_file`` for files in UTF-8, whatever encoding the environment prefers."""
    with open(path, encoding="utf-8") as file:
        gin.parse_config(file)


def _parse(read: Callable[[], object], where: str) -> None:
    """Run a gin parse; its errors become one line with the place and the nearest valid name."""
    try:
        read()
    except Exception as exc:  # gin raises what its tokenizer, Python's importer or the file system raised
        text = str(exc)
        place = re.search(r'In (?:file "([^"]+)", )?(?:bindings string )?(?:line|\(line) ?(\d+)', text)
        at = f"{where}, line {place.group(2)}" if place and not where.startswith("--bind") else where
        statement = text.strip().splitlines()[-1].strip()
        raise UserError(f"{at}: {_explain(text, statement)}") from None


def _explain(text: str, statement: str) -> str:
    bound = statement.split("=")[0].strip() if "=" in statement else ""
    unknown = re.search(r"No configurable matching '([^']+)'", text)
    if unknown:
        if absent := missing_package(unknown.group(1)):
            return absent
        name = bound if "." in bound else unknown.group(1)
        hint = nearest(name, option_names()) or nearest(unknown.group(1), [*sections.SECTIONS, *FACTORIES])
        return f"unknown name {name}{hint}"
    option = re.search(r"Configurable '([^']+)' doesn't have a parameter named '([^']+)'", text)
    if option:
        section = option.group(1).split(".")[-1]
        name = f"{section}.{option.group(2)}"
        options = ", ".join(n.split(".")[1] for n in option_names() if n.startswith(f"{section}."))
        return f"unknown option {name}{nearest(name, option_names()) or f'; {section} has {options}'}"
    first = text.strip().splitlines()[0]
    return f"not valid gin ({first}); write section.option = value, strings in quotes"


def _quote_bare_word(binding: str) -> str:
    """``train.mode=eval`` is read as ``train.mode="eval"``; anything that is a Python value or a reference stays."""
    name, equals, value = binding.partition("=")
    value = value.strip()
    if not equals or not name.strip() or not value:
        raise UserError(f"--bind {binding!r}: expected section.option=value")
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"[\w./~-]+", value):
            return f"{name.strip()} = {value!r}"
    return f"{name.strip()} = {value}"


def _macros_used() -> set[str]:
    return set(re.findall(r"%(\w+)", gin.config_str()))


def _refuse_idle_bindings(macros_used: set[str]) -> None:
    """A scoped binding or a macro that nothing refers to would be ignored in silence: most often a misspelt name.

    References to configurables are refused as well: resolving one would run it.
    """
    bound = [(*key, *option) for key, options in gin.config._CONFIG.items() for option in options.items()]
    for scope, selector, option, value in bound:
        name = f"{selector.removeprefix('hstu.')}.{option}"
        if not selector.startswith("hstu.") and not (selector == "gin.macro" and scope):
            raise UserError(f"binding {name}: not an option of a run; see --list-options")
        for reference in gin.config.iterate_references({option: value}):  # wherever it hides inside the value
            if not reference.scoped_selector.endswith("/gin.macro"):
                raise UserError(f"{name} = {reference}: references are not used here; write a value")
    for name in _bound_names():
        if "/" in name:
            raise UserError(f"binding {name}: scopes are not used here; write {name.split('/')[-1]}")
        if "." not in name and name not in macros_used:
            hint = nearest(name, [*macros_used, *option_names()])
            raise UserError(f"binding {name}: nothing refers to %{name}{hint}")


def _bindings(name: str) -> dict[str, object]:
    try:
        return gin.get_bindings(name)
    except (ValueError, TypeError) as exc:
        macro = re.search(r"'macro' .* in scope '(\w+)'", str(exc))
        what = f"%{macro.group(1)} is used but has no value" if macro else str(exc).splitlines()[0]
        raise UserError(f"section {name}: {what}") from None


def _build(sources: dict[str, str]) -> RunConfig:
    built: dict[str, Any] = {name: cls(**_bindings(name)) for name, cls in sections.SECTIONS.items()}
    chosen = built["data"].dataset
    if absent := missing_package(chosen):
        raise UserError(f"data.dataset = {chosen!r}: {absent}")
    if chosen not in FACTORIES:
        known = ", ".join(FACTORIES)
        raise UserError(f"data.dataset = {chosen!r}: not known{nearest(chosen, FACTORIES)}; data sets: {known}")
    for other in FACTORIES:
        for option in _bindings(other):
            if option not in parameters(other):  # gin lets anything through to a factory with **options
                raise UserError(f"unknown option {other}.{option}{nearest(f'{other}.{option}', option_names())}")
            if other != chosen and sources.get(f"{other}.{option}") == "--bind":
                raise UserError(f"--bind {other}.{option}: has no effect, data.dataset is {chosen!r}")
    options = {name: p.default for name, p in parameters(chosen).items()}
    options.update(check_options(chosen, _bindings(chosen)))
    missing = [name for name, value in options.items() if value is inspect.Parameter.empty]
    if missing:
        raise UserError(f"{chosen}.{missing[0]}: is not set; add --bind '{chosen}.{missing[0]}=\"...\"'")
    mode = built["train"].mode
    if built["mlperf"].enabled and mode in ("train", "eval"):
        raise UserError(f"mlperf.enabled = True: needs a train.mode that trains and evaluates, not {mode!r}")
    names = {f"{s}.{f.name}" for s, cls in sections.SECTIONS.items() for f in dataclasses.fields(cls)}
    names |= {f"{chosen}.{option}" for option in options}
    return RunConfig(**built, dataset_options=options, sources={n: s for n, s in sources.items() if n in names})
