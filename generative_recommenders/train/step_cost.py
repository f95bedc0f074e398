"""What a step computes on a device that need not be there: the last layer's decision, FLOPs, and about how long."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from generative_recommenders.modules.dlrm_hstu import DlrmHSTUConfig
from generative_recommenders.modules.targets_only import LastLayerDecision, LastLayerUse, TargetsOnlyGate
from generative_recommenders.ops.candidate_attention import TargetSummary
from generative_recommenders.train import flops
from generative_recommenders.train.hardware import DeviceKind

#: Share of the dense bf16 peak that a whole step executes: 112 TFLOP in 309 ms on one H200 (results/train_step.json).
STEP_SHARE = 0.36


def step_seconds(executed: float, kind: DeviceKind, half: bool) -> float:
    """About how long a step takes that executes so many FLOPs, its exchanges left out."""
    return executed / (kind.peak("bfloat16" if half else "float32") * STEP_SHARE)


def step_flops(sizes: DlrmHSTUConfig, samples: int, rows: float, computation: str) -> float:
    """FLOPs of a step of ``samples`` sequences of ``rows`` rows, forward and backward.

    Args:
        computation: of the last layer's decision.
    """
    shape = flops.StackShape(
        sizes.hstu_embedding_dim, sizes.hstu_num_heads, sizes.hstu_attn_qk_dim, sizes.hstu_attn_linear_dim,
        sizes.hstu_num_layers, sizes.max_seq_len,
    )  # fmt: skip
    lengths = torch.full((samples,), rows, dtype=torch.float64)
    counted = flops.batch_flops(shape, lengths, torch.ones(samples, dtype=torch.int64), computation)
    return float(counted.executed)


def targets_only_decision(sizes: DlrmHSTUConfig) -> LastLayerDecision:
    """What the gate would decide for a training batch of one candidate per sequence on a GPU."""
    gate = TargetsOnlyGate.of(sizes)
    last = sizes.layer_config(sizes.hstu_num_layers - 1) if sizes.hstu_num_layers else None
    use = LastLayerUse(num_layers=sizes.hstu_num_layers, full_embeddings=sizes.return_full_embeddings)
    with FakeTensorMode():
        rows = _gpu_rows(sizes)
        return gate.decide(last, use, True, rows, rows.new_empty(1, dtype=torch.int64), TargetSummary(1, 1, 1, 1))[0]


def _gpu_rows(sizes: DlrmHSTUConfig) -> torch.Tensor:
    """Rows of the stack on a GPU that is not there."""
    dtype = torch.float32 if sizes.autocast == "float32" else torch.bfloat16
    return torch.empty(0, sizes.hstu_embedding_dim, dtype=dtype, device="cuda")
