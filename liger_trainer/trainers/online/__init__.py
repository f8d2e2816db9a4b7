"""Rows that a policy generates: their order, their old log-probabilities, their weights in an engine."""
