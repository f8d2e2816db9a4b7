"""The commands beside training: fit, verify, compare, chat, merge, doctor and Medusa's two."""
