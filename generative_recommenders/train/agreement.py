"""What all ranks of a run must have in common, and the line that names what they do not.

Ranks that were started with other settings would train on without a word, or wait for each other for ever. So each says
what it was started with before any work is done (``statement``), and what its data set turned out to be
(``data_statement``); ``difference`` finds what is not alike.
"""

from __future__ import annotations

import hashlib
import itertools
import pathlib
from collections.abc import Mapping, Sequence

import generative_recommenders
from generative_recommenders import settings
from generative_recommenders._versions import FBGEMM_PACKAGES, installed_version, unpacked_version
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.errors import UserError
from generative_recommenders.train.checkpoint_meta import resolve
from generative_recommenders.train.gin_files import RunConfig

LIBRARIES = ("torch", "torchrec", "triton", *FBGEMM_PACKAGES)

#: Name → value as text.
Statement = Mapping[str, str]


def statement(config: RunConfig, arguments: Mapping[str, object], device_type: str) -> dict[str, str]:
    """What this rank was started with: resolved options, command line, variables, libraries and code."""
    about = config.options()
    said = {name: repr(value) for name, value in config.values().items() if not about[name].ranks_may_differ}
    said["checkpoint.load"] = _weights(config.checkpoint.load)
    said |= {name: repr(value) for name, value in arguments.items()}
    said["--device"] = device_type
    of_options = {option.variable.name for option in about.values() if option.variable}
    for name, knob in sorted(settings.knobs().items()):
        if name in of_options or knob.ranks_may_differ:
            continue
        said[f"environment variable {name}"] = repr(settings.get(name))
    for name in LIBRARIES:
        version = installed_version(name) or unpacked_version(name.replace("-", "_"))
        if version is not None:
            said[f"version of {name}"] = version
    said["code of generative_recommenders"] = code_digest()
    return said


def code_digest() -> str:
    """Version of the package and a hash of its source files: names and bytes, wherever it lies."""
    root = pathlib.Path(generative_recommenders.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return f"{generative_recommenders.__version__} ({digest.hexdigest()[:12]})"


def _weights(path: str) -> str:
    """The path of a checkpoint with a hash of what describes it, so that copies in other places count as alike."""
    if not path:
        return repr(path)
    try:
        folder = resolve(path)
        described = b"".join((folder / name).read_bytes() for name in ("meta.json", ".metadata"))
    except (UserError, OSError):
        return repr(path)  # loading it says what is wrong
    return f"a checkpoint {folder.name} ({hashlib.sha256(described).hexdigest()[:12]})"


def data_statement(dataset: RankingDataset) -> dict[str, str]:
    """What this rank's data set is: its content, its samples and its tables."""
    counts = [window.num_samples for window in dataset.windows]
    said = {
        f"number of events of data set {dataset.name}": str(dataset.cache.num_events),
        f"samples of its windows ({dataset.name})": f"{sum(counts)} in {len(counts)} windows",
        f"samples of its hold-out ({dataset.name})": str(dataset.holdout.num_samples),
        f"table rows ({dataset.name})": str(dict(dataset.schema.table_rows)),
    }
    return {f"content of data set {dataset.name}": dataset.identity.content, **said}


def difference(statements: Sequence[Statement], most: int = 3) -> str | None:
    """The first ``most`` names that ranks say different values of, with the values and their ranks; or ``None``."""
    found = []
    for name in dict.fromkeys(itertools.chain.from_iterable(statements)):
        values: dict[str, list[int]] = {}
        for rank, said in enumerate(statements):
            values.setdefault(said.get(name, "unknown"), []).append(rank)
        if len(values) > 1:
            found.append(f"{name} = " + ", ".join(f"{_cut(v)} on {ranks_in_words(r)}" for v, r in values.items()))
    if not found:
        return None
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    runs = []
    for _, group in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in group]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs)}"


def _cut(text: str, longest: int = 120) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"
