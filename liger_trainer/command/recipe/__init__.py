"""A recipe: its file and options, what they may hold, and the model and the accelerate config that it names."""
