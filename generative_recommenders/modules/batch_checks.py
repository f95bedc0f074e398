"""What must hold of a batch before the model believes it: features, lengths per sample, ids.

Rows of features are matched by their place, so features of the same events whose lengths differ in any sample would be
read misaligned, however equal their totals are. On a CPU the numbers are read; on a GPU they are asserted there (see
``ops.checks``) and everything that the model makes of them afterwards is right by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec import JaggedTensor, KeyedJaggedTensor

from generative_recommenders.modules.dlrm_config import DlrmHSTUConfig
from generative_recommenders.ops.checks import assert_on_device, check_counts, whole_numbers

Features = Mapping[str, JaggedTensor]
ACTION_WEIGHT = "action_weight"
ACTION_TIMESTAMP = "action_timestamp"
QUERY_TIME = "item_query_time"


def to_dict(where: str, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """Feature name → its jagged values. TorchRec's own ``to_dict`` fails for a batch of 0 sequences.

    Raises:
        ValueError: values that belong to no sample.
    """
    if features.stride() > 0:
        counted, there = sum(features.length_per_key()), features.values().numel()
        if counted != there:
            raise ValueError(f"{where} has {there} values but its lengths add up to {counted}")
        return features.to_dict()
    nothing = JaggedTensor(values=features.values()[:0], lengths=features.lengths()[:0])
    return dict.fromkeys(features.keys(), nothing)


def check_batch(config: DlrmHSTUConfig, history: Features, candidates: Features, labels: Sequence[str]) -> None:
    """Raise ``ValueError`` naming the feature that is missing, has another number of rows or, on a CPU, other lengths
    or an id outside its table.

    Args:
        history, candidates: by feature name, of the same samples.
        labels: label features, checked where the candidates carry them.
    """
    samples = _samples(history), _samples(candidates)
    if samples[0] != samples[1]:
        raise ValueError(f"uih has {samples[0]} sequences but candidates have {samples[1]}")
    groups = (
        ("uih", history, config.item_feature_names + (ACTION_WEIGHT, ACTION_TIMESTAMP)),
        ("candidates", candidates, config.candidate_feature_names + (QUERY_TIME,)),
    )
    for where, features, names in groups:
        for name in names + (config.contextual_feature_names if where == "uih" else ()):
            if name not in features:
                raise ValueError(f"{where} has no feature {name!r}; it has {', '.join(features)}")
            whole_numbers(f"{where} feature {name!r}", features[name].values())
        together = names + tuple(name for name in labels if where == "candidates" and name in features)
        _check_rows(where, features, together)
        _check_lengths(where, features, together)
    _check_contextual_lengths(history, config.contextual_feature_names)
    _check_ids(config, history, candidates)
    check_counts(f"uih feature {ACTION_WEIGHT!r}", history[ACTION_WEIGHT].values())  # -1 would have every bit set


def assert_ids(ids: torch.Tensor) -> None:
    """Assert on the ids' device that none is negative: table look-ups there refuse ids past the end, not these."""
    if ids.device.type != "cpu" and ids.numel():
        assert_on_device(ids.min() >= 0, "a feature has a negative id: ids are 0 to the rows of their table - 1")


def _samples(features: Features) -> int:
    return next(iter(features.values())).lengths().numel()


def _check_rows(where: str, features: Features, names: Sequence[str]) -> None:
    """Numbers of values, which the host knows."""
    rows = features[names[0]].values().numel()
    for name in names[1:]:
        if features[name].values().numel() != rows:
            raise ValueError(
                f"{where} feature {name!r} has {features[name].values().numel()} values but {names[0]!r} has "
                f"{rows}: features of the same events need the same number"
            )


def _check_lengths(where: str, features: Features, names: Sequence[str]) -> None:
    """Equal lengths in every sample, of as many values as there are."""
    first, rows = features[names[0]].lengths(), features[names[0]].values().numel()
    if first.numel() == 0:
        return
    if first.device.type != "cpu":
        lengths = torch.stack([features[name].lengths() for name in names])
        ok = (lengths == first).all() & (first.min() >= 0) & (first.sum() == rows)
        assert_on_device(ok, f"{where}: {', '.join(names)} must have the same lengths in every sample"[:240])
        return
    _check_own_lengths(where, names[0], first, rows)
    for name in names[1:]:
        other = features[name].lengths()
        if not torch.equal(other, first):
            sample = int((other != first).int().argmax())
            raise ValueError(
                f"{where} feature {name!r} has {int(other[sample])} values in sample {sample} but {names[0]!r} has "
                f"{int(first[sample])}: features of the same events need the same lengths"
            )


def _check_own_lengths(where: str, name: str, lengths: torch.Tensor, rows: int) -> None:
    if int(lengths.min()) < 0 or int(lengths.sum()) != rows:
        raise ValueError(f"{where} feature {name!r} has {rows} values but lengths {lengths.tolist()[:8]}")


def _check_contextual_lengths(history: Features, names: Sequence[str]) -> None:
    """Any number of values per sample, but as many as there are in all."""
    if not names or _samples(history) == 0:
        return
    rows = [history[name].values().numel() for name in names]
    lengths = [history[name].lengths() for name in names]
    if lengths[0].device.type == "cpu":
        for name, own, count in zip(names, lengths, rows, strict=True):
            _check_own_lengths("uih", name, own, count)
        return
    stacked = torch.stack(lengths)
    sums = stacked.sum(1)
    # One number if all features have as many values, as they do with one value per sample.
    fits = (sums == rows[0]).all() if len(set(rows)) == 1 else torch.stack(
        [total == count for total, count in zip(sums, rows, strict=True)]
    ).all()  # fmt: skip
    assert_on_device(fits & (stacked.min() >= 0), f"uih: lengths of {', '.join(names)} do not fit their values"[:240])


def _check_ids(config: DlrmHSTUConfig, history: Features, candidates: Features) -> None:
    """Ids on a CPU must be rows of their tables."""
    items = zip(config.item_feature_names, config.candidate_feature_names, strict=True)
    features = [("uih", name, name, history) for name in config.contextual_feature_names + config.item_feature_names]
    features += [("candidates", name, table, candidates) for table, name in items]
    for where, name, table, values in features:
        ids, rows = values[name].values(), config.table_rows[table]
        if ids.device.type != "cpu" or ids.numel() == 0:
            continue
        least, most = ids.aminmax()
        if least < 0 or most >= rows:
            bad = int(least if least < 0 else most)
            raise ValueError(
                f"{where} feature {name!r} has the id {bad}: table {table!r} has {rows} rows, 0 to {rows - 1}"
            )
