"""``--dry-run``: what a run would be, on a machine that need not be there: plan, memory, FLOPs, links, backends.

Nothing is trained or written, no process group is made, and no GPU is touched. Data is opened where it is prepared;
of the public data set the published sizes do.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
from collections.abc import Callable, Iterator

import torch

from generative_recommenders.data.yambda.layout import cache_folder
from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_config import RECOMPUTE_OPTIONS, DlrmHSTUConfig
from generative_recommenders.modules.targets_only import LastLayerDecision
from generative_recommenders.ops import encode, stu
from generative_recommenders.ops.attention import Projection
from generative_recommenders.ops.attention.backends import ATTENTION
from generative_recommenders.ops.attention.call import AttentionShape
from generative_recommenders.ops.candidate_attention import TargetSummary
from generative_recommenders.ops.candidate_attention.attention import CANDIDATE_ATTENTION
from generative_recommenders.ops.candidate_attention.call import CandidateShape
from generative_recommenders.ops.dispatch import BackendUnavailable, Choice, explain
from generative_recommenders.ops.encode.backends import ENCODE, EncodeShape
from generative_recommenders.ops.lmsd.backends import LMSD
from generative_recommenders.ops.lmsd.contract import LmsdConfig, LmsdShape
from generative_recommenders.train import gin_files, sharding, workload
from generative_recommenders.train.config import HOST
from generative_recommenders.train.datasets import FACTORIES
from generative_recommenders.train.gin_files import RunConfig
from generative_recommenders.train.hardware import GIB, NETWORK, device_kind, gib, parse_bytes
from generative_recommenders.train.plan import Machine
from generative_recommenders.train.plan_report import table_lines
from generative_recommenders.train.step_cost import (
    STEP_SHARE,
    step_flops,
    step_seconds,
    targets_only_decision,
)
from generative_recommenders.train.what_fits import (
    MOST_RANKS,
    Outcome,
    Setting,
    fitting_changes,
    plan,
    why_not_warp_specialised,
)
from generative_recommenders.train.workload import Workload


@dataclasses.dataclass(frozen=True)
class DryRunArguments:
    """The command line of a dry run; sizes as people write them (``139GiB``)."""

    config: tuple[str, ...]
    bind: tuple[str, ...] = ()
    ranks: int = 8
    ranks_per_host: int = 8
    device_kind: str = "h200"
    device_memory: str | None = None
    host_memory: str | None = None
    mean_rows: float | None = None


def dry_run(arguments: DryRunArguments, say: Callable[[str], object] = print) -> int:
    """Print the whole picture; 0 if it fits, 2 if not (with the smallest change that would).

    Raises:
        UserError: wrong input.
    """
    for name in ("torchrec", "torch.fx", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    setting = read_setting(arguments)
    outcome = plan(setting)
    try:
        for line in picture(outcome):
            say(line)
    except BackendUnavailable as exc:
        raise UserError(str(exc)) from None
    if outcome.plan is not None:
        return 0
    say(f"does not fit: {outcome.problem}")
    found = fitting_changes(setting)
    say(f"the smallest change that would fit: {found[0]}" if found else "no change that was tried would fit")
    for words in found[1:]:
        say(f"  or {words}")
    return 2


def read_setting(arguments: DryRunArguments) -> Setting:
    """The configuration, what is known of its data, and the machine asked for."""
    config, kind = gin_files.load(arguments.config, arguments.bind), device_kind(arguments.device_kind)
    for option in ("ranks", "ranks_per_host"):
        if not 1 <= getattr(arguments, option) <= MOST_RANKS:
            raise UserError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: expected 1 to {MOST_RANKS}")
    memory = (
        int(kind.memory) if arguments.device_memory is None else parse_bytes("--device-memory", arguments.device_memory)
    )
    memory = min(memory, int(config.sharding.hbm_cap_gb * GIB) or memory)
    host = int(config.sharding.host_memory_gb * GIB)
    if arguments.host_memory is not None:
        host = parse_bytes("--host-memory", arguments.host_memory)
    sharding.check_host_memory(config.sharding, host)
    headroom = min(int(config.sharding.headroom_gb * GIB), memory // 8)
    machine = Machine("cuda", arguments.ranks, arguments.ranks_per_host, memory, host, headroom, kind)
    work = find_workload(config)
    if arguments.mean_rows is not None:
        work = work.with_mean_rows(arguments.mean_rows)
    return Setting(config, work, machine, kind)


def find_workload(config: RunConfig) -> Workload:
    """Of the data where it is prepared (generated and packaged data sets prepare themselves), else as published."""
    options = config.dataset_options
    if config.data.dataset == "yambda":
        folder = options["cache"] or cache_folder(options["path"], options["size"])
        if not pathlib.Path(folder).is_dir():
            return workload.of_public_data(config)
    try:
        return workload.of_dataset(FACTORIES[config.data.dataset](**options))
    except OSError as exc:
        if exc.filename is None:
            raise
        raise UserError(f"data set {config.data.dataset}: {exc.filename}: {exc.strerror}; check the path") from None


def picture(outcome: Outcome) -> Iterator[str]:
    """The lines of a dry run, part by part."""
    decision = targets_only_decision(outcome.sizes)
    yield from _configuration(outcome)
    yield ""
    yield from _memory(outcome)
    yield ""
    yield from _tables(outcome)
    yield ""
    yield from _work(outcome, decision)
    yield ""
    yield from _backends(outcome, decision)


def _configuration(outcome: Outcome) -> Iterator[str]:
    config, work, machine = outcome.setting.config, outcome.setting.work, outcome.setting.machine
    yield "Resolved configuration (options that are not the code's defaults; a run writes all to its config.gin):"
    values = config.values()
    for name in sorted(config.sources):
        yield f"  {name} = {values[name]!r}  # {config.sources[name]}"
    hosts = -(-machine.ranks // machine.ranks_per_host)
    yield f"Machine: {machine.ranks} x {outcome.setting.kind.name} with {gib(machine.known_memory)}, " + (
        f"{hosts} host{'s' if hosts > 1 else ''}, "
        + (f"{gib(machine.host_memory)} of host memory each" if machine.host_memory else "no host memory for tables")
    )
    yield f"Data: {work.origin}"
    yield (
        f"  rows of a sample: {work.mean_rows:,.0f} in the mean (speed), {outcome.load.shape.rows:,.0f} in the fullest "
        f"batch of {outcome.load.shape.samples:,} to expect (memory), {work.most_rows:,} at most"
    )


def _memory(outcome: Outcome) -> Iterator[str]:
    machine, peak = outcome.setting.machine, outcome.load.reserved
    yield f"Memory per rank, fullest rank, at the step's peak ({peak.name}):"
    parts = dict(peak.parts) if outcome.plan is None else outcome.plan.memory()
    for kind, amount in parts.items():
        yield f"  {kind:<28}{amount / GIB:>9.2f} GiB"
    free = machine.known_memory - sum(parts.values())
    yield f"  {'free':<28}{free / GIB:>9.2f} GiB, of which {gib(machine.headroom)} are headroom"
    yield f"  recomputed: {recomputed(outcome.sizes)}"
    if outcome.plan is not None and machine.host_memory:
        host = max(outcome.plan.table_bytes(HOST)) * min(machine.ranks_per_host, machine.ranks)
        yield f"  host memory: {gib(host)} of {gib(machine.host_memory)} per host"


def recomputed(sizes: DlrmHSTUConfig) -> str:
    """Which recompute options are on, in words."""
    names = [name for name in RECOMPUTE_OPTIONS if getattr(sizes, name)]
    last = sizes.recompute_last_layer
    if last is not None:
        names.append(f"last layer {'all three' if last else 'nothing'}")
    if sizes.recompute_preprocessor:
        names.append("recompute_preprocessor")
    return ", ".join(names) or "nothing"


def _tables(outcome: Outcome) -> Iterator[str]:
    if outcome.plan is None:
        yield "Plan: none fits"
        return
    yield "Plan (look-ups of a rank and step: mean, and fullest batch; MB exchanged by all ranks in a step):"
    for line in table_lines(outcome.plan):
        yield f"  {line}"
    if outcome.plan.cache_share:
        yield f"  tables in host memory have {outcome.plan.cache_share:.0%} of their rows cached on the device"


def _work(outcome: Outcome, decision: LastLayerDecision) -> Iterator[str]:
    setting, work = outcome.setting, outcome.setting.work
    config, machine = setting.config, setting.machine
    step = step_flops(outcome.sizes, config.train.batch_size, work.mean_rows, decision.computation)
    seconds = step_seconds(step, setting.kind, outcome.load.shape.half)
    global_batch = config.train.batch_size * machine.ranks
    yield (
        f"FLOPs per step: {step / 1e12:,.1f} TFLOP a rank, {step * machine.ranks / 1e12:,.1f} in all; about "
        f"{seconds * 1e3:,.0f} ms at {STEP_SHARE:.0%} of the peak, as one H200 was measured"
    )
    yield f"Last layer: {'the candidates alone, ' if decision.engaged else 'in full: '}{decision.reason}"
    if outcome.plan is not None:
        links = outcome.plan.link_bytes()
        yield f"Over the links: {links / 1e6:,.1f} MB per step and way at the busiest rank; unhidden, of a step:"
        for name, rate in ((f"link of {setting.kind.name}", setting.kind.link), ("400 Gbit/s a rank", NETWORK)):
            share = links / rate / (links / rate + seconds)
            yield f"  {name} ({rate / 1e9:,.0f} GB/s): {links / rate * 1e3:,.1f} ms, {share:.0%}"
    epochs, limit = config.train.epochs, config.train.max_steps
    steps = math.ceil(work.train_samples / global_batch) * epochs
    windows = "unknown number of" if work.windows is None else f"{work.windows:,}"
    streaming = config.train.mode == "streaming-train-eval" and not config.mlperf.enabled
    note = " or more, since each window's last batch may be short" if streaming else ""
    yield (
        f"Windows and steps: {work.train_samples:,} samples in {windows} windows, {epochs} pass{'es' * (epochs > 1)}, "
        f"global batch {global_batch:,}: {min(steps, limit) if limit else steps:,} steps{note}"
    )


def _backends(outcome: Outcome, decision: LastLayerDecision) -> Iterator[str]:
    sizes, kind = outcome.sizes, outcome.setting.kind
    yield "Backends of the ops on that device, and why not better ones:"
    for choice in op_choices(outcome, decision):
        yield f"  {choice}"
    layer, attention = sizes.layer_config(), _attention(outcome)
    rows = math.ceil(outcome.load.shape.joined)
    projection = Projection(layer.num_heads, layer.attention_dim, layer.hidden_dim)
    not_whole = stu.why_not_fused_shape(attention, rows, projection, layer.use_group_norm, layer.backend)
    encoded = EncodeShape(attention.device, attention.dtype)
    not_encoded = encode.why_not_fused(encoded, sizes.hstu_embedding_dim, backend=sizes.backend)
    for name, reason in (("STU layer, attention and LMSD", not_whole), ("encoding of the sequence", not_encoded)):
        yield f"  {name}: " + ("TRITON, fused" if reason is None else f"step by step: {reason}")
    if not_whole is not None or not_encoded is not None:
        yield "  warning: memory above is that of the fused kernels; step by step takes more"
    if not_whole is None:
        reason = why_not_warp_specialised(kind, layer, outcome.load.shape.half)
        yield "  attention kernels: " + ("warp-specialised" if reason is None else f"plain Triton: {reason}")


def op_choices(outcome: Outcome, decision: LastLayerDecision) -> Iterator[Choice]:
    """What each op of a training step would run: asked by descriptions of its calls, without tensors.

    Raises:
        BackendUnavailable: the backend asked for by name cannot serve an op of every layer. (Candidate attention that
            cannot be served is left out: the last layer runs in full then.)
    """
    sizes, shape, attention = outcome.sizes, outcome.load.shape, _attention(outcome)
    device, dtype, layer = attention.device, attention.dtype, sizes.layer_config()
    groups = layer.num_heads if layer.use_group_norm else 1
    lmsd, weights = LmsdConfig(layer.output_dropout_ratio, True, True, True, groups), (torch.float32, torch.float32)
    rows = math.ceil(shape.joined)
    calls = {
        ENCODE: EncodeShape(device, dtype),
        ATTENTION: attention,
        LMSD: LmsdShape(device, dtype, weights, rows, layer.output_dim, lmsd, seed_on_device=True),
    }
    if decision.engaged:
        summary = TargetSummary(shape.samples, shape.samples, 1, 1)
        calls[CANDIDATE_ATTENTION] = CandidateShape(
            decision.computation, device, dtype, layer.embedding_dim, layer.num_heads, summary
        )
    for op, call in calls.items():
        op.choose(call, sizes.backend)
        yield explain(op, call, sizes.backend)


def _attention(outcome: Outcome) -> AttentionShape:
    """What decides about attention, on a GPU that need not be there."""
    layer, dtype = outcome.sizes.layer_config(), torch.bfloat16 if outcome.load.shape.half else torch.float32
    return AttentionShape(torch.device("cuda"), dtype, layer.attention_dim, layer.hidden_dim, dtype)
