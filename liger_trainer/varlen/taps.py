"""Reads what goes into modules such as decoder layers, in a call that computes padding and in one that does not.

Padding is left out of a call only if no hook sees its rows. The hooks of this file may: their caller takes rows either
way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def tapped(modules: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Context manager: a call of the model puts the inputs of its `modules` into the list that it gives, as called.

    They are (B, S, H) or, where the model left padding out, (1, T, H) with the T real tokens of the batch.
    """
    seen: list[torch.Tensor] = []

    def keep(_: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
