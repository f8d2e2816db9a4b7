"""The command `liger-trainer`: recipes, rows, models and rewards, the life of a run, and its summary."""
