"""Environment knobs: every variable the package reads is declared here, typed, with range and default.

This module loads no library and is the only place that reads ``os.environ``. A variable that sets an option is declared
with it (``shared_options.py``). A knob that is unset or
empty-handed falls back to its default; a value that does not parse is an error that names the variable, the value and
what it may be. ``docs/knobs.md`` is generated from this registry.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from typing import Any

from generative_recommenders.errors import UserError
from generative_recommenders.options import declared
from generative_recommenders.shared_options import BACKEND_NAMES, HBM_CAP_GB, RankerOptions

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Knob:
    """One environment variable.

    ``kind`` is ``bool``, ``int``, ``float`` or ``str``; ``default`` is returned when the variable is unset (``None``
    means "not set, decide elsewhere"). ``low`` and ``high`` bound numbers, ``choices`` lists the strings allowed
    (compared without case). ``ranks_may_differ``: it differs from process to process, or says how loud one is.
    """

    name: str
    kind: type
    default: Any
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    ranks_may_differ: bool = False

    def parse(self, text: str) -> object:
        """Turn the variable's text into a value, or raise ``UserError``."""
        value = text.strip()
        if self.kind is bool:
            if value.lower() in _TRUE:
                return True
            if value.lower() in _FALSE:
                return False
            raise self._refuse(text, f"one of {', '.join(_TRUE + _FALSE)}")
        if self.kind in (int, float):
            return self._number(text, value)
        if self.choices is not None:
            for choice in self.choices:
                if choice.lower() == value.lower():
                    return choice
            raise self._refuse(text, f"one of {', '.join(self.choices)}")
        return value

    def _number(self, text: str, value: str) -> float | int:
        try:
            number = self.kind(value)
        except ValueError:
            what = "a whole number (digits only, no exponent)" if self.kind is int else "a number"
            raise self._refuse(text, what) from None
        too_low = self.low is not None and number < self.low
        too_high = self.high is not None and number > self.high
        if too_low or too_high or not math.isfinite(number):
            raise self._refuse(text, f"a value in {self.bounds()}")
        return number

    def bounds(self) -> str:
        """The allowed range or choices, as the documentation table prints it."""
        if self.choices is not None:
            return ", ".join(self.choices)
        if self.kind is bool:
            return "0 or 1"
        if self.low is None and self.high is None:
            return "any"
        low = "-inf" if self.low is None else f"{self.low:g}"
        high = "inf" if self.high is None else f"{self.high:g}"
        return f"{low} to {high}"

    def _refuse(self, text: str, want: str) -> UserError:
        return UserError(f"environment variable {self.name}={text!r}: expected {want}; correct it or unset it")


_REGISTRY: dict[str, Knob] = {}


def declare(knob: Knob) -> Knob:
    """Add a knob to the registry; two knobs of one name are a programming error."""
    if knob.name in _REGISTRY:
        raise RuntimeError(f"environment knob {knob.name} is declared twice")
    _REGISTRY[knob.name] = knob
    return knob


def knobs() -> dict[str, Knob]:
    """All declared knobs by name, in order of declaration."""
    return dict(_REGISTRY)


def is_set(name: str) -> bool:
    """Whether the environment sets this (declared) knob."""
    return _REGISTRY[name].name in os.environ


def get(name: str) -> Any:
    """The knob's value: from the environment, else its default.

    Raises ``KeyError`` for an undeclared name, ``UserError`` for a value that does not parse.
    """
    knob = _REGISTRY[name]
    text = os.environ.get(name)
    if text is None:
        return knob.default
    if text.strip() == "":
        raise UserError(f"environment variable {name} is set but empty: give it a value ({knob.bounds()}) or unset it")
    return knob.parse(text)


# Variables with the project's prefixes that its scripts and tests read, and what they mean.
_READ_ELSEWHERE = {
    "HSTU_ENV": "`cpu` or `gpu`: which requirements `.venv` is made from (default: those it has, else `cpu`).",
    "HSTU_PYTHON": "Interpreter that makes `.venv`, 3.11 or newer (default: the first found).",
    "HSTU_TEST_WORKERS": "Processes that `scripts/test.sh` runs tests in (default 2; 0: in one).",
    "HSTU_GOLDEN_DIR": "Golden files that the parity tests compare with; without them they are skipped.",
}


def strangers() -> list[str]:
    """A warning for each variable that begins like the project's and that nothing reads: most likely misspelt."""
    warnings = []
    for name in sorted(os.environ):
        if name.startswith(("HSTU_", "TRITON_HSTU_")) and name not in (*_REGISTRY, *_READ_ELSEWHERE):
            near = difflib.get_close_matches(name, (*_REGISTRY, *_READ_ELSEWHERE), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"environment variable {name}: has no effect, nothing reads it{hint}")
    return warnings


def outside(name: str) -> str | None:
    """A variable of another program (``TRITON_CACHE_DIR``), as text."""
    return os.environ.get(name)


def set_outside(name: str, value: str) -> None:
    """Set a variable that another program reads in this process, and those that it starts."""
    os.environ[name] = value


# Variables by which schedulers tell how many tasks they started, and which one this is; the first that is set counts.
_TASKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "SLURM_NTASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
}
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")


def lonely_task() -> str | None:
    """A warning where a scheduler started several tasks and each is about to do the whole run by itself.

    Given on the first task alone. These variables are others': what is not a number in them is passed over.
    """
    size, on_host = _number("WORLD_SIZE") or 1, _number("LOCAL_WORLD_SIZE")
    count = next((name for name in _TASKS if _number(name) is not None), None)
    nodes = next((name for name in _NODES if _number(name) is not None), None)
    if count is not None and size == 1 and (_number(count) or 0) > 1:
        if _number(_TASKS[count]):
            return None
        return (
            f"{count}={_number(count)}, but this process is a run of its own, and so is each of the others; start the "
            "ranks of one run with torchrun (docs/training.md, Several hosts), or a single task"
        )
    if nodes is not None and size == on_host and size > 1 and (_number(nodes) or 0) > 1:
        if _number("SLURM_NODEID") or _number("RANK"):
            return None
        return (
            f"{nodes}={_number(nodes)}, but the {size} ranks of this run are on one host; give torchrun --nnodes and "
            "--rdzv-endpoint (docs/training.md, Several hosts), or ask for one node"
        )
    return None


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def share_cores_politely() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the environment says otherwise; before torch is imported.

    Spinning threads of two processes on the same cores slow each other down several times over.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _of_option(field: dataclasses.Field) -> Knob:
    """The variable that sets an option, as the option declares it."""
    about = declared(field)
    assert about.variable is not None
    kind = str if field.default is None else type(field.default)
    default = field.default if about.variable.shows_default else None
    return Knob(about.variable.name, kind, default, about.variable.doc, about.low, about.high, about.choices)


_RANKER = {field.name: field for field in dataclasses.fields(RankerOptions)}

declare(_of_option(_RANKER["backend"]))
declare(Knob("HSTU_LMSD_BACKEND", str, None, "Backend of the LMSD op.", choices=BACKEND_NAMES))
declare(Knob("HSTU_ATTENTION_BACKEND", str, None, "Backend of the attention op.", choices=BACKEND_NAMES[:2]))
declare(Knob("HSTU_ENCODE_BACKEND", str, None, "Backend of what precedes the layers.", choices=BACKEND_NAMES[:2]))
declare(
    Knob(
        "HSTU_CANDIDATE_ATTENTION_BACKEND",
        str,
        None,
        "Backend of the targets-only layer's attention.",
        choices=BACKEND_NAMES[:2],
    )
)
for _name in _RANKER:
    if _name != "backend" and declared(_RANKER[_name]).variable is not None:
        declare(_of_option(_RANKER[_name]))
declare(
    Knob(
        "HSTU_TRACEBACK",
        bool,
        False,
        "Show the Python traceback of an error the trainer reports in one line.",
        ranks_may_differ=True,
    )
)
declare(_of_option(HBM_CAP_GB))
declare(
    Knob(
        "HSTU_JOIN_SECONDS",
        float,
        300.0,
        "Seconds that the processes of a run wait at its start for those that have not come; then all of them end.",
        low=0.1,
        high=86_400,
        ranks_may_differ=True,
    )
)
declare(
    Knob(
        "HSTU_STOP_SECONDS",
        float,
        120.0,
        "Seconds after SIGTERM or SIGINT in which all processes must have come between two steps; then each ends by "
        "itself, without a checkpoint.",
        low=0.1,
        high=86_400,
        ranks_may_differ=True,
    )
)
declare(Knob("RANK", int, None, "This process's number, set by torchrun.", low=0, ranks_may_differ=True))
declare(Knob("WORLD_SIZE", int, None, "Number of processes, set by torchrun.", low=1))
declare(
    Knob("LOCAL_RANK", int, None, "This process's number on its host, set by torchrun.", low=0, ranks_may_differ=True)
)
declare(
    Knob(
        "LOCAL_WORLD_SIZE",
        int,
        None,
        "Number of processes on this host, set by torchrun.",
        low=1,
        ranks_may_differ=True,
    )
)
declare(Knob("MASTER_ADDR", str, None, "Host of the processes' meeting point, set by torchrun.", ranks_may_differ=True))
declare(
    Knob(
        "MASTER_PORT",
        int,
        None,
        "Port of the processes' meeting point, set by torchrun.",
        low=0,
        high=65535,
        ranks_may_differ=True,
    )
)


def knob_page() -> str:
    """``docs/knobs.md``: every declared knob with type, default and range."""
    lines = [
        "# Environment variables",
        "",
        "Every variable the package reads, typed and checked when it is read; an empty or malformed value is an error",
        "that names the variable. Precedence: command line (`--bind`) > environment > gin file > code.",
        "",
        "Backends follow the same rule. An op takes the first of: the backend that its call names, its own variable",
        "(`HSTU_LMSD_BACKEND`), `HSTU_BACKEND`, the automatic choice. The trainer's `model.backend` is as strong as",
        "the place that names it: bound with `--bind`, every op call names it, so it wins over all variables; in a",
        "file it stands in for `HSTU_BACKEND`, so that both `HSTU_BACKEND` and an op's own variable win over it.",
        "",
        "This page is generated: `python -m generative_recommenders.settings > docs/knobs.md`.",
        "",
        "| variable | type | default | values | meaning |",
        "|---|---|---|---|---|",
    ]
    for knob in knobs().values():
        default = "not set" if knob.default is None else str(int(knob.default) if knob.kind is bool else knob.default)
        lines.append(f"| `{knob.name}` | {knob.kind.__name__} | {default} | {knob.bounds()} | {knob.doc} |")
    names = ", ".join(f"`{name}`" for name in [*_TASKS, *_NODES])
    lines += ["", f"To warn of tasks that are each a whole run, the trainer looks at {names}."]
    lines += ["", "The scripts and tests read these:", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in _READ_ELSEWHERE.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    from generative_recommenders.terminal import guarded, show

    raise SystemExit(guarded(lambda: show(knob_page())))
