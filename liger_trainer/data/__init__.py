"""What rows and answers can be: formats of rows, the named chat templates, and reward functions."""
