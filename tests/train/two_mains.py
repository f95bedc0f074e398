"""Run twice by test_meeting.py, as two ranks: ``main`` of several runs in turn. Prints status and stderr of each.

The only argument is JSON: a list of {"arguments": […], "environment": {…}}; ``null`` for a run that this rank sits out.
"""

import contextlib
import io
import json
import os
import pathlib
import runpy
import sys
import time

from generative_recommenders import settings

settings.share_cores_politely()
tiny = runpy.run_path(str(pathlib.Path(__file__).with_name("launch_tiny.py")))["tiny"]

from generative_recommenders.train import datasets  # noqa: E402
from generative_recommenders.train.__main__ import main  # noqa: E402

datasets.FACTORIES["tiny"] = tiny
found = []
for each in json.loads(sys.argv[1]):
    if each is None:
        found.append(None)
        continue
    before = dict(os.environ)
    os.environ.update(each["environment"])
    said, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(each["arguments"])
        except SystemExit as exc:
            status = exc.code
    found.append({"status": status, "error": said.getvalue(), "seconds": time.monotonic() - began})
    os.environ.clear()
    os.environ.update(before)
print(json.dumps(found))
