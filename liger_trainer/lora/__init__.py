"""PEFT's LoRA on linear layers: recognised, proven, and computed with the base layer."""
