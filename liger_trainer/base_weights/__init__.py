"""Weights of the base's checkpoint that its class in transformers does not load, such as multi-token-prediction heads."""
