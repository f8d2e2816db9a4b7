"""Formats of rows, named chat templates, reward functions, and greedy answers."""
