"""The run of a recipe: its launch, its folder, training, saving and resuming, and what it says at the end."""
