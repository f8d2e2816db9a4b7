"""The states of optimizers, and what their step takes in addition."""

from typing import Any

import torch
from transformers import Trainer

from liger_trainer.errors import RecipeError

_BYTES = {  # for each number of a weight, by libraries that need a GPU
    "adamw_8bit": 2, "adamw_bnb_8bit": 2, "lion_8bit": 1, "rmsprop_bnb_8bit": 1, "ademamix_8bit": 3,
    "rmsprop_bnb": 4, "lion_32bit": 4,
}  # fmt: skip


def make(args: Any, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer | int:
    """Return the optimizer of the arguments, or the bytes of its states. RecipeError if neither is known."""
    name = str(getattr(args.optim, "value", args.optim))
    numbers = sum(weight.numel() for weight in weights)
    if name in _BYTES:
        return _BYTES[name] * numbers
    if name == "adafactor":
        return sum(4 * (w.numel() if w.ndim < 2 else w.shape[-1] + w.shape[-2]) for w in weights)
    if name.startswith("adamw_torch") or name in ("sgd", "rmsprop", "adagrad"):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        if kind.__module__.startswith("torch.optim"):
            return kind(weights, **({} if options.get("fused") else {"foreach": True}), **options)
    known = "adamw_torch_fused, adamw_torch, sgd, rmsprop, adagrad, adafactor"
    raise RecipeError(
        f"optim is {name}, whose states liger-trainer fit does not know; it knows {known}, {', '.join(_BYTES)}."
    )
