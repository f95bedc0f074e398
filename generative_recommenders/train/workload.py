"""What a step works on, as far as planning needs it: tables, and how many rows samples have."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from generative_recommenders.data.crosses import is_cross, limit_rows
from generative_recommenders.data.dataset import RankingDataset
from generative_recommenders.data.reader import HistoryOptions
from generative_recommenders.data.schema import FeatureSchema
from generative_recommenders.data.yambda.layout import MIN_HISTORY
from generative_recommenders.data.yambda.public import PUBLIC
from generative_recommenders.errors import UserError
from generative_recommenders.train.gin_files import RunConfig

MEASURED_SAMPLES = 256
CERTAINTY = 6.0  # standard deviations between a batch's mean rows and what memory is planned for


@dataclasses.dataclass(frozen=True)
class Workload:
    """A data set as a plan sees it; ``name``, ``schema`` and ``history_length`` as ``RankingDataset`` has them.

    Attributes:
        least_rows, mean_rows, most_rows: joined rows (context, history, candidate) of a sample.
        train_samples, windows: of one pass; ``windows`` may be unknown.
        origin: where the figures come from, in words.
    """

    name: str
    schema: FeatureSchema
    history_length: int
    least_rows: int
    mean_rows: float
    most_rows: int
    train_samples: int
    windows: int | None
    origin: str

    def batch_rows(self, samples: int) -> float:
        """Rows per sample that a batch of so many samples does not exceed: what memory is planned for.

        Samples of a batch are drawn from a window at random, so its mean lies near theirs. Rows between least and most
        with that mean cannot spread wider than two values would, and a batch's mean spreads by 1 / √samples of it.
        """
        spread = math.sqrt(max((self.most_rows - self.mean_rows) * (self.mean_rows - self.least_rows), 0.0))
        return min(float(self.most_rows), self.mean_rows + CERTAINTY * spread / math.sqrt(samples))

    def lookups(self, rows: float) -> dict[str, list[float]]:
        """Table → look-ups per sample of ``rows`` rows by each of its features: history, then candidate."""
        history = max(rows - len(self.schema.contextual_features) - 1, 0.0)
        found = {name: [1.0] for name in self.schema.contextual_features}
        return found | {name: [history, 1.0] for name in self.schema.item_features}

    @property
    def has_limit(self) -> bool:
        """Whether it has crosses, which ``limited`` makes smaller."""
        return any(is_cross(feature) for feature in self.schema.contextual_features)

    def limited(self, rows: int) -> Workload:
        """The same with every cross hashed down to so many rows (``table_rows_limit``)."""
        tables, _ = limit_rows(self.schema.table_rows, rows)
        return dataclasses.replace(self, schema=dataclasses.replace(self.schema, table_rows=tables))

    def with_mean_rows(self, rows: float) -> Workload:
        """The same with another mean."""
        if not self.least_rows <= rows <= self.most_rows:
            raise UserError(
                f"--mean-rows {rows:g}: a sample has {self.least_rows} to {self.most_rows} rows with this configuration"
            )
        return dataclasses.replace(self, mean_rows=rows)


def of_dataset(dataset: RankingDataset) -> Workload:
    """Measured on samples spread evenly over the training windows."""
    windows, cache = dataset.windows or [dataset.holdout], dataset.cache
    first = cache.anchor_range(windows[0].start, windows[0].end)[0]
    last = cache.anchor_range(windows[-1].start, windows[-1].end)[1]
    samples = np.unique(np.linspace(first, last - 1, min(MEASURED_SAMPLES, max(last - first, 1))).astype(np.int64))
    lengths = dataset.reader.read(samples).uih["item_id"].lengths()
    around = len(dataset.schema.contextual_features) + 1
    return Workload(
        name=dataset.name,
        schema=dataset.schema,
        history_length=dataset.history_length,
        least_rows=around,
        mean_rows=float(lengths.double().mean()) + around,
        most_rows=dataset.history_length + around,
        train_samples=sum(window.num_samples for window in dataset.windows),
        windows=len(dataset.windows),
        origin=f"{dataset.name}: mean rows of {len(samples)} samples",
    )


def of_public_data(config: RunConfig) -> Workload:
    """What the run would find in the public data set that it names.

    Raises:
        UserError: a data set, or a size of it, whose tables nobody knows before it is prepared.
    """
    options, name = config.dataset_options, config.data.dataset
    size = PUBLIC.get(options["size"]) if name == "yambda" else None
    if size is None:
        known = ", ".join(f"yambda.size = {known!r}" for known in PUBLIC)
        raise UserError(
            f"--dry-run: the tables of {name} are not known before its data is prepared (published are those of "
            f"{known}); prepare it, then plan"
        )
    rows, overrides = {}, options["table_rows"] or {}
    for option in ("item_features", "contextual_features"):
        for feature in options[option]:
            try:
                rows[feature] = size.rows(feature)
            except KeyError:
                known = ", ".join(size.vocab)
                raise UserError(f"yambda.{option}: no feature {feature!r}: possible are {known} and crosses") from None
    unknown = [feature for feature in overrides if feature not in rows]
    if unknown:
        raise UserError(f"yambda.table_rows names {unknown[0]!r}, which is no feature of the run: {', '.join(rows)}")
    rows, _ = limit_rows(rows | dict(overrides), options["table_rows_limit"])
    schema = FeatureSchema(tuple(options["item_features"]), tuple(options["contextual_features"]), rows)
    history = HistoryOptions(options["history_length"], options["history_strategy"]).slots
    around, days = len(schema.contextual_features) + 1, min(options["train_days"], size.train_days)
    least = MIN_HISTORY[options["size"]] if options["min_history"] is None else options["min_history"]
    newest = min(history, least) if options["history_strategy"] == "last_n" else 0  # a pool may be empty
    mean = min(float(history), size.mean_history_at(history, options["history_strategy"]))
    return Workload(
        name=f"yambda_{options['size']}",
        schema=schema,
        history_length=history,
        least_rows=around + newest,
        mean_rows=mean + around,
        most_rows=history + around,
        train_samples=size.train_samples * days // size.train_days,
        windows=-(-days * 86_400 // options["window_seconds"]),
        origin=f"published sizes of Yambda {options['size']}: {size.events / 1e9:.2f} G events of {size.users:,} users",
    )
