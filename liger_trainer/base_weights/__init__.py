"""Weights of the base as its checkpoint has them: what transformers does not load, and experts that stay in MXFP4."""
