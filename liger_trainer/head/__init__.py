"""Fuse the LM head with the loss: the head and its parameters, the stand-in for its logits, requests and answers."""
