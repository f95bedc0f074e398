"""One whole training step of the three-layer ranker at the public benchmark's sizes, on one GPU.

    python benchmarks/train_step.py [--batch 1024] [--rows 2663] [--returning 0 0.6] [--steps 8] [--profile]

The step is the trainer's own: sharded tables with the fused row-wise Adagrad (fp32), towers, three STU layers under
bf16, loss, backward, clipping and Adam. Item, artist and album tables have the benchmark's rows; the crosses, of which
a step looks up a few thousand rows, are capped at ``--table-rows`` so that they fit one GPU.

Every step gets a batch it has not seen, already on the device. Its items are drawn without replacement from the whole
vocabulary, artists and albums follow from the item by a fixed map, labels are random: nothing can be learnt by heart,
and the loss stays above 0.2 · ln 2 = 0.139. ``--returning`` is the share of history rows that return to another item of
the same batch (Yambda's listeners do; 0: all distinct). Each variant (targets-only last layer on or off, recomputation
on or off) gives one record per share, with its peak memory.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch
from torchrec import KeyedJaggedTensor

from benchmarks.common import device_name, record, require_gpu, write_records
from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig
from generative_recommenders.modules.table_init import fill_table_rows_
from generative_recommenders.ops.candidate_attention import TargetSummary
from generative_recommenders.train import distributed, sharding
from generative_recommenders.train.config import OptimizerConfig, ShardingConfig
from generative_recommenders.train.optimizers import Optimizers, fuse_sparse_optimizer

ITEM_TABLES = {"item_id": 9_390_624, "artist_id": 1_293_395, "album_id": 3_367_692}
CONTEXT_TABLES = {
    "uid": 1_000_001,
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_is_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000,
}
# Variant → options of the model's configuration. The last layer for candidate rows only is what the trainer runs.
VARIANTS = {
    "targets_only": {"last_layer_targets_only": True},
    "targets_only norecompute": {
        "last_layer_targets_only": True,
        "recompute_last_layer": True,
        "recompute_normed_x": False,
        "recompute_uvqk": False,
        "recompute_y": False,
    },
    "full": {"last_layer_targets_only": False},
}


class FreshBatches:
    """Batches of ``batch`` samples of ``rows`` joined rows (8 contextual, the history, 1 candidate), each new.

    ``returning`` of the history's rows take an item of the other rows of the batch; the others, and the candidates,
    have items of their own.
    """

    def __init__(
        self, batch: int, rows: int, table_rows: dict[str, int], returning: float, device: str = "cuda"
    ) -> None:
        self.batch, self.history = batch, rows - len(CONTEXT_TABLES) - 1
        self.table_rows, self.returning, self.device = table_rows, returning, device
        self.random = torch.Generator(device).manual_seed(0)
        items = table_rows["item_id"]
        self.attributes = {name: self._ids(name, items) for name in ITEM_TABLES if name != "item_id"}
        self.order = torch.empty(0, dtype=torch.int64, device=self.device)

    def _draw(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.random)

    def _ids(self, name: str, count: int) -> torch.Tensor:
        return self._draw(self.table_rows[name], count, low=1)

    def _distinct_items(self, count: int) -> torch.Tensor:
        """``count`` items, none twice until the whole vocabulary has been drawn."""
        if self.order.numel() < count:
            self.order = 1 + torch.randperm(self.table_rows["item_id"] - 1, device=self.device, generator=self.random)
        taken, self.order = self.order[:count], self.order[count:]
        return taken

    def _items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 items of the history's rows and of the candidates."""
        rows = self.batch * self.history
        returning = round(rows * self.returning)
        distinct = self._distinct_items(rows - returning + self.batch)
        candidates, own = distinct[: self.batch], distinct[self.batch :]
        history = torch.cat([own, own[self._draw(own.numel(), returning)]])
        return history[torch.randperm(rows, device=self.device, generator=self.random)], candidates

    def __call__(self) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """The next batch's histories and candidates."""
        items, candidate_items = self._items()
        query = self._draw(2 * 10**7, self.batch, 1, low=10**7)
        ages = self._draw(10**6, self.batch, self.history).sort(dim=1, descending=True).values
        values = [self._ids(name, self.batch) for name in CONTEXT_TABLES]
        values += [items, *(table[items] for table in self.attributes.values())]
        values += [2 ** self._draw(3, items.numel()), (query - ages).flatten()]
        names = ["item_candidate_id", *(f"item_candidate_{name}" for name in self.attributes)]
        chosen = [candidate_items, *(table[candidate_items] for table in self.attributes.values())]
        chosen += [query.flatten(), 1 + 3 * self._draw(2, self.batch)]
        return (
            self._keyed([*CONTEXT_TABLES, *ITEM_TABLES, "action_weight", "action_timestamp"], values),
            self._keyed([*names, "item_query_time", "item_action_weight"], chosen),
        )

    def _keyed(self, keys: list[str], values: list[torch.Tensor]) -> KeyedJaggedTensor:
        """Every sample has the same number of values of a key; the host knows how many, as in the trainer."""
        per_key = [value.numel() for value in values]
        lengths = torch.cat([torch.full((self.batch,), count // self.batch, dtype=torch.int32) for count in per_key])
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat(values),
            lengths=lengths.to(self.device),
            stride=self.batch,
            length_per_key=per_key,
        )


class Step:
    """A model with its optimizers, and one training step of it."""

    def __init__(self, options: dict, table_rows: dict[str, int], world: distributed.World) -> None:
        config = DlrmHSTUConfig(
            table_rows=table_rows, contextual_feature_names=tuple(CONTEXT_TABLES), attn_norm="batch_max", **options
        )
        model = DlrmHSTU(config, device="cuda", embedding_device="meta", seed=1)
        settings = OptimizerConfig()
        fuse_sparse_optimizer(sharding.table_parameters(model), settings)

        def init(table: str, shard: torch.Tensor, row: int, column: int) -> None:
            fill_table_rows_(shard, 1, table, table_rows[table], config.table_dim, row, column)

        self.model = sharding.shard(model, ShardingConfig(), world, init)
        self.optimizers = Optimizers(self.model, settings)
        self.number = 0

    def __call__(self, uih: KeyedJaggedTensor, candidates: KeyedJaggedTensor, max_seq_len: int) -> torch.Tensor:
        self.optimizers.start_step(self.number)
        counts = TargetSummary(candidates.stride(), candidates.stride(), 1, 1)  # as the trainer knows them on the host
        output = self.model(uih, candidates, max_seq_len, counts)
        output.loss.backward()
        self.optimizers.finish_step()
        self.number += 1
        return output.loss.detach()


def measure(step: Step, batches: FreshBatches, rows: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a step (back to back, after warm-up), spread, peak GiB and the mean loss."""
    for _ in range(3):
        step(*batches(), rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    losses = []
    fresh = [batches() for _ in range(steps)]
    torch.cuda.synchronize()
    marks[0].record()
    for batch, mark in zip(fresh, marks[1:], strict=True):
        losses.append(step(*batch, rows))
        mark.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
    return {
        "ms": statistics.median(times),
        "mean_ms": statistics.mean(times),
        "spread": (max(times) - min(times)) / statistics.median(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": float(torch.stack(losses).mean()),
    }


# Group → pieces of kernel names, lower case; a kernel belongs to the first group that has a piece of its name.
GROUPS = {
    "attention": ("attention_", "absorbed_", "materialised_", "candidate_rows"),
    "LMSD": ("lmsd_",),
    "optimizer": ("multi_tensor", "adam", "lpnorm", "fused_step"),
    "norms": ("layer_norm", "layernorm", "gammabeta"),
    "embeddings": ("split_embedding", "bounds_check", "linearize", "permute_", "split_rows", "copy_rows", "jagged"),
    "encoding": ("encode_", "piece_sums", "entry_sums", "embedding_backward", "embedding_dense", "radix", "sort",
                 "searchsorted", "dropout", "krn_partial", "compute_grad_weight", "sum_and_scatter"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk", "wgmma"),
    "sums": ("reduce_kernel", "column_sums"),
    "copies and casts": ("copy", "memcpy", "memset", "fill", "cat", "index", "gather", "scatter"),
}  # fmt: skip


def group_of(kernel: str) -> str:
    """The group that a kernel's name puts it in."""
    name = kernel.lower()
    return next((group for group, pieces in GROUPS.items() if any(piece in name for piece in pieces)), "other")


def profile(step: Step, batch: tuple, rows: int) -> str:
    """Table of the kernels of one step, longest first, and their device time by group."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step(*batch, rows)
        torch.cuda.synchronize()
    events = profiler.key_averages()
    sums = dict.fromkeys([*GROUPS, "other"], 0.0)
    for event in events:
        sums[group_of(event.key)] += event.self_device_time_total / 1e3
    table = events.table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90)
    lines = [f"{group:18s} {ms:8.2f} ms" for group, ms in sums.items()]
    return "\n".join([table, *lines, f"{'all kernels':18s} {sum(sums.values()):8.2f} ms"])


def run_variant(variant: str, returning: float, table_rows: dict[str, int], world, arguments) -> str:
    """Measure one variant, write its record and return its line of the table."""
    step = Step(VARIANTS[variant], table_rows, world)
    batches = FreshBatches(arguments.batch, arguments.rows, table_rows, returning)
    result = measure(step, batches, arguments.rows, arguments.steps)
    rate = arguments.batch / result["ms"] * 1e3
    ids = f"{returning:.0%} of rows return" if returning else "distinct items"
    shape = f"B={arguments.batch},S={arguments.rows} uniform,H=4,d=128,D=512,layers=3,bf16,{variant},{ids}"
    fields = {name: result[name] for name in ("ms", "mean_ms", "peak_gib", "loss")}
    found = record(
        "train_step/ours",
        shape,
        rate,
        "samples/s",
        repeats=arguments.steps,
        spread=result["spread"],
        cross_rows_cap=arguments.table_rows,
        **fields,
    )
    write_records("train_step", [found])
    if arguments.profile and variant == arguments.variants[0]:
        print(profile(step, batches(), arguments.rows))
    return (
        f"{variant:26s} {ids:22s} {result['ms']:8.1f} ms {rate:8.0f} samples/s  peak {result['peak_gib']:6.1f} GiB  "
        f"loss {result['loss']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2663)
    parser.add_argument("--table-rows", type=int, default=1_000_000, help="cap on the rows of each cross's table")
    parser.add_argument(
        "--returning", type=float, nargs="+", default=[0.0], help="share of rows that return to an item"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="print a step of the first variant by kernel and group")
    arguments = parser.parse_args()
    require_gpu()
    world = distributed.join(torch.device("cuda", 0))
    table_rows = {name: min(rows, arguments.table_rows) for name, rows in CONTEXT_TABLES.items()} | ITEM_TABLES
    lines = []
    for variant, returning in itertools.product(arguments.variants, arguments.returning):
        try:
            lines.append(run_variant(variant, returning, table_rows, world, arguments))
        except torch.OutOfMemoryError as exc:
            lines.append(f"{variant:26s} does not fit: {str(exc).splitlines()[0]}")
        gc.collect()
        torch.cuda.empty_cache()
    print(device_name())
    print("\n".join(lines))
    distributed.leave(world)


if __name__ == "__main__":
    main()
