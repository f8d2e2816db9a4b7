"""`optimizer_in_backward`: the optimizer steps each weight in the backward pass, and its gradient is freed at once.

The optimizer is the one that the trainer has made. For the step of one weight, its groups are shown to it with that
weight alone. So its states, its groups and its learning rates are where they always are, and a checkpoint is the same.
The step that the trainer calls after the backward pass finds no gradients and changes nothing. It has the optimizer's
hooks called once a step.
"""

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_NO_WEIGHT = types.SimpleNamespace(grad=None)  # what optimizers pass over


class OptimizerInBackward:
    """Steps an optimizer for one weight at a time, as the gradients of a training step arrive.

    Weights have hooks from the beginning of a training step until its optimizer step, and none in between.

    Args:
        optimizer (`torch.optim.Optimizer`): One whose step of a weight depends on no other weight.
            `in_backward_checks.py` refuses others.
        model (`nn.Module`): The model whose gradients `grad_norm` counts, and whose names of weights stand in errors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        self.optimizer, self.model = optimizer, model
        self._norms: dict[nn.Parameter, torch.Tensor] = {}  # of the weights that have been stepped in this step
        self._failed = False  # while some of them had been stepped, and others had not
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._hooks: list[Any] = []
        self._end_hook = optimizer.register_step_pre_hook(self._end)
        self._by_place = _looks_weights_up_by_place(optimizer)
        if self._by_place:
            with _without_gradients(optimizer):
                plain_step(optimizer)  # what it does first, it does for all weights

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `step(*args, **kwargs)`, the forward and backward pass of a training step."""
        self._refuse_half_a_step()
        if not self._hooks:
            self._norms = {}
            self._begin()
        try:
            return step(*args, **kwargs)
        except BaseException:
            self._failed = bool(self._norms)
            raise

    def close(self) -> None:
        """Leave optimizer and weights without our hooks."""
        self._end_hook.remove()
        self._remove_hooks()

    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the step, as `torch.nn.utils.clip_grad_norm_` would have found it."""
        norms = (self._norms.get(p, None if p.grad is None else _norm(p.grad)) for p in self.model.parameters())
        return torch.nn.utils.get_total_norm([norm for norm in norms if norm is not None])

    def _begin(self) -> None:
        for group in self.optimizer.param_groups:
            for place, weight in enumerate(group["params"]):
                if weight.requires_grad:
                    arrived = functools.partial(self._arrived, group, place if self._by_place else 0)
                    self._hooks.append(weight.register_post_accumulate_grad_hook(arrived))

    def _arrived(self, group: dict[str, Any], place: int, weight: nn.Parameter) -> None:
        with self._lock:
            if weight in self._norms:
                raise RuntimeError(self._arrived_twice(weight))
            self._norms[weight] = _norm(weight.grad)
            step_alone(self.optimizer, group, weight, place)

    def _end(self, *_: Any) -> None:
        self._refuse_half_a_step()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _refuse_half_a_step(self) -> None:
        if self._failed:
            raise RuntimeError(
                "A training step has failed in its backward pass when some weights had taken their optimizer step and "
                "others had not (optimizer_in_backward: true). Resume from the last checkpoint."
            )

    def _arrived_twice(self, weight: nn.Parameter) -> str:
        name = next((name for name, p in self.model.named_parameters() if p is weight), "a weight")
        return (
            f"optimizer_in_backward is true, and {name} gets a second gradient in one step, when it has taken its "
            "optimizer step with the first. Either there are two backward passes in the step, or reentrant "
            "checkpointing runs a layer of its own for each use of the weight. Set optimizer_in_backward to false, or "
            'activation_checkpointing_kwargs to {"use_reentrant": false}. Some weights have changed already: resume '
            "from the last checkpoint."
        )


def _norm(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return torch.nn.utils.get_total_norm([gradient])


@torch.no_grad()
def step_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: nn.Parameter, place: int = 0) -> None:
    """Step `optimizer` for `weight` alone, and free its gradient.

    Args:
        optimizer (`torch.optim.Optimizer`): Its hooks are not called.
        group (`dict`): That of its `param_groups` in which the weight is.
        weight (`nn.Parameter`): Has a gradient.
        place (`int`): Where in its group the weight is shown to the optimizer.
    """
    groups = [(each, each["params"]) for each in optimizer.param_groups]
    for each, _ in groups:
        each["params"] = []
    group["params"] = [_NO_WEIGHT] * place + [weight]
    try:
        plain_step(optimizer)
    finally:
        for each, weights in groups:
            each["params"] = weights
    weight.grad = None
    # Fused optimizers do not tell autograd, which would have to refuse whatever needs the old values still
    torch.autograd.graph.increment_version(weight)


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Step `optimizer` without the hooks that PyTorch puts around its `step`."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


def _looks_weights_up_by_place(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has options for single weights, by their place in its groups, as those of bitsandbytes have."""
    return type(optimizer).__module__.startswith("bitsandbytes.")


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    kept = [(weight, weight.grad) for group in optimizer.param_groups for weight in group["params"]]
    for weight, _ in kept:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in kept:
            weight.grad = gradient
