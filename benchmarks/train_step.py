"""One whole training step of the three-layer ranker at the public benchmark's sizes, on one GPU.

    python benchmarks/train_step.py [--batch 1024] [--rows 2663] [--table-rows 1000000] [--steps 5] [--profile]

The step is the trainer's own: sharded tables with the fused row-wise Adagrad (fp32 tables, capped at ``--table-rows``
rows so that they fit one GPU; the look-ups per step are the real ones), towers, three STU layers under bf16, loss,
backward, clipping and Adam. Batches are random and already on the device; every step takes another one. Each variant
(targets-only last layer on or off, recomputation on or off) gives one record with its peak memory.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import sys
import time

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


def random_batch(batch: int, rows: int, table_rows: dict[str, int]) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """``batch`` samples of ``rows`` joined rows (8 contextual, the history, 1 candidate) with random ids."""
    history = rows - len(CONTEXT_TABLES) - 1

    def ids(name: str, count: int) -> torch.Tensor:
        return torch.randint(table_rows[name], (count,), device="cuda")

    values, lengths = [], []
    for name in CONTEXT_TABLES:
        values.append(ids(name, batch))
        lengths += [1] * batch
    for name in ITEM_TABLES:
        values.append(ids(name, batch * history))
        lengths += [history] * batch
    values.append(2 ** torch.randint(3, (batch * history,), device="cuda"))
    query = torch.randint(10**7, 2 * 10**7, (batch, 1), device="cuda")
    ages = torch.randint(0, 10**6, (batch, history), device="cuda").sort(dim=1, descending=True).values
    values.append((query - ages).flatten())
    lengths += [history] * batch * 2
    uih = KeyedJaggedTensor(
        keys=[*CONTEXT_TABLES, *ITEM_TABLES, "action_weight", "action_timestamp"],
        values=torch.cat(values),
        lengths=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        stride=batch,
    )
    names = ["item_candidate_id", "item_candidate_artist_id", "item_candidate_album_id"]
    parts = [ids(name, batch) for name in ITEM_TABLES] + [query.flatten(), 1 + 3 * torch.randint(2, (batch,)).cuda()]
    candidates = KeyedJaggedTensor(
        keys=[*names, "item_query_time", "item_action_weight"],
        values=torch.cat(parts),
        lengths=torch.ones(5 * batch, dtype=torch.int32, device="cuda"),
        stride=batch,
    )
    return uih, candidates


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


def measure(step: Step, batches: list, rows: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a step (back to back, after warm-up), spread, peak GiB and the last loss."""
    for uih, candidates in batches:
        loss = step(uih, candidates, rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for i in range(steps):
        begin = time.perf_counter()
        loss = step(*batches[i % len(batches)], rows)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    median = statistics.median(times)
    return {
        "ms": median,
        "spread": (max(times) - min(times)) / median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": float(loss),
    }


# Group → pieces of kernel names, lower case; a kernel belongs to the first group that has a piece of its name.
GROUPS = {
    "attention": ("hopper_", "attention_", "absorbed_", "candidate_rows", "one_query_"),
    "LMSD": ("lmsd_",),
    "optimizer": ("multi_tensor", "adam", "lpnorm", "fused_step"),
    "norms": ("layer_norm", "layernorm", "swish_norm", "gammabeta"),
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


def run_variant(variant, batches, table_rows, world, shape, arguments) -> str:
    """Measure one variant, write its record and return its line of the table."""
    step = Step(VARIANTS[variant], table_rows, world)
    result = measure(step, batches, arguments.rows, arguments.steps)
    rate = arguments.batch / result["ms"] * 1e3
    fields = {"ms": result["ms"], "peak_gib": result["peak_gib"], "table_rows_cap": arguments.table_rows}
    found = record(
        "train_step/ours",
        f"{shape},{variant}",
        rate,
        "samples/s",
        repeats=arguments.steps,
        spread=result["spread"],
        **fields,
    )
    write_records("train_step", [found])
    if arguments.profile and variant == arguments.variants[0]:
        print(profile(step, batches[0], arguments.rows))
    return (
        f"{variant:26s} {result['ms']:8.1f} ms {rate:8.0f} samples/s  peak {result['peak_gib']:6.1f} GiB  "
        f"loss {result['loss']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2663)
    parser.add_argument("--table-rows", type=int, default=1_000_000, help="cap on the rows of each table")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="print a step of the first variant by kernel and group")
    arguments = parser.parse_args()
    require_gpu()
    world = distributed.join(torch.device("cuda", 0))
    table_rows = {n: min(r, arguments.table_rows) for n, r in {**CONTEXT_TABLES, **ITEM_TABLES}.items()}
    batches = [random_batch(arguments.batch, arguments.rows, table_rows) for _ in range(2)]
    shape = f"B={arguments.batch},S={arguments.rows} uniform,H=4,d=128,D=512,layers=3,bf16"
    lines = []
    for variant in arguments.variants:
        try:
            lines.append(run_variant(variant, batches, table_rows, world, shape, arguments))
        except torch.OutOfMemoryError as exc:
            lines.append(f"{variant:26s} does not fit: {str(exc).splitlines()[0]}")
        gc.collect()
        torch.cuda.empty_cache()
    print(device_name(), shape)
    print("\n".join(lines))
    distributed.leave(world)


if __name__ == "__main__":
    main()
