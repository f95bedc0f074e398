"""The figures of a run that MLPerf's log announces beside its options."""

from __future__ import annotations

import pathlib

from generative_recommenders.train.loop import Trainer

WIRE_PRECISION = {"float32": "fp32", "float16": "fp16", "bfloat16": "bfloat16"}


def mlperf_figures(trainer: Trainer, config_file: str) -> dict[str, object]:
    """What ``MlperfLog.begin`` asks for. ``config_file``: the last gin file that was named."""
    config, world, dataset, meter = trainer.config, trainer.world, trainer.dataset, trainer.meter
    return {
        "platform": f"{world.size}x{meter.device_name}",
        "global_batch_size": config.train.batch_size * world.size,
        "train_samples": sum(window.num_samples for window in dataset.windows),
        "eval_samples": dataset.holdout.num_samples,
        "max_sequence_length": meter.max_seq_len,
        "precision": meter.precision,
        "wire_precision": WIRE_PRECISION[config.sharding.wire_precision],
        "config_filename": pathlib.Path(config_file).name,
    }
