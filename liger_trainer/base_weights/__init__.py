"""Weights of the base that its class in transformers does not load, such as multi-token-prediction heads."""
