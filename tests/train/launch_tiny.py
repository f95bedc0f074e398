"""The trainer with a data set small enough for tests: ``python launch_tiny.py --config …``, also under torchrun.

The label follows the user's and the item's parity, so that a tiny model learns something in a few steps.
"""

import os
import signal
import sys

import numpy as np

from generative_recommenders import settings

settings.share_cores_politely()


def tiny(
    users: int = 12,
    events: int = 24,
    seed: int = 0,
    history_length: int = 8,
    one_class: bool = False,
    days: int = 4,
    genres: bool = True,
    shift: int = 0,
    item_rows: int = 0,
    path: str = "here",
):
    """A data set of ``users`` × ``events`` events over ``days`` days, a day a window; ``genres``: items have one.

    ``shift`` is added to the items' raw ids 0 … 15, ``item_rows`` are the rows of their table (0: as many as needed);
    ``path`` is where the data would lie.
    """
    from generative_recommenders.data.cache import cache_from_events
    from generative_recommenders.data.dataset import RankingDataset
    from generative_recommenders.data.reader import HistoryOptions
    from generative_recommenders.data.schema import FeatureSchema
    from generative_recommenders.data.windows import DAY, split_last_fraction

    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(users), events)
    item = rng.integers(0, 16, users * events)
    time = np.sort(rng.integers(0, days * DAY, (users, events)), axis=1).ravel() + DAY
    like = (user + item) % 2 if not one_class else np.ones_like(user)
    noise = rng.random(users * events) < 0.1
    bits = np.where((like == 1) ^ (noise & (not one_class)), 1, 4)
    genre = {i + shift: i % 4 for i in range(16)}
    cache = cache_from_events(user, item + shift, time, bits, min_history=2, attributes={"genre": genre})
    rows = {"item_id": item_rows or cache.vocab["item_id"], "genre": cache.vocab["genre"], "uid": users + 1}
    schema = FeatureSchema(("item_id", "genre") if genres else ("item_id",), ("uid",), rows)
    split = split_last_fraction(cache, 0.25)
    return RankingDataset(
        "tiny", cache, schema, split, HistoryOptions(history_length, "last_n"), best_auc=0.9, baseline_auc=0.5
    )


SMALL = {
    "data.dataset": "'tiny'",
    "train.batch_size": "16",
    "train.log_every": "2",
    "model.hstu_embedding_dim": "16",
    "model.hstu_num_layers": "2",
    "model.hstu_num_heads": "2",
    "model.hstu_attn_qk_dim": "8",
    "model.hstu_attn_linear_dim": "8",
    "model.preprocessor_hidden_dim": "8",
    "model.item_tower_hidden_dim": "8",
    "model.head_hidden_dim": "8",
    "model.num_position_buckets": "16",
    "model.num_time_buckets": "16",
    "model.autocast": "'float32'",
    "model.backend": "'PYTORCH'",  # not Triton's interpreter, which the tests' environment switches on
}


def small_gin(**more: str) -> str:
    """Gin text of a small run on the tiny data set."""
    return "".join(f"{name} = {value}\n" for name, value in {**SMALL, **more}.items())


def kill_at(step: int) -> None:
    """End the process as a power cut would when that many steps are done."""
    from generative_recommenders.train.loop import Trainer

    real = Trainer.step

    def dying(self, batch):
        real(self, batch)
        if self.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer.step = dying


if __name__ == "__main__":
    from generative_recommenders.train import datasets
    from generative_recommenders.train.__main__ import main

    datasets.FACTORIES["tiny"] = tiny
    if "TINY_KILL_AT_STEP" in os.environ:
        kill_at(int(os.environ["TINY_KILL_AT_STEP"]))
    sys.exit(main())
