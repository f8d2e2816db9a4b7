"""Which layers keep their activations for the backward pass: chosen from measured sizes, for a budget of memory."""
