"""Where checkpoints are, and what their ``meta.json`` says: read, checked and described without a single tensor."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Mapping

from torch import nn

from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU
from generative_recommenders.options import options_of
from generative_recommenders.paths import user_path
from generative_recommenders.shared_options import RankerOptions
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.progress import Progress

# 1: before checkpoints said what the rows of their tables stand for (``data``); read as well.
FORMAT = 2
FORMATS = (1, FORMAT)
# A second checkpoint at one step replaces the first, which is out of the way under this suffix for a moment.
REPLACED = ".replaced"
NAME = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")
SHOWN = 3  # options in a message


def newest(folder: pathlib.Path) -> pathlib.Path | None:
    """The complete checkpoint with the highest step in ``folder``, or ``None``."""
    found = [(int(m.group(1)), not m.group(2), p) for p in folder.glob("step_*") if (m := NAME.fullmatch(p.name))]
    return max(found)[2] if found else None


def resolve(path: str) -> pathlib.Path:
    """A checkpoint folder, or the newest one of a run folder. Raises ``UserError`` where there is none."""
    given = user_path(path)
    if (given / "meta.json").is_file():
        return given
    found = newest(given / "checkpoints") or newest(given)
    if found is None:
        raise UserError(f"{path}: holds no complete checkpoint; give a run folder or a folder step_<n>")
    return found


def read_meta(path: pathlib.Path) -> dict:
    """``meta.json``, with ``progress`` as a ``Progress``. ``UserError`` if it is damaged or of another version."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise UserError(f"{path}: checkpoint format {meta['format']}, this version reads {known}")
        wanted = ("config", "world_size", *["data"] * (meta["format"] == FORMAT))
        missing = [key for key in wanted if key not in meta]
        if missing:
            raise KeyError(missing[0])
        return {**meta, "progress": Progress(**meta["progress"])}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        reason = f"meta.json: {type(exc).__name__} {exc}"
        raise UserError(f"{path}: not a complete checkpoint ({reason}); remove it to use the one before") from None


def meaning(model: nn.Module) -> dict[str, object]:
    """The resolved options of a sharded model under which its weights mean something else, although they fit."""
    core = next(module for module in model.modules() if isinstance(module, DlrmHSTU))
    about = options_of(RankerOptions)
    return {name: getattr(core.config, name) for name, option in about.items() if option.changes_meaning}


def other_meaning(path: pathlib.Path, meta: Mapping, model: nn.Module) -> list[str]:
    """One line for each option under which the weights mean something else than where they were trained."""
    then = meta.get("meaning", {})
    return [
        f"{path}: was trained with model.{name} = {then[name]!r}, this run has {now!r}: they score otherwise"
        for name, now in meaning(model).items()
        if then.get(name, now) != now
    ]


def other_options(meta: Mapping, config: RunConfig) -> str:
    """The first options of the model that differ from the checkpoint's, as the end of a message."""
    then, now = meta["config"], plain(config.values())
    differ = [name for name in now if name.startswith("model.") and name in then and then[name] != now[name]]
    return "".join(f"; {name} = {then[name]!r} there and {now[name]!r} here" for name in differ[:SHOWN])


def check_places(path: pathlib.Path, meta: Mapping, features: Iterable[str], tasks: Iterable[str]) -> None:
    """``UserError`` where weights that go by an order would be loaded for something else than they were trained for.

    A contextual feature's projection, an attribute's columns and a task's head are known by their place alone, so
    tensors of another order have the same names and shapes.

    Args:
        features: the run's features with a table, in the model's order.
        tasks: the run's tasks, in theirs.
    """
    features, tasks = list(features), list(tasks)
    then = [*(meta.get("data") or {}).get("tables", features)]
    there = [name for name in then if name in features]
    here = [name for name in features if name in then]
    known = meta["config"].get("model.tasks", tasks)
    for what, one, other in (("features", there, here), ("model.tasks", known, tasks)):
        differ = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
        if differ:
            raise UserError(
                f"{path}: the {what} stand in another order, {', '.join(one)} there and {', '.join(other)} here, and "
                f"weights go by it: those of {differ[0][0]} would be loaded for {differ[0][1]}; give them in that order"
            )


def check_config(path: pathlib.Path, meta: Mapping, config: RunConfig) -> None:
    """``UserError`` unless a run of ``config`` goes on as the one that wrote the checkpoint would have.

    An option that the checkpoint does not know is younger than it, and had the effect of its default then.
    """
    now, then = plain(config.values()), plain(config.defaults()) | meta["config"]
    free = config.free_on_resume(data_compared="data" in meta)
    for name in sorted(set(now) | set(then)):
        if name not in free and now.get(name) != then.get(name):
            raise UserError(
                f"{path}: was written with {name} = {then.get(name)!r}, this run has {now.get(name)!r}; "
                "resume with the same configuration, or start from the weights alone with checkpoint.load"
            )
    if now["train.mode"] != "eval" and _streams(now) != _streams(then):
        raise UserError(
            f"{path}: was written with train.mode = {then['train.mode']!r}, which counts its way through the data "
            f"otherwise than {now['train.mode']!r}; resume with the same mode"
        )


def _streams(values: Mapping[str, object]) -> bool:
    """Whether a run counts its way window by window."""
    return values["train.mode"] == "streaming-train-eval" and not values["mlperf.enabled"]


def plain(values: Mapping[str, object]) -> dict:
    """Option values as JSON gives them back."""
    return json.loads(json.dumps(values, default=str))
