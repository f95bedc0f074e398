"""A checkpoint's options against a run's."""

import pathlib

import pytest

from generative_recommenders.errors import UserError
from generative_recommenders.train.checkpoint_meta import check_places

FOLDER = pathlib.Path("runs/x/step_00000001")
META = {
    "config": {"model.tasks": ["listen_plus", "like"]},
    "data": {"tables": dict.fromkeys(["item_id", "shelf", "uid", "device"])},
}
FEATURES, TASKS = ("item_id", "shelf", "uid", "device"), ("listen_plus", "like")


@pytest.mark.parametrize(
    "features, tasks",
    [
        (FEATURES, TASKS),
        (FEATURES + ("user_x_shelf",), TASKS),
        (("item_id", "uid", "device"), TASKS),
        (FEATURES, TASKS[:1]),
        (FEATURES, (*TASKS, "skip")),
    ],
)
def test_weights_keep_their_places_where_things_are_added_or_left_out_at_the_end(features, tasks):
    check_places(FOLDER, META, features, tasks)


@pytest.mark.parametrize(
    "features, tasks, why",
    [
        (("item_id", "shelf", "device", "uid"), TASKS, "those of uid would be loaded for device"),
        (FEATURES, TASKS[::-1], "those of listen_plus would be loaded for like"),
        (FEATURES, ("like",), "those of listen_plus would be loaded for like"),
        (FEATURES, ("skip",), "those of listen_plus would be loaded for skip"),
    ],
)
def test_weights_that_go_by_an_order_are_not_loaded_into_another(features, tasks, why):
    with pytest.raises(UserError, match=f"stand in another order, .*{why}; give them in that order"):
        check_places(FOLDER, META, features, tasks)


def test_a_checkpoint_that_keeps_no_tables_says_nothing_of_features():
    check_places(FOLDER, {"config": META["config"]}, FEATURES[::-1], TASKS)
