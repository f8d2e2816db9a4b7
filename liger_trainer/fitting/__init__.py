"""Estimates the GPU memory of a training step without a GPU: the step runs on tensors without values."""
