"""Small rankers and batches: a batch is built from a list of samples, so that any subset or change of it is easy."""

import copy
import random

import pytest
import torch
from torchrec import KeyedJaggedTensor

from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig, candidate_name

ROWS = {"item_id": 50, "artist_id": 20, "album_id": 30, "uid": 15, "user_x_hour": 25}
ITEMS = ("item_id", "artist_id", "album_id")
CONTEXT = ("uid", "user_x_hour")


def _sample(history, candidates, rng):
    def event():
        return {name: rng.randrange(ROWS[name]) for name in ITEMS}

    times = sorted(1_700_000_000 + rng.randrange(10**6) for _ in range(history))
    return {
        "context": {name: rng.randrange(ROWS[name]) for name in CONTEXT},
        "history": [
            {**event(), "action_weight": rng.choice([0, 1, 2, 4, 3]), "action_timestamp": time} for time in times
        ],
        "candidates": [
            {
                **{candidate_name(name): value for name, value in event().items()},
                "item_query_time": 1_701_000_123,
                "item_action_weight": rng.choice([1, 4]),
                "item_watch_time": rng.randrange(100),
            }
            for _ in range(candidates)
        ],
    }


def _kjt(keys, per_sample):
    """``per_sample``: per sample, a list of rows {key: value}."""
    values = [row[key] for key in keys for rows in per_sample for row in rows]
    lengths = [len(rows) for _ in keys for rows in per_sample]
    return KeyedJaggedTensor(
        list(keys),
        torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=len(per_sample),
    )


class Toy:
    """Builds samples, batches and models over the same small features."""

    item_features = ITEMS
    contextual_features = CONTEXT
    table_rows = ROWS

    def samples(self, histories, candidates=None, seed=0):
        """One sample per history length; candidates per sample default to 1."""
        rng = random.Random(seed)
        counts = candidates or [1] * len(histories)
        return [_sample(h, c, rng) for h, c in zip(histories, counts, strict=True)]

    def batch(self, samples, items=ITEMS, context=CONTEXT, labels=True):
        """Samples → (uih, candidates)."""
        per_event = (*items, "action_weight", "action_timestamp")
        history = _kjt(per_event, [s["history"] for s in samples])
        parts = [history]
        if context:
            parts.insert(0, _kjt(context, [[s["context"]] for s in samples]))
        uih = KeyedJaggedTensor(
            [key for part in parts for key in part.keys()],
            torch.cat([part.values() for part in parts]),
            lengths=torch.cat([part.lengths() for part in parts]),
            stride=len(samples),
        )
        keys = [candidate_name(name) for name in items] + ["item_query_time"]
        keys += ["item_action_weight", "item_watch_time"] if labels else []
        return uih, _kjt(keys, [s["candidates"] for s in samples])

    def config(self, **changes):
        """A small ranker without dropout."""
        sizes = dict(
            table_rows=ROWS,
            contextual_feature_names=CONTEXT,
            max_seq_len=40,
            hstu_embedding_dim=16,
            hstu_num_heads=2,
            hstu_attn_qk_dim=8,
            hstu_attn_linear_dim=8,
            hstu_num_layers=2,
            preprocessor_hidden_dim=12,
            item_tower_hidden_dim=24,
            head_hidden_dim=24,
            num_position_buckets=64,
            num_time_buckets=256,
            input_dropout_ratio=0.0,
            output_dropout_ratio=0.0,
            backend="PYTORCH",
        )
        return DlrmHSTUConfig(**(sizes | changes))

    def model(self, seed=0, **changes):
        """Every parameter moved away from its first value, so that no zero bias hides a fault."""
        model = DlrmHSTU(self.config(**changes), seed=seed)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.2)
        return model

    def changed(self, samples, change):
        """A deep copy of the samples after ``change(copy)``."""
        samples = copy.deepcopy(samples)
        change(samples)
        return samples


@pytest.fixture(scope="session")
def toy():
    return Toy()
