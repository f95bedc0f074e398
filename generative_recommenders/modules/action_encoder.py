"""Action bits of history rows → embeddings; candidates get a learned stand-in, so that their action cannot leak."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from generative_recommenders.modules.layers import swish_mlp

MAX_ACTION_BITS = 10
ACTION_INIT_STD = 0.1


class ActionEncoder(nn.Module):
    """Each set bit contributes its own learned vector (zero if unset); the vectors of all bits stand side by side.

    A row's encoding depends only on which of the k bits are set. There are 2^k such patterns, so the encoder and the
    MLP after it work on those few rows (plus one for candidates), and the T rows of a batch only look theirs up.

    Args:
        action_weights: the bit (or bits) of each action, for example (1, 2, 4).
        action_dim: width of one action's vector.
        hidden_dim, output_dim: sizes of the MLP on the concatenated vectors.
        backend: as ``SwishLayerNorm``.
    """

    action_weights: torch.Tensor
    pattern_powers: torch.Tensor
    patterns: torch.Tensor

    def __init__(
        self,
        action_weights: Sequence[int],
        action_dim: int,
        hidden_dim: int,
        output_dim: int,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= len(action_weights) <= MAX_ACTION_BITS:
            raise ValueError(f"action_weights={tuple(action_weights)}: give 1 to {MAX_ACTION_BITS} actions")
        self.num_actions = len(action_weights)
        self.register_buffer("action_weights", torch.tensor(action_weights, dtype=torch.int64), persistent=False)
        powers = 2 ** torch.arange(self.num_actions)
        self.register_buffer("pattern_powers", powers, persistent=False)
        patterns = (torch.arange(2**self.num_actions)[:, None] & powers) > 0
        self.register_buffer("patterns", patterns.float(), persistent=False)
        self.action_embedding = nn.Parameter(torch.empty(self.num_actions, action_dim))
        self.target_action_embedding = nn.Parameter(torch.empty(1, self.num_actions * action_dim))
        nn.init.normal_(self.action_embedding, std=ACTION_INIT_STD)
        nn.init.normal_(self.target_action_embedding, std=ACTION_INIT_STD)
        self.mlp = swish_mlp(self.num_actions * action_dim, hidden_dim, output_dim, backend)

    def forward(self, action_bits: torch.Tensor, num_candidates: int) -> torch.Tensor:
        """History bits int64 ``[Lh]`` → ``[Lh + num_candidates, output_dim]``, the candidates' rows last."""
        return F.embedding(self.pattern_of(action_bits, num_candidates), self.table())

    def table(self) -> torch.Tensor:
        """The encoding of each pattern, candidates' last: ``[2^k + 1, output_dim]``."""
        rows = (self.patterns[:, :, None] * self.action_embedding).flatten(1)
        return self.mlp(torch.cat([rows, self.target_action_embedding]))

    def pattern_of(self, action_bits: torch.Tensor, num_candidates: int) -> torch.Tensor:
        """History bits int64 ``[Lh]`` → row of the table, int64 ``[Lh + num_candidates]``."""
        pattern = (((action_bits[:, None] & self.action_weights) > 0) * self.pattern_powers).sum(1)
        return F.pad(pattern, (0, num_candidates), value=2**self.num_actions)
