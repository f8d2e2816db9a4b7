"""The trainers, one file each with its config, and what they share."""
