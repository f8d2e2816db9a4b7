"""The rows of a recipe: found, brought into a trainer's form, checked, counted and shown."""
