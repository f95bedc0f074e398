"""What a kernel compiled ahead of time takes of a GPU."""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile

import triton


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and stack bytes (spills) of a compiled kernel."""
    tool = next(pathlib.Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return int(found[1]), int(found[2])
