"""The progress line: share, rate and time left, also while the engine has not delivered a row."""

import io
import re
import time

from generative_recommenders.data.prepare.progress import Progress


def test_line_has_share_rate_and_time_left():
    progress = Progress(io.StringIO())
    with progress.stage("sort", 1_000, done=200):
        assert progress.line().startswith("sort:  20 % of 1,000 events") and "left" not in progress.line()
        time.sleep(0.01)
        progress.advance(400)
        assert re.search(r"60 % of 1,000 events · 0:00 spent · .* M events/s · 0:00 left", progress.line())
        progress.follow(lambda: 50.0, 400)
        assert "80 %" in progress.line()
        progress.follow(lambda: -1.0, 400)
        assert "60 %" in progress.line()


def test_stream_gets_one_closing_line_per_stage_and_none_on_failure():
    stream = io.StringIO()
    progress = Progress(stream)
    with progress.stage("scan", 10):
        pass
    try:
        with progress.stage("sort", 10):
            raise ValueError
    except ValueError:
        pass
    assert stream.getvalue().splitlines()[0].startswith("scan: 100 % of 10 events")
    assert len(stream.getvalue().splitlines()) == 1


def test_silent_progress():
    progress = Progress(None)
    with progress.stage("scan", 0):
        progress.say("nothing")
    assert progress.line().startswith("scan: 100 %")
