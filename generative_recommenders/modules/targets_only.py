"""The gate of the targets-only last layer: one decision per batch, whether the last layer runs for candidates alone.

The loss of a ranker reads candidate rows only, so the last layer needs U, Q, attention, output norm and output
projection for those rows alone, against the whole sequence; nothing that the loss reads changes. Where that holds is
checked, never assumed, and how a failed check ends depends on what could be done about it:

- the knob is off: not consulted, the full layer runs;
- the model can never satisfy it (``static_blockers``): an error that names the option and the way out, because a silent
  fallback reads as "the optimisation did not help";
- this batch, this mode or this backend cannot: the full layer runs, and each distinct reason is logged once.

All state lives on the gate, so two models in one process do not affect each other.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from generative_recommenders.errors import UserError
from generative_recommenders.modules.dlrm_config import RECOMPUTE_OPTIONS
from generative_recommenders.modules.stu import STULayerConfig
from generative_recommenders.ops.candidate_attention import COMPUTATIONS, TargetSummary, why_not_computation
from generative_recommenders.ops.dispatch import Preference, pack
from generative_recommenders.ops.lmsd import supports_indexed_output_dropout
from generative_recommenders.options import options_of
from generative_recommenders.shared_options import RankerOptions

logger = logging.getLogger(__name__)

_OPTIONS = options_of(RankerOptions)
KNOB = _OPTIONS["last_layer_targets_only"].variable_name
EVAL_KNOB = _OPTIONS["targets_only_eval"].variable_name
SEVERAL_KNOB = _OPTIONS["targets_only_several_targets"].variable_name
COMPUTATION_CHOICES = _OPTIONS["targets_only_computation"].choices or ()
_BACKENDS = ("PYTORCH", "TRITON")


@dataclasses.dataclass(frozen=True)
class LastLayerDecision:
    """How the last layer ran for one batch.

    Attributes:
        engaged: whether it ran for the candidate rows alone.
        reason: why (or why not), in words.
        computation: ``"full"``, ``"absorbed"`` or ``"materialised"``.
    """

    engaged: bool
    reason: str
    computation: str


@dataclasses.dataclass(frozen=True)
class LastLayerUse:
    """What the model around the stack wants of the last layer; each of these rules targets-only out."""

    num_layers: int
    full_embeddings: bool = False


NOT_CONSULTED = LastLayerDecision(False, "targets-only is off", "full")


class TargetsOnlyGate:
    """Decides per batch; see the module's docstring. Its options are those of ``RankerOptions``.

    Args:
        enabled: the knob.
        eval_enabled: whether evaluation may use it too.
        several_targets: whether batches with other than one target per sequence may use it.
        computation: ``"absorbed"``, ``"materialised"`` or ``"auto"`` (absorbed wherever it can serve, as the faster).

    Attributes:
        last_decision: of the last batch, ``None`` before the first.
    """

    def __init__(
        self,
        enabled: bool = RankerOptions.last_layer_targets_only,
        eval_enabled: bool = RankerOptions.targets_only_eval,
        several_targets: bool = RankerOptions.targets_only_several_targets,
        computation: str = RankerOptions.targets_only_computation,
    ) -> None:
        if computation not in COMPUTATION_CHOICES:
            raise ValueError(f"computation={computation!r} is not known: use {', '.join(COMPUTATION_CHOICES)}")
        self.enabled = enabled
        self.eval_enabled = eval_enabled
        self.several_targets = several_targets
        self.computation = computation
        self.last_decision: LastLayerDecision | None = None
        self._logged: set[str] = set()

    @classmethod
    def of(cls, options: RankerOptions) -> TargetsOnlyGate:
        """The gate that a ranker's options describe."""
        return cls(
            enabled=options.last_layer_targets_only,
            eval_enabled=options.targets_only_eval,
            several_targets=options.targets_only_several_targets,
            computation=options.targets_only_computation,
        )

    def decide(
        self,
        layer: STULayerConfig | None,
        use: LastLayerUse,
        training: bool,
        x: torch.Tensor,
        num_targets: torch.Tensor,
        summary: TargetSummary | None = None,
    ) -> tuple[LastLayerDecision, TargetSummary | None]:
        """Decide for one batch.

        Args:
            layer: configuration of the last layer, ``None`` for an empty stack.
            use: what the model around it wants.
            training: the model's mode.
            x: ``[T, D]``, its input.
            num_targets: int64 ``[B]``. summary: the same on the host; without it the counts of a GPU tensor are read,
                which waits for the device, but only if the knob is on and nothing else rules the batch out.

        Returns:
            The decision (also ``last_decision``), and the counts if it engaged.

        Raises:
            UserError: the knob is on and the model can never satisfy it.
        """
        decision, summary = self._decide(layer, use, training, x, num_targets, summary)
        if self.enabled and decision.reason not in self._logged:
            self._logged.add(decision.reason)
            level = logging.INFO if decision.engaged else logging.WARNING
            ran = "candidate rows only" if decision.engaged else "in full"
            logger.log(level, "last layer %s: %s", ran, decision.reason)
        self.last_decision = decision
        return decision, summary

    def _decide(self, layer, use, training, x, num_targets, summary):
        if not self.enabled:
            return NOT_CONSULTED, None
        blockers = static_blockers(layer, use)
        if blockers:
            raise UserError(
                f"the targets-only last layer cannot work with this model: {'; '.join(blockers)}; or switch it off "
                f"with {KNOB}=0 or model.last_layer_targets_only=False"
            )
        reason = self._why_not_mode(layer, training, x)
        if reason is None:
            summary = TargetSummary.of(num_targets) if summary is None else summary
            if not (self.several_targets or summary.one_each):
                reason = f"not exactly one target per sequence ({SEVERAL_KNOB}=1 admits other counts)"
        if reason is not None:
            return LastLayerDecision(False, reason, "full"), None
        computation, reason = self._pick(layer, x, summary)
        return LastLayerDecision(computation != "full", reason, computation), summary

    def _why_not_mode(self, layer: STULayerConfig, training: bool, x: torch.Tensor) -> str | None:
        if not training and not self.eval_enabled:
            return f"evaluation, and its own knob is off ({EVAL_KNOB}=0)"
        if not supports_indexed_output_dropout(layer.backend, x.device):
            return f"the LMSD backend on {x.device.type} cannot draw dropout masks by row index"
        return None

    def _pick(self, layer: STULayerConfig, x: torch.Tensor, summary: TargetSummary) -> tuple[str, str]:
        """The computation to run and why; ``"full"`` with all reasons if none can serve the batch."""
        wanted = COMPUTATIONS if self.computation == "auto" else (self.computation,)
        reasons = []
        for computation in wanted:
            reason = why_not_computation(computation, x, layer.num_heads, summary, layer.backend)
            if reason is None:
                return computation, f"targets only, {computation}"
            reasons.append(f"{computation}: {reason}")
        return "full", "; ".join(reasons)


def static_blockers(layer: STULayerConfig | None, use: LastLayerUse) -> list[str]:
    """What of the model's configuration rules targets-only out, each with the way to lift it."""
    if layer is None or use.num_layers == 0:
        return ["the stack is empty (set hstu_num_layers to 1 or more)"]
    kept = [name for name in RECOMPUTE_OPTIONS if not getattr(layer, name)]
    named = "" if isinstance(layer.backend, Preference) else pack(layer.backend)  # a preference need not be served
    are_off = "is off" if len(kept) == 1 else "are off"
    checks = (
        (
            named and named.upper() not in _BACKENDS,
            f"kernel backend {layer.backend} has no targets-only path (set backend to {' or '.join(_BACKENDS)})",
        ),
        (layer.use_group_norm, "group norm is on (set use_group_norm=False)"),
        (not layer.causal, "attention is not causal (set causal=True)"),
        (not layer.target_aware, "attention is not target-aware (set target_aware=True)"),
        (layer.max_attn_len > 0, f"attention is windowed, max_attn_len={layer.max_attn_len} (set it to 0)"),
        (
            layer.contextual_seq_len > 0,
            f"a contextual prefix attends both ways, contextual_seq_len={layer.contextual_seq_len} (set it to 0)",
        ),
        (
            kept,
            f"{', '.join(kept)} {are_off} for the last layer (set model.recompute_last_layer=True, which turns all "
            "three on there and leaves the other layers: a targets-only layer keeps nothing of the sequence's length, "
            "so recomputing costs nothing)",
        ),
        (layer.is_inference, "the layer was built in inference mode (set is_inference=False)"),
        (use.full_embeddings, "full embeddings are requested (set return_full_embeddings=False)"),
    )
    return [text for blocked, text in checks if blocked]
