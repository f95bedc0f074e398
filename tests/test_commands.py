"""Configurations load, links in the pages lead somewhere, and the documented commands do what the README says."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from generative_recommenders.train import gin_files

REPO = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = sorted(path.name for path in (REPO / "configs").glob("*.gin"))
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_loads_and_fits_a_screen(name):
    path = REPO / "configs" / name
    bindings = ["movielens_small.path=/somewhere"] if name == "movielens_small.gin" else []
    gin_files.load([str(path)], bindings)
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def train(tmp_path, *arguments):
    command = [str(REPO / "scripts" / "train.sh"), "--runs-dir", str(tmp_path), "--run-name", "x", *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "x" / "result.json").read_text())


@pytest.mark.slow
def test_the_default_job_comes_near_the_best_reachable_auc(tmp_path):
    result = train(tmp_path)
    assert result["status"] == "ok"
    assert result["best_auc"] - 0.02 <= result["auc"]["listen_plus"] <= result["best_auc"] + 0.005


@pytest.mark.slow
def test_movielens_beats_its_baseline(tmp_path):
    result = train(tmp_path, "--config", "configs/movielens_100k.gin")
    assert result["auc"]["listen_plus"] > result["baseline_auc"]


@pytest.mark.slow
def test_the_page_s_yambda_commands_work_on_generated_files(tmp_path):
    section = (REPO / "docs" / "data.md").read_text().split("## Yambda\n")[1].split("\n## ")[0]
    commands = re.findall(r"^    python -m (generative_recommenders\.data\.\S+ .*)$", section, re.MULTILINE)
    steps = {re.search(r"yambda (\w+)|synthetic", command).group(): command.split() for command in commands}
    assert list(steps) == ["yambda download", "yambda prepare", "yambda verify", "synthetic"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    for name in ("synthetic", "yambda prepare", "yambda verify"):
        command = [sys.executable, "-m", *steps[name]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    sizes = ["hstu_embedding_dim=16", "hstu_attn_qk_dim=8", "hstu_attn_linear_dim=8", "hstu_num_layers=1"]
    options = [f"model.{size}" for size in sizes] + ["train.max_steps=2", "train.batch_size=16", "train.mode=train"]
    options += [f"yambda.path={tmp_path}/data/yambda", "yambda.history_length=30"]
    result = train(tmp_path, "--config", "configs/yambda_50m.gin", *(w for o in options for w in ("--bind", o)))
    assert result["samples"] == 32
