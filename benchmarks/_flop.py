"""Counts the floating-point operations of a training step, per token."""

import torch


def flop_per_token(model, run, length):
    """FLOP of products and, for causal attention, 6 * length * heads * head_dim per layer, without recomputation.

    `length` is the number of tokens in a row. For rows of uneven length, it is the sum of squared lengths divided by
    the sum of lengths, which is attention's average cost per token.
    """
    attention = 6 * length * sum(map(width_of_queries, layer_configs(model.config.get_text_config())))
    return flop_of_products(model, run) + (attention * 4 / 3 if run.trainer == "dpo" else attention)


def layer_configs(config):
    """The config of each layer: one for all, unless layers have heads of several sizes (Gemma 4)."""
    return getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers


def width_of_queries(config):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head_dim


def linear_weights(model):
    """{name: weight} of linear layers."""
    from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear

    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | FrozenFloat8Linear)}
    return {n: m.bits if isinstance(m, FrozenFloat8Linear) else m.weight for n, m in layers.items()}


def flop_of_products(model, run):
    """6 for each weight of a product (4 if it is frozen; only the experts that a token uses).

    For DPO, the reference's forward pass adds 2 for each.
    """
    linear = linear_weights(model).values()
    weights = sum((6 if w.requires_grad else 4) * numbers_of(w) for w in linear)
    config = model.config.get_text_config()
    experts = [p for name, p in model.named_parameters() if name.endswith("_proj") and p.ndim == 3]
    weights += sum((6 if p.requires_grad else 4) * p[0].numel() * config.num_experts_per_tok for p in experts)
    packed = [p for name, p in model.named_parameters() if name.endswith("_proj_blocks")]
    weights += sum(4 * 2 * p[0].numel() * config.num_experts_per_tok for p in packed)
    bits = [p for name, p in model.named_parameters() if name.endswith("_proj_bits")]
    weights += sum(4 * p[0].numel() * config.num_experts_per_tok for p in bits)
    return weights + (2 * sum(map(numbers_of, linear)) if run.trainer == "dpo" else 0)


def flop_of_layers(model):
    """2 for each weight of the linear layers except the head: the recomputation per token of all layers."""
    return 2 * sum(numbers_of(w) for name, w in linear_weights(model).items() if "lm_head" not in name)


def numbers_of(weight):
    """The number of values in a weight."""
    return weight.quant_state.shape.numel() if type(weight).__name__ == "Params4bit" else weight.numel()
