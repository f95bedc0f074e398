"""A generated cache that no longer fits is made anew: its folder is the generator's own."""

import shutil

import numpy as np

from generative_recommenders.data.synthetic import synthetic_yambda


def test_generated_data_that_was_moved_is_prepared_again(tmp_path):
    sizes = {"users": 12, "items": 20, "days": 6, "events_median": 40.0, "events_mean": 50.0, "holdout_days": 1}
    before = synthetic_yambda(str(tmp_path / "here"), **sizes)
    shutil.move(tmp_path / "here", tmp_path / "there")
    after = synthetic_yambda(str(tmp_path / "there"), **sizes)
    assert np.array_equal(before.cache.item, after.cache.item)
    assert before.best_auc == after.best_auc
