"""The targets-only gate at work: a small ranker trained on generated data, on a CPU, once per arm, in one command.

    python benchmarks/targets_only_demo.py [--steps 8]

Each arm trains the same model on the same batches and dropout and prints what the gate decided, fill, exec and the
loss: ten targets per sequence decline and say why (exec = fill); one target engages (exec < fill); with the knob off
nothing is consulted; ten targets with the several-targets knob on engage and equal the full layer. The exit status is 1
if any arm does otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pathlib
import sys

import torch
from torchrec import KeyedJaggedTensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig, candidate_name  # noqa: E402
from generative_recommenders.terminal import speak_any_encoding  # noqa: E402
from generative_recommenders.train.flops import StackShape, batch_flops  # noqa: E402

ITEMS = ("item_id", "artist_id")
CONTEXT = ("uid",)
ROWS = {"item_id": 300, "artist_id": 40, "uid": 50}
LONGEST, SAMPLES = 64, 16


@dataclasses.dataclass(frozen=True)
class Arm:
    """One run: targets per sequence, the knobs, and whether the gate must engage."""

    label: str
    targets: int
    knob: bool
    several: bool
    engages: bool


ARMS = (
    Arm("10 targets, knob on", 10, True, False, False),
    Arm("1 target, knob on", 1, True, False, True),
    Arm("1 target, knob off", 1, False, False, False),
    Arm("10 targets, both knobs on", 10, True, True, True),
)


def make_batch(seed: int, targets: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Generated histories of 8 to 50 events and ``targets`` candidates each."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda high, n: torch.randint(1, high, (n,), generator=g)  # noqa: E731
    lengths = torch.randint(8, LONGEST - 14, (SAMPLES,), generator=g)
    events = int(lengths.sum())
    history = {name: draw(ROWS[name], events) for name in ITEMS}
    history |= {"action_weight": draw(8, events), "action_timestamp": draw(10**6, events)}
    context = {"uid": draw(ROWS["uid"], SAMPLES)}
    counts = torch.full((SAMPLES,), targets)
    candidates = {candidate_name(name): draw(ROWS[name], SAMPLES * targets) for name in ITEMS}
    candidates |= {
        "item_query_time": torch.full((SAMPLES * targets,), 10**6),
        "item_action_weight": draw(3, SAMPLES * targets),
    }
    uih = KeyedJaggedTensor(
        [*context, *history],
        torch.cat([*context.values(), *history.values()]),
        lengths=torch.cat([torch.ones(SAMPLES, dtype=torch.int64)] + [lengths] * len(history)),
        stride=SAMPLES,
    )
    return uih, KeyedJaggedTensor(
        list(candidates), torch.cat(list(candidates.values())), lengths=counts.repeat(len(candidates)), stride=SAMPLES
    )


def make_model(knob: bool, several: bool) -> DlrmHSTU:
    config = DlrmHSTUConfig(
        table_rows=ROWS,
        item_feature_names=ITEMS,
        contextual_feature_names=CONTEXT,
        max_seq_len=LONGEST,
        hstu_embedding_dim=32,
        hstu_num_heads=2,
        hstu_attn_qk_dim=16,
        hstu_attn_linear_dim=16,
        hstu_num_layers=3,
        preprocessor_hidden_dim=32,
        item_tower_hidden_dim=32,
        head_hidden_dim=32,
        last_layer_targets_only=knob,
        targets_only_several_targets=several,
    )
    return DlrmHSTU(config, seed=0)


def train(arm: Arm, steps: int) -> tuple[DlrmHSTU, list[float], float, float]:
    """The trained model, its losses, and mean fill and exec."""
    model = make_model(arm.knob, arm.several)
    c = model.config
    sizes = (c.hstu_embedding_dim, c.hstu_num_heads, c.hstu_attn_qk_dim, c.hstu_attn_linear_dim)
    shape = StackShape(*sizes, c.hstu_num_layers, c.max_seq_len)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses, fills, execs = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        out = model(*make_batch(step, arm.targets))
        out.loss.backward()
        optimizer.step()
        targets = torch.full((SAMPLES,), arm.targets)
        counted = batch_flops(shape, out.seq_lengths, targets, model.transducer.last_layer_decision.computation)
        losses.append(out.loss.item())
        fills.append(counted.fill.item())
        execs.append(counted.exec.item())
    return model, losses, sum(fills) / steps, sum(execs) / steps


def main() -> None:
    speak_any_encoding()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # advice to its own developers
    logging.getLogger("generative_recommenders").setLevel(logging.ERROR)  # what the gate logs is printed for each arm
    failed = False
    for arm in ARMS:
        model, losses, fill, executed = train(arm, steps)
        decision = model.transducer.last_layer_decision
        plain = train(dataclasses.replace(arm, knob=False), steps)[1] if arm.knob else losses
        difference = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        good = decision.engaged == arm.engages and (executed < fill) == arm.engages and difference < 1e-5
        failed |= not good
        print(f"{arm.label:27s} {'engaged' if decision.engaged else 'full   '} fill={fill:.1%} exec={executed:.1%}")
        print(f"{'':27s} {decision.reason}")
        print(f"{'':27s} loss {losses[0]:.6f} → {losses[-1]:.6f}, from the full layer's by {difference:.1e} at most")
        print(f"{'':27s} {'as expected' if good else 'NOT AS EXPECTED'}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
