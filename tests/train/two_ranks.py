"""Run by torchrun in test_ranks.py: what needs real processes and no training run. Prints one JSON object on rank 0."""

import json
import sys
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from generative_recommenders.errors import UserError  # noqa: E402
from generative_recommenders.train import distributed, metrics  # noqa: E402

world = distributed.join(torch.device("cpu"))
rank = world.rank


def auc(scores, labels):
    collector = metrics.BinaryMetrics()
    users = torch.arange(len(scores)) + 100 * rank
    collector.update(torch.tensor(scores), torch.tensor(labels, dtype=torch.float32), users)
    return collector.compute(world)


def refused(work):
    try:
        return world.agree(work)
    except UserError as exc:
        return str(exc)


def on_rank_1_alone():
    if rank == 1:
        raise UserError("of rank 1")
    return "done"


found = {
    "what stops one": refused(on_rank_1_alone),
    "what stops none": refused(lambda: "done"),
    "rank 0 good, rank 1 bad": auc(*[([0.9, 0.8], [1, 1]), ([0.1, 0.2], [0, 0])][rank]).auc,
    "ties": auc(*[([0.5, 0.5], [1, 0]), ([0.5, 0.5], [1, 0])][rank]).auc,
    "one class": auc(*[([0.5, 0.1], [1, 1]), ([0.5, 0.3], [1, 1])][rank]).one_class,
    "unequal counts": auc(*[([0.9, 0.8, 0.3], [1, 1, 0]), ([0.1], [0])][rank]).samples,
    "one rank empty": auc(*[([0.9, 0.3], [1, 0]), ([], [])][rank]).auc,
    "sum": world.sum_on_host(rank + 1, 5),
    "gather": world.gather(f"rank {rank}"),
}
everywhere = world.gather(found)
assert everywhere[0] == everywhere[1], everywhere
if world.is_main:
    print(json.dumps(found))
distributed.leave(world)
sys.exit(0)
