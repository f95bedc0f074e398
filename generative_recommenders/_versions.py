"""The FBGEMM/torch pair: FBGEMM is built against one torch release, and a wrong pair fails with an undefined symbol.

The check reads package metadata only, so it costs nothing and also works where importing either would crash. A package
that was unpacked by hand has no metadata: its version is read from its files, or it is taken as it is.

What only loading can tell, a missing driver or libraries of different releases, ``why_not_loaded`` puts into one line.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import pathlib
import re
import sys
from collections.abc import Iterator

# FBGEMM release → the torch release it was built against.
PAIRS = {"1.5": "2.10", "1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14"}
FBGEMM_PACKAGES = ("fbgemm-gpu-cpu", "fbgemm-gpu", "fbgemm-gpu-nightly")


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unpacked_version(module: str) -> str | None:
    """The version of an importable package without metadata, ``""`` if its files do not say; ``None``: not importable.

    Nothing of the package is run.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        for name in ("docs/version.py", "version.py", "_version.py", "__init__.py"):
            file = pathlib.Path(folder, name)
            text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
            if said := re.search(r"""^__version__\b[^=\n]*=\s*["']([^"']+)["']""", text, re.MULTILINE):
                return said.group(1)
    return ""


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def pair_problem(torch: str | None, fbgemm: dict[str, str]) -> str | None:
    """Why this torch version and these installed FBGEMM packages (name → version) do not go together, or ``None``.

    Releases that the table does not know (an empty version is one) are left alone, unless the table knows another
    partner for the other half.
    """
    if torch is None:
        return "torch is not installed: pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0"
    wanted = next((f for f, t in PAIRS.items() if t == _release(torch)), None)
    if not fbgemm:
        return f"FBGEMM is not installed: pip install 'fbgemm-gpu-cpu=={wanted or '1.8'}.*' (GPU: fbgemm-gpu)"
    if len(fbgemm) > 1:
        both = " and ".join(f"{name} {version}" for name, version in fbgemm.items())
        return f"{both} overwrite each other: pip uninstall -y {' '.join(fbgemm)}, then install one of them"
    (name, version), *_ = fbgemm.items()
    if not version or not torch:
        return None
    built_for = PAIRS.get(_release(version))
    if built_for == _release(torch) or (built_for is None and wanted is None):
        return None
    if wanted is None:
        return f"{name} {version} was built for torch {built_for}, not {torch}: pip install 'torch=={built_for}.*'"
    return f"{name} {version} does not fit torch {torch}: pip install '{name}=={wanted}.*'"


def check_installed_pair() -> None:
    """Raise ``ImportError`` with the line to read; under ``python -m`` exit with that line instead."""
    found = {name: version for name in FBGEMM_PACKAGES if (version := installed_version(name)) is not None}
    if not found and (version := unpacked_version("fbgemm_gpu")) is not None:
        found = {"fbgemm-gpu": version}
    torch = installed_version("torch")
    problem = pair_problem(unpacked_version("torch") if torch is None else torch, found)
    if problem is None:
        return
    if sys.argv[:1] == ["-m"]:  # the interpreter is still locating a module to run: no caller to catch an exception
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(problem)


# Libraries that come with NVIDIA's driver, and no package brings.
DRIVER = ("libnvidia-ml.so", "libcuda.so")


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep what libraries log about their own loading off the terminal: the exception says it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def why_not_loaded(error: BaseException) -> str:
    """One line on why the trainer's libraries cannot be loaded: what is missing and what to do."""
    told: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        told.append(link)
        link = link.__cause__ or link.__context__
    texts = " ".join(str(each) for each in told)
    remedy = "install the requirements (scripts/env.sh does)"
    if found := re.search(r"(lib[^\s:/]+\.so[.\d]*): cannot open shared object file", texts):
        library = found.group(1)
        if not library.startswith(DRIVER):
            return f"{library} is missing, which {_versions()} need: {remedy}"
        return (
            f"{library} is missing: the libraries here are CUDA builds, which need NVIDIA's driver, and this machine "
            "has none. Train on a machine with a GPU (or with HSTU_ENV=cpu); --list-options and the data commands "
            "work without"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"package {error.name} is not installed: {remedy}"
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"{_versions()} cannot be loaded together ({text}): {remedy}"


def _versions() -> str:
    names = ("torch", "torchrec", "triton", *FBGEMM_PACKAGES)
    return ", ".join(f"{name} {version}" for name in names if (version := installed_version(name)) is not None)
