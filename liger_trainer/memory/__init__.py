"""The memory of a training: what is computed again, what waits on the host, and `activation_checkpointing: auto`."""
