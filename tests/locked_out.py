"""A process that can write nothing, also where tests run as root: for tests of read-only installations."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

REPO = pathlib.Path(__file__).resolve().parents[1]
CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


def read_only_package(folder):
    """A copy of the package in ``folder``, without caches, that nobody may write; returns what to put on the path."""
    shutil.copytree(
        REPO / "generative_recommenders",
        folder / "generative_recommenders",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & 0o555)
    return folder


def unlock(folder):
    """Let pytest remove the copy."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)


def run(package, *arguments, env=None, **more):
    """The interpreter with ``arguments``, held to permissions as a common user is, without a home to write to."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "TRITON_", "XDG_", "MPL"))}
    environment |= {"PYTHONPATH": str(package), "HOME": "/proc/no-home", "OMP_NUM_THREADS": "1", **(env or {})}
    more.setdefault("cwd", package)  # the interpreter looks there first
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        preexec_fn=_give_up_overriding_permissions,
        capture_output=True,
        text=True,
        timeout=300,
        **more,
    )


def _give_up_overriding_permissions():
    if os.geteuid() == 0:
        ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
