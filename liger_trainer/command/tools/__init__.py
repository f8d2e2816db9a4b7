"""The commands beside training: fit, verify, compare, chat, merge, doctor, and those of speculative heads."""
