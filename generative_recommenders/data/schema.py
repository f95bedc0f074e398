"""Which features a data set has: the one description that data, model and trainer agree on."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterable, Mapping

from generative_recommenders.errors import UserError

#: Bits of ``action_weight`` and ``item_action_weight``: the action an event stands for (0: no action of interest).
LISTEN_PLUS = 1
LIKE = 2
SKIP = 4

#: Feature names that every data set has, whatever its items and context look like.
ACTION_WEIGHT = "action_weight"
ACTION_TIMESTAMP = "action_timestamp"
QUERY_TIME = "item_query_time"
CANDIDATE_ACTION_WEIGHT = "item_action_weight"

#: What joins the parts of a cross's name (crosses.py), and therefore stands in no other feature's name.
CROSS_JOINT = "_x_"


#: Names of a batch that no attribute and no context column can have; ``id`` would be the candidate's item_candidate_id.
TAKEN = ("uid", "item_id", "id", ACTION_WEIGHT, ACTION_TIMESTAMP, QUERY_TIME, CANDIDATE_ACTION_WEIGHT)
#: Starts the candidate's name of every item feature.
CANDIDATE_PREFIX = "item_candidate_"
#: A name is part of file names, which have at most 255 bytes.
LONGEST_NAME = 200
NAME_RULE = (
    f"names are printable, have 1 to {LONGEST_NAME} bytes, differ in more than upper and lower case, hold no '/' and "
    f"no {CROSS_JOINT!r}, do not begin with {CANDIDATE_PREFIX!r}, and are not one of {', '.join(TAKEN)}"
)


def clashing_name(names: Iterable[str]) -> str | None:
    """The first name that has another meaning in a batch, or None."""
    clashes = lambda name: name in TAKEN or CROSS_JOINT in name or name.startswith(CANDIDATE_PREFIX)  # noqa: E731
    return next(filter(clashes, names), None)


def impossible_name(names: Iterable[str]) -> str | None:
    """The first name that no attribute or context column can have beside those before it (``NAME_RULE``), or None.

    Stricter than ``clashing_name``: a cache must also survive a file system that ignores upper and lower case.
    """
    seen = set()
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold()
        fits = name.isprintable() and 0 < len(name.encode(errors="replace")) <= LONGEST_NAME and "/" not in name
        if not fits or key in seen or clashing_name([key]):
            return name
        seen.add(key)
    return None


def candidate_name(item_feature: str) -> str:
    """The candidate's name of a history feature: ``item_id`` → ``item_candidate_id``, f → ``item_candidate_<f>``."""
    return "item_candidate_id" if item_feature == "item_id" else f"item_candidate_{item_feature}"


@dataclasses.dataclass(frozen=True)
class FeatureSchema:
    """Names of a batch's features and the rows of their embedding tables.

    ``item_features``: per-event features of the history, the item's id first, then its attributes; a candidate carries
    the same under ``candidate_name`` and shares their tables. ``contextual_features``: one value per sample (the
    user's id, crosses). ``table_rows``: rows of each feature's table, reserved row 0 included; every feature has one.
    ``label_features``: outcomes of the candidate beside its action bits, columns of the cache's ``labels``.
    """

    item_features: tuple[str, ...]
    contextual_features: tuple[str, ...]
    table_rows: Mapping[str, int]
    label_features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.item_features + self.contextual_features
        if not self.item_features:
            raise UserError("a feature schema needs at least one item feature (the item's id comes first)")
        if len(set(names)) != len(names):
            raise UserError(f"feature names must differ, got {', '.join(names)}")
        missing = [name for name in names if name not in self.table_rows]
        if missing:
            raise UserError(f"feature {missing[0]!r} has no table: give table_rows[{missing[0]!r}]")
        for name, rows in self.table_rows.items():
            if rows < 1:
                raise UserError(f"table_rows[{name!r}] is {rows}: a table needs at least the reserved row 0")

    @property
    def candidate_features(self) -> tuple[str, ...]:
        """Candidate names of the item features, in their order."""
        return tuple(candidate_name(name) for name in self.item_features)

    @property
    def uih_keys(self) -> tuple[str, ...]:
        """Keys of ``Batch.uih``, in order."""
        return self.contextual_features + self.item_features + (ACTION_WEIGHT, ACTION_TIMESTAMP)

    @property
    def candidate_keys(self) -> tuple[str, ...]:
        """Keys of ``Batch.candidates``, in order."""
        return self.candidate_features + (QUERY_TIME, CANDIDATE_ACTION_WEIGHT) + self.label_features
