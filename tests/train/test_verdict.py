"""The closing table says what it does not know, in words."""

import types

from generative_recommenders.train.run_folder import Result
from generative_recommenders.train.verdict import closing_figures


def test_a_figure_that_is_not_there_says_why():
    trainer = types.SimpleNamespace(
        evaluation={},
        progress=types.SimpleNamespace(step=3),
        meter=types.SimpleNamespace(decision="all (targets-only is off)", peak=None),
        reporter=types.SimpleNamespace(watch=types.SimpleNamespace(seconds=1.0)),
        world=types.SimpleNamespace(device=types.SimpleNamespace(type="cpu")),
    )
    shown = dict(closing_figures(Result(), trainer))
    assert shown["baseline AUC"] == "this data set has no baseline"
    assert shown["best reachable AUC"] == "only generated data tells it"
    assert shown["best AUC seen in this run"] == "no evaluation"
    one_class = dict(closing_figures(Result(auc={"listen_plus": 0.5}), trainer))
    assert one_class["best AUC seen in this run"] == "no evaluation with both classes"
    assert shown["rows the last layer computed"] == "all (targets-only is off)"
    known = dict(closing_figures(Result(baseline_auc=0.5, best_auc=0.9, auc_best_seen=0.75), trainer))
    assert [known[f"{name} AUC"] for name in ("baseline", "best reachable")] == ["0.5000", "0.9000"]
    assert known["best AUC seen in this run"] == "0.7500"
