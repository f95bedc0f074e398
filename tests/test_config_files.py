"""The configurations of the repository: each loads, fits a screen, and the MovieLens ones reach what they promise."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import pytest

from generative_recommenders.train import gin_files

REPO = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((REPO / "configs").glob("*.gin"))
SMALL = pathlib.Path(os.environ.get("MOVIELENS_SMALL", REPO.parent / "shared" / "data" / "ml-latest-small"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_configuration_loads_and_fits_a_screen(path):
    config = gin_files.load([str(path)])
    assert config.data.dataset.split("_")[0] in path.stem
    assert len(path.read_text().splitlines()) <= 60


def test_yambda_5b_is_the_public_benchmark():
    config = gin_files.load([str(REPO / "configs" / "yambda_5b.gin")])
    model, options = config.model, config.dataset_options
    sizes = (model.hstu_embedding_dim, model.hstu_num_heads, model.hstu_attn_qk_dim, model.hstu_attn_linear_dim)
    assert sizes == (512, 4, 128, 128) and model.hstu_num_layers == 3 and model.max_seq_len == 4096
    assert model.attn_norm == "batch_max"
    assert (options["history_length"], options["min_history"]) == (4086, 4086)
    assert options["history_strategy"] == "interleaved"


@pytest.mark.slow
@pytest.mark.parametrize(("which", "reach"), [("100k", 0.755), ("small", 0.845)])
def test_movielens_beats_the_baseline(which, reach, tmp_path):
    """``reach`` leaves room for the spread between seeds; benchmarks/movielens.py measures it."""
    command = [sys.executable, "-m", "generative_recommenders.train", "--config", f"configs/movielens_{which}.gin"]
    if which == "small":
        if not SMALL.is_dir():
            pytest.skip(f"ml-latest-small: {SMALL} is absent, set MOVIELENS_SMALL")
        command += ["--bind", f'movielens_small.path="{SMALL.resolve()}"']
    else:
        try:
            importlib.metadata.distribution("recbole")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("MovieLens-100K: the recbole wheel is not installed")
    command += ["--runs-dir", str(tmp_path), "--run-name", "run"]
    out = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["auc"]["listen_plus"] > max(reach, result["baseline_auc"])
