"""Proofs before a model trains: rows without padding compute what the padded batch does."""
