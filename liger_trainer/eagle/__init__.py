"""EAGLE-3 drafters (Li et al. 2025, arXiv:2503.01840): one decoder layer that reads three hidden states of a frozen
model and guesses its next tokens one after the other, each from its previous guess."""
