"""Checks before the first step: what trains without an error, and is found out only when the model is used."""
