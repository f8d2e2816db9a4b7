"""Trains the multi-token prediction (MTP) head that comes with a checkpoint, and that transformers does not load."""
