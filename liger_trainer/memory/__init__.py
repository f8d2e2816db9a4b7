"""The memory of a training: what is recomputed, what is swapped out, and `activation_checkpointing: auto`."""
