"""The STU (sequential transduction unit) layer: one HSTU layer on a jagged batch, and a stack of them.

Source: Zhai et al. 2024, "Actions speak louder than words: trillion-parameter sequential transducers", with the output
``[SiLU(u), Y, LayerNorm(Y) · SiLU(u)]`` of the public DLRMv4 benchmark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from generative_recommenders.ops.attention import AttentionCall, Projection, UvqkParameters, hstu_preprocess_attention
from generative_recommenders.ops.candidate_attention import CandidateRows, candidate_attention
from generative_recommenders.ops.checks import check_sequences, counts_settled
from generative_recommenders.ops.lmsd import hstu_lmsd
from generative_recommenders.ops.stu import OutputParameters, hstu_layer, why_not_fused
from generative_recommenders.options import options_of
from generative_recommenders.shared_options import RankerOptions

NORM_EPS = 1e-6
ATTN_NORMS = options_of(RankerOptions)["attn_norm"].choices or ()


@dataclasses.dataclass(frozen=True)
class STULayerConfig:
    """Everything that fixes what a layer computes.

    Attributes:
        embedding_dim: D, width of a row.
        num_heads: H.
        hidden_dim: d_v, width of a value, per head.
        attention_dim: d_qk, width of a query or key, per head.
        max_seq_len: the model's longest sequence, the attention divisor when ``attn_norm="max_seq_len"``.
        output_dropout_ratio: dropout of the three segments before the output projection.
        causal, target_aware: a row sees earlier rows only; a candidate sees the history and itself only.
        max_attn_len: sliding window in rows, 0 for none.
        contextual_seq_len: rows at the start that see everything before the candidates (0 if they are ordinary rows).
        attn_alpha: factor of the scores, ``None`` for d_qk ** -0.5.
        attn_norm: ``"max_seq_len"`` divides by that constant, so a score depends on its own sequence only;
            ``"batch_max"`` by the batch's longest sequence, as the public benchmark does.
        use_group_norm: output statistics per head (one weight and bias per head) instead of over all heads.
        recompute_normed_x, recompute_uvqk, recompute_y: redo these in the backward instead of keeping them.
        sort_by_length: asks whoever lays out the batch (the transducer) to place the longest sequences first.
        is_inference: built for serving only: training mode is refused.
        backend: of the layer's ops; ``None`` leaves the choice to the environment and the dispatcher.
    """

    embedding_dim: int
    num_heads: int
    hidden_dim: int
    attention_dim: int
    max_seq_len: int
    output_dropout_ratio: float = RankerOptions.output_dropout_ratio
    causal: bool = RankerOptions.causal
    target_aware: bool = RankerOptions.target_aware
    max_attn_len: int = RankerOptions.max_attn_len
    contextual_seq_len: int = RankerOptions.contextual_seq_len
    attn_alpha: float | None = None
    attn_norm: str = RankerOptions.attn_norm
    use_group_norm: bool = RankerOptions.use_group_norm
    recompute_normed_x: bool = RankerOptions.recompute_normed_x
    recompute_uvqk: bool = RankerOptions.recompute_uvqk
    recompute_y: bool = RankerOptions.recompute_y
    sort_by_length: bool = RankerOptions.sort_by_length
    is_inference: bool = False
    backend: str | None = RankerOptions.backend

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "num_heads", "hidden_dim", "attention_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("max_attn_len", "contextual_seq_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative (0 switches it off)")
        if not 0 <= self.output_dropout_ratio < 1:
            raise ValueError(f"output_dropout_ratio={self.output_dropout_ratio}: must be in [0, 1)")
        if self.attn_norm not in ATTN_NORMS:
            raise ValueError(f"attn_norm={self.attn_norm!r} is not known: use {' or '.join(ATTN_NORMS)}")

    @property
    def alpha(self) -> float:
        """The factor of the attention scores."""
        return self.attention_dim**-0.5 if self.attn_alpha is None else self.attn_alpha

    @property
    def output_dim(self) -> int:
        """H · d_v, width of the attention output."""
        return self.num_heads * self.hidden_dim

    @property
    def uvqk_dim(self) -> int:
        """Columns of the fused projection: U, V, Q, K of all heads."""
        return 2 * self.num_heads * (self.hidden_dim + self.attention_dim)


class STULayer(nn.Module):
    """One layer: norm → UVQK projection → attention → LMSD → output projection → residual.

    Parameters carry the public model's names and layouts. Under autocast they stay fp32 and the products run in the
    autocast dtype; without it they are cast to the dtype of x.
    """

    def __init__(self, config: STULayerConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.projection = Projection(
            c.num_heads, c.attention_dim, c.hidden_dim, NORM_EPS, c.recompute_normed_x, c.recompute_uvqk
        )
        self._uvqk_weight = nn.Parameter(torch.empty(c.embedding_dim, c.uvqk_dim))
        self._uvqk_beta = nn.Parameter(torch.zeros(c.uvqk_dim))
        self._input_norm_weight = nn.Parameter(torch.ones(c.embedding_dim))
        self._input_norm_bias = nn.Parameter(torch.zeros(c.embedding_dim))
        self._output_weight = nn.Parameter(torch.empty(3 * c.output_dim, c.embedding_dim))
        norm_size = c.num_heads if c.use_group_norm else c.output_dim
        self._output_norm_weight = nn.Parameter(torch.ones(norm_size))
        self._output_norm_bias = nn.Parameter(torch.zeros(norm_size))
        nn.init.xavier_uniform_(self._uvqk_weight)
        nn.init.xavier_uniform_(self._output_weight)

    def forward(
        self,
        x: torch.Tensor,
        seq_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on all rows.

        Args:
            x: ``[T, D]``.
            seq_offsets: int64 ``[B + 1]``.
            max_seq_len: host integer, an upper bound of this batch's lengths (never below the longest).
            num_targets: int64 ``[B]``, candidates at the end of each sequence, or ``None``.

        Returns:
            ``[T, D]``, dtype of x.
        """
        self.check_mode()
        c = self.config
        seed = self.next_dropout_seed(x.device) if self.training else 0
        call = AttentionCall(
            seq_offsets,
            max_seq_len,
            c.alpha,
            self.attention_normaliser(seq_offsets),
            num_targets if c.target_aware else None,
            c.causal,
            c.max_attn_len,
            c.contextual_seq_len,
        )
        parameters = self._uvqk_parameters()
        if why_not_fused(x, self.projection, c.use_group_norm, c.backend) is None:
            output = OutputParameters(self._output_norm_weight, self._output_norm_bias, self._output_weight)
            ratio = c.output_dropout_ratio if self.training else 0.0
            return hstu_layer(x, parameters, output, self.projection, call, ratio, seed, c.recompute_y)
        parameters = UvqkParameters(*(_cast(parameter, x) for parameter in parameters))
        u, attention = hstu_preprocess_attention(x, parameters, self.projection, call, c.backend)
        return self.output(x, u, attention, seed)

    def _uvqk_parameters(self) -> UvqkParameters:
        return UvqkParameters(self._input_norm_weight, self._input_norm_bias, self._uvqk_weight, self._uvqk_beta)

    def forward_targets_only(
        self, x: torch.Tensor, seq_offsets: torch.Tensor, candidates: CandidateRows, computation: str = "absorbed"
    ) -> torch.Tensor:
        """Run the layer for the candidate rows alone: the same function of the same inputs as ``forward`` there.

        It draws one dropout seed, as ``forward`` does, and each candidate keeps the mask of its row in the full batch.
        Only for layers that ``modules.targets_only.static_blockers`` finds nothing against.

        Args:
            x: ``[T, D]``, all rows. seq_offsets: int64 ``[B + 1]``.
            candidates: which rows are candidates.
            computation: ``"absorbed"`` or ``"materialised"``.

        Returns:
            ``[C, D]``, candidates sequence after sequence, dtype of x.
        """
        self.check_mode()
        c = self.config
        with torch.autocast(x.device.type, enabled=False):  # products run in the dtype of x
            own, u, attention = candidate_attention(
                x,
                seq_offsets,
                candidates,
                self._uvqk_parameters(),
                self.projection,
                c.alpha,
                self.attention_normaliser(seq_offsets),
                computation,
                c.backend,
            )
        seed = self.next_dropout_seed(x.device) if self.training else 0
        return self._project_output(own, u, attention, seed, candidates.rows)

    def output(
        self,
        x: torch.Tensor,
        u: torch.Tensor,
        attention: torch.Tensor,
        seed: int | torch.Tensor,
        row_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x + LMSD(attention, u) · W_out`` for the given rows.

        Args:
            x: ``[N, D]`` residual rows. u, attention: ``[N, H · d_v]``, u before its SiLU.
            seed: the forward's dropout seed (unused in evaluation).
            row_indices: int64 ``[N]``, the row numbers in the full batch when only some rows are computed: they keep
                the dropout mask they would have had there.
        """
        args = (x, u, attention, seed, row_indices)
        if self.config.recompute_y and torch.is_grad_enabled():
            # The op draws by (seed, row), not from the generator, so running it again gives the same mask.
            return checkpoint(self._project_output, *args, use_reentrant=False, preserve_rng_state=False)
        return self._project_output(*args)

    def _project_output(self, x, u, attention, seed, row_indices) -> torch.Tensor:
        c = self.config
        y = hstu_lmsd(
            attention,
            u,
            self._output_norm_weight,
            self._output_norm_bias,
            eps=NORM_EPS,
            dropout_ratio=c.output_dropout_ratio if self.training else 0.0,
            seed=seed,
            row_indices=row_indices,
            num_groups=c.num_heads if c.use_group_norm else 1,
            backend=c.backend,
        )
        return torch.addmm(x, y, _cast(self._output_weight, x))

    def attention_normaliser(self, seq_offsets: torch.Tensor) -> float | torch.Tensor:
        """The attention divisor N: a float, or under ``batch_max`` a 0-d fp32 tensor on the batch's device."""
        if self.config.attn_norm == "max_seq_len":
            return float(self.config.max_seq_len)
        lengths = seq_offsets.diff()
        return (lengths.max() if lengths.numel() else seq_offsets[-1]).clamp_min(1).float()

    def next_dropout_seed(self, device: torch.device) -> torch.Tensor:
        """One int64 ``[1]`` from the device's default generator: drawn once per training forward, whatever the path."""
        return torch.empty(1, dtype=torch.int64, device=device).random_()

    def check_mode(self) -> None:
        """Raise if a layer that was built for inference is asked to train."""
        if self.config.is_inference and self.training:
            raise ValueError("is_inference=True but the layer is in training mode: call eval() or build it without it")


def _cast(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The parameter in the dtype of x, unless autocast looks after dtypes."""
    return parameter if torch.is_autocast_enabled(x.device.type) else parameter.to(x.dtype)


class STUStack(nn.Module):
    """STU layers one after the other, on the same sequences."""

    def __init__(self, layers: Iterable[STULayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[STULayer]:
        return iter(cast(Iterable[STULayer], self.layers))

    @property
    def sort_by_length(self) -> bool:
        """Whether the layers want the longest sequences first."""
        return any(layer.config.sort_by_length for layer in self)

    def forward(
        self,
        x: torch.Tensor,
        seq_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T, D]`` → ``[T, D]``; arguments as ``STULayer.forward``."""
        return self._run(self, x, seq_offsets, max_seq_len, num_targets)

    def _run(self, layers, x, seq_offsets, max_seq_len, num_targets) -> torch.Tensor:
        """The given layers one after the other; what they would each assert of the sequences is asserted once."""
        prefix = max((layer.config.contextual_seq_len for layer in layers), default=0)
        check_sequences(seq_offsets, x.shape[0], max_seq_len, num_targets, prefix)
        with counts_settled():
            for layer in layers:
                x = layer(x, seq_offsets, max_seq_len, num_targets)
        return x

    def forward_targets_only(
        self,
        x: torch.Tensor,
        seq_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor,
        candidates: CandidateRows,
        computation: str = "absorbed",
    ) -> torch.Tensor:
        """``[T, D]`` → ``[C, D]``: every layer but the last on all rows, the last for the candidates alone."""
        *others, last = self
        x = self._run(others, x, seq_offsets, max_seq_len, num_targets)
        return last.forward_targets_only(x, seq_offsets, candidates, computation)
