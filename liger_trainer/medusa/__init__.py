"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): K small heads on the last hidden state, each of which guesses a
token further ahead, so that one forward pass of the model yields more than one token."""
