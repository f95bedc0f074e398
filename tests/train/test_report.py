"""The report's curves can be read: ticks of one form, labels that no line strikes through."""

import re

import pytest

from generative_recommenders.train.report import curve, page, tick_labels
from generative_recommenders.train.run_folder import Result


@pytest.mark.parametrize(
    "ticks, wanted",
    [
        ([0.09, 0.1, 0.11], ["0.09", "0.10", "0.11"]),
        ([0.0, 0.025, 0.05], ["0", "0.025", "0.050"]),
        ([0.0, 500.0, 1000.0, 1500.0], ["0", "0.5 k", "1.0 k", "1.5 k"]),
        ([0.0, 50_000.0, 100_000.0], ["0", "50 k", "100 k"]),
        ([0.0, 2.5e6, 5e6], ["0", "2.5 M", "5.0 M"]),
        ([-2.0, 0.0, 2.0], ["-2", "0", "2"]),
    ],
)
def test_ticks_have_one_unit_and_as_many_decimals(ticks, wanted):
    assert tick_labels(ticks) == wanted


def test_a_label_stands_before_the_lines_behind_it():
    svg = curve("AUC", [(0, 0.80), (10, 0.83)], {"best reachable": 0.8385})
    labels = re.findall(r'<text class="label"[^>]*>([^<]+)<', svg)
    assert labels == ["best reachable 0.8385"]
    assert svg.rindex("#e6e9ef") < svg.index('class="label"')  # gridlines are drawn first, the label covers them
    assert "svg .label { paint-order: stroke; stroke: #fff;" in page("x", Result(), [], [], "")


def test_the_outcome_is_the_closing_table_s():
    good, bad = Result(status="ok", reason=None), Result(reason="AUC 0.5 is below the target")
    assert '<p class="ok">ok</p>' in page("x", good, [], [], "")
    assert '<p class="failed">failed: AUC 0.5 is below the target</p>' in page("x", bad, [], [], "")
