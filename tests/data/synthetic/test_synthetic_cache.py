"""The cache of generated data: opened where it is complete, made anew where it no longer fits."""

import hashlib
import pathlib
import shutil
import subprocess
import sys

import numpy as np

from generative_recommenders.data.cache import MANIFEST, MARKER
from generative_recommenders.data.prepare.job import PREPARATION
from generative_recommenders.data.synthetic import synthetic_yambda

REPO = pathlib.Path(__file__).resolve().parents[3]


def test_generated_data_may_be_moved(tmp_path):
    sizes = {"users": 12, "items": 20, "days": 6, "events_median": 40.0, "events_mean": 50.0, "holdout_days": 1}
    before = synthetic_yambda(str(tmp_path / "here"), **sizes)
    shutil.move(tmp_path / "here", tmp_path / "there")
    after = synthetic_yambda(str(tmp_path / "there"), **sizes)
    assert np.array_equal(before.cache.item, after.cache.item)
    assert before.best_auc == after.best_auc


def test_a_cache_of_another_version_is_made_anew(tmp_path):
    sizes = {"users": 12, "items": 20, "days": 6, "events_median": 40.0, "events_mean": 50.0, "holdout_days": 1}
    before = synthetic_yambda(str(tmp_path), **sizes)
    manifest = before.cache.path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    (before.cache.path / MARKER).write_text(hashlib.sha256(manifest.read_bytes()).hexdigest() + "\n")
    preparation = before.cache.path / PREPARATION
    preparation.write_text(preparation.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    after = synthetic_yambda(str(tmp_path), **sizes)
    assert '"schema_version": 1' in manifest.read_text()
    assert before.best_auc == after.best_auc


def test_a_prepared_cache_opens_where_the_engine_of_preparation_is_not_installed(tmp_path):
    sizes = {"users": 12, "items": 20, "days": 6, "events_median": 40.0, "events_mean": 50.0, "holdout_days": 1}
    here = synthetic_yambda(str(tmp_path), **sizes)
    program = f"""
import sys
sys.modules["duckdb"] = None  # importing it raises ModuleNotFoundError
from generative_recommenders.data.synthetic import synthetic_yambda
print(synthetic_yambda({str(tmp_path)!r}, **{sizes!r}).best_auc)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == here.best_auc
