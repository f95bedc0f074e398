"""fill, exec, MFU and HFU of the steps since the last line of metrics, and what the last layer did in them."""

from __future__ import annotations

import torch
from torch import nn

from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmOutput
from generative_recommenders.train import flops
from generative_recommenders.train.distributed import World


class FlopMeter:
    """Adds up FLOPs step by step on the device, without waiting for it.

    Shares that need a device's ``peak`` are given only where ``flops.PEAK_TFLOPS`` knows the device, the same on every
    rank; ``why_no_peak`` says why not. Making one is a collective call.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        core = next(module for module in model.modules() if isinstance(module, DlrmHSTU))
        c = core.config
        self._transducer = core.transducer
        self._shape = flops.StackShape(
            c.hstu_embedding_dim,
            c.hstu_num_heads,
            c.hstu_attn_qk_dim,
            c.hstu_attn_linear_dim,
            c.hstu_num_layers,
            c.max_seq_len,
        )
        self._world = world
        self._dense = 0.0
        self._filled = torch.zeros((), dtype=torch.float64, device=world.device)
        self._executed = torch.zeros((), dtype=torch.float64, device=world.device)
        self._steps = 0
        self._engaged = 0
        bf16 = c.autocast == "bfloat16" or (c.autocast == "auto" and world.device.type == "cuda")
        self.max_seq_len = c.max_seq_len
        self.precision = "bfloat16" if bf16 else "fp32"
        self.device_name = "cpu"
        self.peak: flops.Peak | None = None
        self.why_no_peak: str | None = "no MFU or HFU on a CPU"
        if world.device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(world.device)
            dtype = torch.bfloat16 if bf16 else torch.float32
            self.peak, self.why_no_peak = common_peak(world.gather(self.device_name), dtype)

    @property
    def decision(self) -> str:
        """Which rows the last layer computed in the last batch, and why."""
        decision = self._transducer.last_layer_decision
        if decision is None:
            return "none: no batch has run"
        if decision.engaged:
            return f"the candidates' alone ({decision.computation})"
        return f"all ({decision.reason})"

    def add(self, output: DlrmOutput) -> None:
        """Count one training step of this rank."""
        decision = self._transducer.last_layer_decision
        computation = "full" if decision is None else decision.computation
        batch = flops.batch_flops(self._shape, output.seq_lengths, output.num_targets, computation)
        self._dense += batch.dense
        self._filled += batch.filled
        self._executed += batch.executed
        self._steps += 1
        self._engaged += int(decision is not None and decision.engaged)

    def state(self) -> torch.Tensor:
        """What was added since the last ``drain``, for a checkpoint."""
        sums = [self._dense, self._filled.item(), self._executed.item(), self._steps, self._engaged]
        return torch.tensor(sums, dtype=torch.float64)

    def load_state(self, state: torch.Tensor) -> None:
        """The inverse of ``state``."""
        self._dense = state[0].item()
        self._filled.fill_(state[1].item())
        self._executed.fill_(state[2].item())
        self._steps, self._engaged = int(state[3]), int(state[4])

    def drain(self, seconds: float) -> dict[str, float]:
        """Figures over the steps since the last call, on all ranks; a collective call.

        Returns:
            ``fill`` and ``exec`` (shares of the dense shape), ``last_layer_targets_only`` (share of steps) and, where
            the device's peak is known, ``mfu`` and ``hfu``.
        """
        totals = zip(*self._world.gather(self.state().tolist()), strict=True)
        dense, filled, executed, steps, engaged = (sum(column) for column in totals)
        self.load_state(torch.zeros(5))
        if dense == 0:
            return {}
        figures = {"fill": filled / dense, "exec": executed / dense, "last_layer_targets_only": engaged / steps}
        if self.peak is not None and seconds > 0:
            peak = self.peak.tflops_per_second
            figures["mfu"] = flops.utilisation(dense, seconds, self._world.size, peak)
            figures["hfu"] = flops.utilisation(executed, seconds, self._world.size, peak)
        return figures


def common_peak(devices: list[str], dtype: torch.dtype) -> tuple[flops.Peak | None, str | None]:
    """The peak of the ranks' devices, or ``None`` and why there is none."""
    if len(set(devices)) > 1:
        return None, f"the ranks' devices differ ({', '.join(sorted(set(devices)))}): no MFU or HFU"
    value, why_not = flops.peak_tflops(devices[0], dtype)
    if value is None:
        return None, why_not
    return flops.Peak(value, str(dtype).removeprefix("torch."), devices[0]), None
