"""A tiny model with adapters whose frozen base is in eight bits, and one step of it."""

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer.patching.quantize_base import quantize_base

LAYERS = 14  # two layers of seven projections


def adapted(dtype=torch.float32, model=None, **options):
    """A model with a LoRA on all its linear layers, of which no part is zero."""
    model = tiny_model("llama", dtype=dtype) if model is None else model
    torch.manual_seed(3)
    config = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**config)).train()


def frozen(dtype=torch.float32, model=None, **options):
    """`adapted`, with its base in eight bits."""
    model = adapted(dtype, model, **options)
    quantize_base(model)
    return model


def step(model, autocast=None, seed=1, backwards=1):
    """Loss and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = model(**collate(ragged_rows(4))).loss
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(got, want):
    """The relative distance of the losses, and that of all gradients together."""
    assert list(got) == list(want)
    apart = sum(((got[n] - w).double() ** 2).sum() for n, w in want.items() if n != "loss")
    size = sum((w.double() ** 2).sum() for n, w in want.items() if n != "loss")
    return abs(float(got["loss"] / want["loss"]) - 1), float((apart / size) ** 0.5)
