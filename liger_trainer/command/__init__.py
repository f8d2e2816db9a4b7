"""The command `liger-trainer`: reading recipes, rows, models and rewards, running a recipe, and summing the run up."""
