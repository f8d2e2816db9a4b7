"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): K small heads on the last hidden state. Head k guesses the token
k + 1 places ahead, so one forward pass of the model yields more than one token."""
