"""The whole ranker: embedding tables, item tower, transducer, heads and losses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from generative_recommenders.modules.batch_checks import (
    ACTION_TIMESTAMP,
    ACTION_WEIGHT,
    QUERY_TIME,
    assert_ids,
    check_batch,
    to_dict,
)
from generative_recommenders.modules.dlrm_config import DlrmHSTUConfig, candidate_name
from generative_recommenders.modules.layers import swish_mlp
from generative_recommenders.modules.multitask import MultitaskHead, TaskConfig
from generative_recommenders.modules.positional_encoder import PositionalEncoder
from generative_recommenders.modules.postprocessors import make_postprocessor
from generative_recommenders.modules.preprocessor import ContextualPreprocessor, EventRows, PreparedSequence
from generative_recommenders.modules.stu import STULayer, STUStack
from generative_recommenders.modules.table_init import fill_table_rows_
from generative_recommenders.modules.table_names import table_name
from generative_recommenders.modules.targets_only import TargetsOnlyGate
from generative_recommenders.modules.transducer import HSTUTransducer
from generative_recommenders.ops.candidate_attention import TargetSummary
from generative_recommenders.ops.checks import assert_on_device, counts_settled
from generative_recommenders.ops.encode import JoinedFeatures, join_features, why_not_fused
from generative_recommenders.ops.jagged import complete_cumsum

__all__ = ["DlrmHSTU", "DlrmHSTUConfig", "DlrmOutput", "TaskConfig", "candidate_name", "embedding_configs"]


@dataclasses.dataclass(frozen=True)
class DlrmOutput:
    """Result of a forward on B sequences with C candidates in all; floating fields are fp32, or float64 in
    a float64 model.

    Attributes:
        user_embedding, item_embedding: ``[C, D]``.
        predictions: ``[tasks, C]``: probabilities of binary tasks, values of regression tasks.
        logits: ``[tasks, C]``: log odds of binary tasks, values of regression tasks. Rank by these: probabilities of
            different candidates may round to one number.
        labels, weights: ``[tasks, C]``, or ``None`` if the candidates carry no label feature.
        losses: task name → scalar, mean over this batch's candidates times the task's weight (0 for no candidates).
        loss: scalar, the sum of ``losses``.
        num_tokens: T, rows of all joined sequences.
        seq_lengths: int64 ``[B]``, rows of each.
        num_targets: int64 ``[B]``, candidates of each.
        full_embeddings, full_offsets: every row of the stack's output ``[T, D]`` and its offsets, if asked for.
    """

    user_embedding: torch.Tensor
    item_embedding: torch.Tensor
    predictions: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor | None
    weights: torch.Tensor | None
    losses: dict[str, torch.Tensor]
    loss: torch.Tensor
    num_tokens: int
    seq_lengths: torch.Tensor
    num_targets: torch.Tensor
    full_embeddings: torch.Tensor | None = None
    full_offsets: torch.Tensor | None = None


def embedding_configs(config: DlrmHSTUConfig, seed: int) -> list[EmbeddingConfig]:
    """One table per feature, with ``table_name`` of the feature; history and candidate feature share it."""
    tables = []
    for name in config.contextual_feature_names + config.item_feature_names:
        rows, columns = config.table_rows[name], config.table_dim
        shared = [candidate_name(name)] if name in config.item_feature_names else []
        fill = functools.partial(_fill_whole_table, seed=seed, name=name, num_rows=rows, num_columns=columns)
        tables.append(
            EmbeddingConfig(
                name=table_name(name),
                num_embeddings=rows,
                embedding_dim=columns,
                feature_names=[name, *shared],
                init_fn=fill,
            )
        )
    return tables


def _fill_whole_table(weight: torch.Tensor, seed: int, name: str, num_rows: int, num_columns: int) -> None:
    if weight.device.type != "meta":
        fill_table_rows_(weight.detach(), seed, name, num_rows, num_columns)


class DlrmHSTU(nn.Module):
    """DLRM with an HSTU sequence encoder.

    Args:
        config: sizes and choices.
        device: of all parameters but the tables.
        embedding_device: of the tables, ``None`` for ``device``. ``"meta"`` allocates nothing: whoever shards the
            tables fills its own rows with ``table_init.fill_table_rows_``.
        seed: of all weights. Tables have a seed each (hash of seed and name); dense parameters are drawn on the CPU
            in a fixed order, so they are the same on every device and rank. Global generators are left alone.
    """

    def __init__(
        self,
        config: DlrmHSTUConfig,
        device: torch.device | str = "cpu",
        embedding_device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        tables_device = torch.device(device if embedding_device is None else embedding_device)
        with torch.random.fork_rng(devices=[tables_device] if tables_device.type == "cuda" else []):
            tables = embedding_configs(config, seed)
            self.embedding_collection = EmbeddingCollection(tables=tables, device=tables_device)
            torch.manual_seed(seed)
            dim = config.hstu_embedding_dim
            item_width = len(config.item_feature_names) * config.table_dim
            self.item_tower = swish_mlp(item_width, config.item_tower_hidden_dim, dim, config.backend).to(device)
            self.transducer = _make_transducer(config).to(device)
            self.head = MultitaskHead(dim, config.tasks, config.head_hidden_dim, config.backend).to(device)

    def forward(
        self,
        uih: KeyedJaggedTensor,
        candidates: KeyedJaggedTensor,
        max_seq_len: int | None = None,
        target_counts: TargetSummary | None = None,
    ) -> DlrmOutput:
        """Score the candidates of B sequences.

        Args:
            uih: contextual features, item features, ``action_weight`` and ``action_timestamp`` (int64), stride B.
            candidates: candidate item features, ``item_query_time``, and the tasks' label features; without the latter
                nothing is compared and the loss is 0 (serving).
            max_seq_len: host integer, an upper bound of this batch's joined lengths. ``None`` takes the batch's own
                maximum on a CPU and the configured one on a GPU (where reading the batch's would wait for the device).
            target_counts: candidates per sequence as the host knows them, so that the targets-only gate need not wait
                for a GPU to read them.

        Raises:
            ValueError: a feature is missing or has other rows than its neighbours, in all or in any sample; an id is no
                row of its table; a sequence exceeds ``config.max_seq_len``. On a GPU, what would have to be read to be
                known (lengths, ids) fails a device-side assertion instead.
        """
        history, targets = to_dict("uih", uih), to_dict("candidates", candidates)
        check_batch(self.config, history, targets, self._label_features())
        with counts_settled():
            return self._score(history, targets, max_seq_len, target_counts)

    def _score(
        self,
        history: Mapping[str, JaggedTensor],
        targets: Mapping[str, JaggedTensor],
        max_seq_len: int | None,
        target_counts: TargetSummary | None,
    ) -> DlrmOutput:
        embedded = self.join(self.embed(history, targets))
        with torch.autocast(embedded.candidates.device.type, enabled=False):  # fp32 also where the caller casts
            item_embedding = self.item_tower(embedded.candidates)
        with self._autocast(item_embedding.device.type):
            sequence = self.prepare(embedded, history, targets)
            del embedded  # rows of every feature: most of the memory, and not needed by the stack
            bound = self._length_bound(sequence.layout.seq_lengths, max_seq_len)
            encoded = self.transducer.encode(sequence, bound, target_counts)
        result = self.head(encoded.candidates, item_embedding, self._label_values(targets))
        loss = sum(result.losses.values()) if result.losses else encoded.candidates.new_zeros(())
        return DlrmOutput(
            user_embedding=encoded.candidates,
            item_embedding=item_embedding,
            predictions=result.predictions,
            logits=result.logits,
            labels=result.labels,
            weights=result.weights,
            losses=result.losses,
            loss=loss,
            num_tokens=encoded.num_rows,
            seq_lengths=encoded.seq_lengths,
            num_targets=targets[self.config.candidate_feature_names[0]].lengths().long(),
            full_embeddings=encoded.full,
            full_offsets=encoded.full_offsets,
        )

    def embed(
        self, history: Mapping[str, JaggedTensor], candidates: Mapping[str, JaggedTensor]
    ) -> Mapping[str, JaggedTensor]:
        """All table look-ups in one call: feature name → rows ``[n, E]``."""
        c = self.config
        names = c.contextual_feature_names + c.item_feature_names + c.candidate_feature_names
        parts = [candidates[name] if name in c.candidate_feature_names else history[name] for name in names]
        batch = parts[0].lengths().numel()
        lengths = torch.cat([part.lengths() for part in parts])
        ids = torch.cat([part.values() for part in parts])
        assert_ids(ids)
        whole = isinstance(self.embedding_collection, EmbeddingCollection)  # and not its sharded stand-in
        if whole and next(self.item_tower.parameters()).dtype == torch.float64:
            return self._embed_float64(dict(zip(names, parts, strict=True)))
        features = KeyedJaggedTensor(
            keys=list(names),
            values=ids,
            lengths=lengths if batch else lengths.new_zeros(len(names)),
            stride=max(batch, 1),  # TorchRec cannot look up 0 sequences; 1 sequence without values gives the same rows
            length_per_key=[part.values().numel() for part in parts],  # known here, so no device sync to find out
        )
        return self.embedding_collection(features)

    def _embed_float64(self, features: Mapping[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The same look-ups, which TorchRec rounds to fp32: a model in float64 is one to compare others with."""
        tables = self.embedding_collection.embeddings
        of_table = dict(zip(self.config.candidate_feature_names, self.config.item_feature_names, strict=True))
        return {
            name: JaggedTensor(
                F.embedding(part.values(), tables[of_table.get(name, name)].weight), lengths=part.lengths()
            )
            for name, part in features.items()
        }

    def join(self, embedded: Mapping[str, JaggedTensor]) -> JoinedFeatures:
        """The inputs of the item tower (fp32) and of the transducer's MLPs (cast, history and candidates together)."""
        c = self.config
        history, candidates, context = (
            [embedded[name].values() for name in names]
            for names in (c.item_feature_names, c.candidate_feature_names, c.contextual_feature_names)
        )
        device = history[0].device.type
        with self._autocast(device):
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else history[0].dtype
        fused = why_not_fused(history[0], backend=c.backend) is None
        return join_features(history, candidates, context, dtype, fused)

    def prepare(
        self,
        embedded: JoinedFeatures,
        history: Mapping[str, JaggedTensor],
        candidates: Mapping[str, JaggedTensor],
    ) -> PreparedSequence:
        """The transducer's input: context, history and candidates of every sample as one jagged sequence."""
        c = self.config
        item = c.item_feature_names[0]
        events = EventRows(
            item=embedded.item,
            attributes=embedded.attributes,
            history_offsets=complete_cumsum(history[item].lengths()),
            candidate_offsets=complete_cumsum(candidates[candidate_name(item)].lengths()),
            history_timestamps=history[ACTION_TIMESTAMP].values(),
            candidate_timestamps=candidates[QUERY_TIME].values(),
        )
        lengths = [history[name].lengths() for name in c.contextual_feature_names]
        contextual = [(rows, complete_cumsum(n)) for rows, n in zip(embedded.others, lengths, strict=True)]
        return self.transducer.prepare(events, history[ACTION_WEIGHT].values(), contextual)

    def _autocast(self, device: str) -> torch.autocast:
        bf16 = self.config.autocast == "bfloat16" or (self.config.autocast == "auto" and device == "cuda")
        return torch.autocast(device, dtype=torch.bfloat16, enabled=bf16)

    def _length_bound(self, lengths: torch.Tensor, max_seq_len: int | None) -> int:
        """The host's upper bound of the joined lengths ``[B]``, never above the model's constant."""
        limit = self.config.max_seq_len
        if lengths.numel() == 0:
            return 0
        if lengths.device.type == "cpu":
            longest = int(lengths.max())
            if longest > limit:
                raise ValueError(
                    f"a sequence has {longest} rows (context + history + candidates) but max_seq_len={limit}: "
                    "raise max_seq_len or shorten the history"
                )
            return longest if max_seq_len is None else max(longest, min(max_seq_len, limit))
        bound = limit if max_seq_len is None else min(max_seq_len, limit)
        assert_on_device(lengths.max() <= bound, f"a sequence is longer than max_seq_len={bound}")
        return bound

    def _label_features(self) -> list[str]:
        return sorted({task.label_feature for task in self.config.tasks})

    def _label_values(self, candidates: Mapping[str, JaggedTensor]) -> dict[str, torch.Tensor] | None:
        names = self._label_features()
        absent = [name for name in names if name not in candidates]
        if not absent:
            return {name: candidates[name].values() for name in names}
        if self.training:
            raise ValueError(f"candidates carry no label feature {absent[0]!r}: add it, or call eval() to predict")
        return None


def _make_transducer(config: DlrmHSTUConfig) -> HSTUTransducer:
    num_contextual = len(config.contextual_feature_names)
    return HSTUTransducer(
        preprocessor=ContextualPreprocessor(
            input_dim=config.table_dim,
            output_dim=config.hstu_embedding_dim,
            hidden_dim=config.preprocessor_hidden_dim,
            num_contextual=num_contextual,
            num_attributes=len(config.item_feature_names) - 1,
            action_weights=config.action_weights,
            action_dim=config.action_dim,
            recompute=config.recompute_preprocessor,
            backend=config.backend,
        ),
        positional_encoder=PositionalEncoder(
            config.hstu_embedding_dim, config.num_position_buckets, config.num_time_buckets, num_contextual
        ),
        stack=STUStack(STULayer(config.layer_config(number)) for number in range(config.hstu_num_layers)),
        postprocessor=make_postprocessor(config.postprocessor, config.hstu_embedding_dim, config.full_turn),
        input_dropout_ratio=config.input_dropout_ratio,
        return_full_embeddings=config.return_full_embeddings,
        targets_only=TargetsOnlyGate.of(config),
        backend=config.backend,
    )
