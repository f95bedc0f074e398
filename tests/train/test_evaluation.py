"""Evaluation of a whole model: sure predictions keep their figures, and what is no number is never ranked."""

import json
import re

import pytest
import torch

from generative_recommenders.modules.dlrm_hstu import DlrmHSTU
from generative_recommenders.train import build, datasets, gin_files
from generative_recommenders.train.__main__ import main
from generative_recommenders.train.evaluation import TrainingDiverged, evaluate
from generative_recommenders.train.loop import Trainer

TASKS = ("listen_plus", "skip")


@pytest.fixture
def scored(small_config, world):
    """A model with spread-out logits on the tiny data set, and its evaluation."""
    config = gin_files.load([small_config({"model.tasks": repr(TASKS)})], [])
    dataset = datasets.FACTORIES["tiny"]()
    model = DlrmHSTU(build.model_config(config.model, dataset), seed=3)
    return model, lambda: evaluate(model, dataset, TASKS, 16, world)


@pytest.mark.parametrize("shift", [25.0, -25.0, 90.0])
def test_a_constant_on_every_logit_moves_no_ranking(scored, shift):
    model, score = scored
    before = score()
    with torch.no_grad():
        model.head.heads[0][-1].bias += shift
    after = score()
    assert before["listen_plus"].auc != 0.5
    assert after["listen_plus"].auc == pytest.approx(before["listen_plus"].auc, abs=1e-5)
    assert after["listen_plus"].gauc == pytest.approx(before["listen_plus"].gauc, abs=1e-5)
    assert after["skip"] == before["skip"]
    # So sure of one answer, the model loses the shift on each sample of the other class (and logs no clipped 27.6).
    rate = after["listen_plus"].positive_rate
    entropy = -(rate * torch.tensor(rate).log() + (1 - rate) * torch.tensor(1 - rate).log()).item()
    lost = abs(shift) * ((1 - rate) if shift > 0 else rate)
    assert after["listen_plus"].ne * entropy == pytest.approx(lost, rel=0.1)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_logit_that_is_no_number_is_an_error_that_names_task_and_count(scored, bad):
    """The sigmoid of an infinite logit is a finite 1 or 0: only the logit tells."""
    model, score = scored
    with torch.no_grad():
        model.head.heads[1][-1].bias.fill_(bad)
    with pytest.raises(TrainingDiverged, match="^skip: 66 predictions .* not finite numbers: lower the learning rates"):
        score()


def test_an_evaluation_of_diverged_weights_says_so_in_one_line(small_config, tmp_path, monkeypatch, capfd):
    runs = ["--config", small_config(), "--runs-dir", str(tmp_path / "runs")]
    saved, real = ["--bind", "checkpoint.at_end=True", "--bind", "train.max_steps=2"], Trainer.save

    def spoilt(self):
        head = next(module for module in self.model.modules() if isinstance(module, DlrmHSTU)).head
        with torch.no_grad():
            head.heads[0][-1].bias.fill_(float("inf"))
        real(self)

    monkeypatch.setattr(Trainer, "save", spoilt)
    assert main([*runs, "--run-name", "trained", *saved]) == 0
    capfd.readouterr()
    load = ["--bind", "train.mode=eval", "--bind", f"checkpoint.load={tmp_path}/runs/trained"]
    assert main([*runs, "--run-name", "scored", *load]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert re.match("error: listen_plus: 66 predictions .* not finite numbers: the weights", error)
    result = json.loads((tmp_path / "runs" / "scored" / "result.json").read_text())
    assert result["status"] == "failed" and result["auc"] == {}
