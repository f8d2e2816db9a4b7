"""The fused LM head: the module and its parameters, the stand-in for its logits, and the calls that it answers."""
