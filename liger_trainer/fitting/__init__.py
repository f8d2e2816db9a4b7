"""What a training step takes up on a GPU, found without one: it runs on tensors without values, and is counted."""
