"""Averages the auxiliary loss of routers over the micro-batches of a step, in `LigerTrainer`.

A model adds its auxiliary loss to the loss of each micro-batch. `Trainer` divides the token losses by the number of
tokens in the whole step and adds the micro-batches up. So the auxiliary loss counts once per micro-batch, and once per
process. TRL's trainers average it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from accelerate import Accelerator
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.head.module import base_model_of

_NAMES = ("router_aux_loss_coef", "aux_loss_coef")


class RoutedArguments(Protocol):
    """The trainer arguments that the auxiliary loss depends on. Ours also have `router_aux_loss`."""

    gradient_accumulation_steps: int
    average_tokens_across_devices: bool
    n_gpu: int


class RoutedTrainer(Protocol):
    """The trainer attributes that the weight of the auxiliary loss depends on. None is written."""

    args: RoutedArguments
    model: nn.Module
    accelerator: Accelerator
    model_accepts_loss_kwargs: bool
    current_gradient_accumulation_steps: int

    def get_tp_size(self) -> int:
        """Return how many processes hold parts of each layer."""


def router_loss_weights(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Return where a model reads the weight of its auxiliary loss: (object, attribute, weight) for each place.

    The list is empty for a model without such a loss, and for a module without a transformers config.
    """
    base = base_model_of(model)
    config = _text_config_of(base)
    places = []
    for owner in (base, config):
        for name in _NAMES:
            weight = getattr(owner, name, None)
            if weight is not None:
                places.append((owner, name, weight))
    return places


def _text_config_of(base: Any) -> Any:
    config: Any = getattr(base, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def _is_added(model: nn.Module) -> bool:
    config = _text_config_of(base_model_of(model))
    weights = router_loss_weights(model)
    return bool(getattr(config, "output_router_logits", False)) and bool(weights) and weights[0][2] != 0


def check_router_loss(trainer: RoutedTrainer) -> None:
    """Warn if the auxiliary loss grows with accumulation. ValueError if `per_step` has no effect."""
    args = trainer.args
    per_step = getattr(args, "router_aux_loss", "per_micro_batch") == "per_step"
    added = _is_added(trainer.model)
    if per_step and not added:
        raise ValueError(
            "router_aux_loss is 'per_step', but the model adds no auxiliary loss: output_router_logits of its config "
            "is false, or the weight is 0. Remove router_aux_loss, or set output_router_logits=True in the config."
        )
    steps = args.gradient_accumulation_steps
    if added and not per_step and steps > 1 and trainer.model_accepts_loss_kwargs:
        logger.warning(
            f"The auxiliary loss of the routers is added once for each of {steps} micro-batches, as in "
            f"transformers.Trainer, so it counts {steps} times as much as in one batch. Set "
            "router_aux_loss='per_step' to average it, as TRL does."
        )


@contextmanager
def router_loss_of_step(trainer: RoutedTrainer, num_items_in_batch: Any) -> Iterator[None]:
    """Context manager: the model's auxiliary loss is weighted by the share of one micro-batch in the step.

    Nothing changes without `num_items_in_batch`: then `Trainer` divides the loss by the number of micro-batches.
    """
    wanted = getattr(trainer.args, "router_aux_loss", "per_micro_batch") == "per_step"
    if not wanted or num_items_in_batch is None or not trainer.model.training:
        yield
        return
    shares = trainer.current_gradient_accumulation_steps
    if trainer.args.average_tokens_across_devices:  # `Trainer` multiplies the whole loss by this number
        processes = trainer.accelerator.num_processes // trainer.get_tp_size()
        shares *= trainer.args.n_gpu if trainer.args.n_gpu > 1 else processes
    stock = router_loss_weights(trainer.model)
    for owner, name, weight in stock:
        setattr(owner, name, weight / shares)
    try:
        yield
    finally:
        for owner, name, weight in stock:
            setattr(owner, name, weight)
