"""Load a checkpoint into a fresh model of the tiny data set, write what came of it: ``load_and_save.py OUT …``.

Alone or under torchrun. No training, so that what was loaded can be compared to the bit.
"""

import argparse
import pathlib
import runpy
import sys

import torch

from generative_recommenders.train import build, checkpoint, datasets, distributed, gin_files
from generative_recommenders.train.checkpoint_meta import resolve
from generative_recommenders.train.progress import Progress

tiny_module = runpy.run_path(str(pathlib.Path(__file__).with_name("launch_tiny.py")))


def load_and_save(out, config, bindings, world, touch=False):
    """What was said of the load. ``touch``: first give every table and sum the value row + column / 1000 + 1."""
    options = gin_files.load([config], bindings)
    data = build.open_dataset(options, world)
    model, optimizers, _ = build.build_model(options, data, world)
    said = None
    if options.checkpoint.load:
        said = checkpoint.load(resolve(options.checkpoint.load), model, optimizers, options, data, world)
    if touch:
        fill(model, optimizers)
    checkpointer = checkpoint.Checkpointer(pathlib.Path(out), 2, options, world, data)
    checkpointer.save(model, optimizers, Progress(step=1), {})
    return said


@torch.no_grad()
def fill(model, optimizers):
    from generative_recommenders.train.checkpoint_fit import table_of, tensors_of

    for name, tensor in tensors_of(model, optimizers).items():
        if table_of(name) is None:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) / 1000 + len(name))
            continue
        for shard in tensor.local_shards():
            rows = torch.arange(shard.tensor.shape[0]) + shard.metadata.shard_offsets[0] + 1.0
            if shard.tensor.dim() == 2:
                columns = torch.arange(shard.tensor.shape[1]) + shard.metadata.shard_offsets[1]
                rows = rows[:, None] + columns / 1000
            shard.tensor.copy_(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--config")
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--touch", action="store_true")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    datasets.FACTORIES["tiny"] = tiny_module["tiny"]
    group = distributed.join(distributed.choose_device(given.device))
    load_and_save(given.out, given.config, given.bind, group, given.touch)
    distributed.leave(group)
    sys.exit(0)
