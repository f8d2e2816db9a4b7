"""Keeps weights as the base's checkpoint has them: layers that transformers does not load, and MXFP4 experts."""
