"""Ops: mathematics on tensors; knows nothing of models, configurations or files."""
