"""Adam for the dense parameters and the fused row-wise Adagrad of the tables, on one schedule.

The tables' update runs inside the backward pass, so a step's learning rate is set on both before its forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from generative_recommenders.train.config import OptimizerConfig


def schedule(step: int, config: OptimizerConfig) -> float:
    """Share of the base learning rate at global step ``step`` (from 0), a function of nothing else.

    Linear from ``warmup_start`` to 1 over the warm-up, then constant or, with ``decay_until_step``, linear from 1 to
    ``decay_end`` at that step.
    """
    if step < config.warmup_steps:
        return config.warmup_start + (1.0 - config.warmup_start) * step / config.warmup_steps
    if not config.decay_until_step:
        return 1.0
    done = (step - config.warmup_steps) / (config.decay_until_step - config.warmup_steps)
    return 1.0 + (config.decay_end - 1.0) * min(1.0, done)


def fuse_sparse_optimizer(table_parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
    """Mark the tables' parameters for a row-wise Adagrad update in the backward; call it before sharding."""
    apply_optimizer_in_backward(RowWiseAdagrad, table_parameters, {"lr": config.sparse_lr, "eps": config.eps})


class Optimizers:
    """Both optimizers of a sharded model behind one small interface."""

    def __init__(self, model: DistributedModelParallel, config: OptimizerConfig) -> None:
        self._config = config
        self._fused = model.fused_optimizer
        self._dense = {_public(name): p for name, p in in_backward_optimizer_filter(model.named_parameters())}
        self._adam = torch.optim.AdamW(
            list(self._dense.values()),
            lr=config.dense_lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    @property
    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """The data-parallel parameters by name."""
        return self._dense

    def start_step(self, step: int) -> float:
        """Set the step's learning rates and clear the dense gradients; returns Adam's learning rate."""
        factor = schedule(step, self._config)
        for group in self._adam.param_groups:
            group["lr"] = self._config.dense_lr * factor
        for group in self._fused.param_groups:
            group["lr"] = self._config.sparse_lr * factor
        self._fused.step()  # hands the learning rate to the fused kernels; the update itself is in the backward
        self._adam.zero_grad(set_to_none=True)
        return self._config.dense_lr * factor

    def finish_step(self) -> torch.Tensor:
        """Clip and apply the dense gradients; returns their norm before clipping (0-d, on the device)."""
        limit = self._config.clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self._dense.values(), limit)
        self._adam.step()
        return norm

    def dense_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Adam's moments and step count by parameter name; zeros before the first step."""
        state = {}
        for name, parameter in self._dense.items():
            entry = self._adam.state[parameter]
            if not entry:
                entry = self._empty_entry(parameter)
            state[name] = {key: entry[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        return state

    def load_dense_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """The inverse of ``dense_state``."""
        for name, parameter in self._dense.items():
            self._adam.state[parameter] = dict(state[name])

    def sparse_state(self) -> dict:
        """State of the fused optimizer: sharded, saved and loaded in place by torch.distributed.checkpoint."""
        return self._fused.state_dict()

    @staticmethod
    def _empty_entry(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return {
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "step": torch.zeros((), dtype=torch.float32),
        }


def _public(name: str) -> str:
    """A parameter's name without the wrappers of torch and TorchRec."""
    return name.replace("_dmp_wrapped_module.", "").replace("module.", "")
