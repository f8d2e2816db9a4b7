"""Builds the optimizer of a recipe, or counts the bytes of its states if its library needs a GPU."""

from typing import Any

import torch
from transformers import Trainer

from liger_trainer.errors import RecipeError

_BYTES = {  # per trained number; these need bitsandbytes and a GPU
    "adamw_8bit": 2,
    "adamw_bnb_8bit": 2,
    "lion_8bit": 1,
    "rmsprop_bnb_8bit": 1,
    "ademamix_8bit": 3,
    "rmsprop_bnb": 4,
    "lion_32bit": 4,
}


def make(args: Any, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer | int:
    """Return the optimizer that `args` name, or the bytes of its states. RecipeError if neither is known."""
    name = str(getattr(args.optim, "value", args.optim))
    numbers = sum(weight.numel() for weight in weights)
    if name in _BYTES:
        return _BYTES[name] * numbers
    if name == "adafactor":
        return sum(4 * (w.numel() if w.ndim < 2 else w.shape[-1] + w.shape[-2]) for w in weights)
    if name.startswith("adamw_torch") or name in ("sgd", "rmsprop", "adagrad"):
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
        if optimizer_class.__module__.startswith("torch.optim"):
            foreach = {} if options.get("fused") else {"foreach": True}  # PyTorch's default on a GPU
            return optimizer_class(weights, **foreach, **options)
    known = "adamw_torch_fused, adamw_torch, sgd, rmsprop, adagrad, adafactor"
    raise RecipeError(f"optim is {name}, but liger-trainer fit only knows the states of {known}, {', '.join(_BYTES)}")
