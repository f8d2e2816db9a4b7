"""Counts what a training step takes up on a GPU, without a GPU: the step runs on tensors without values."""
