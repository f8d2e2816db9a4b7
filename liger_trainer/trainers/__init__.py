"""The trainers, one file each with its config beside it, and what they share."""
