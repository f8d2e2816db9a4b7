"""Recognises PEFT's LoRA on linear layers, proves it, and computes it together with the base layer."""
