"""Training: configuration, loop, optimizers, checkpoints, metrics and logging."""
