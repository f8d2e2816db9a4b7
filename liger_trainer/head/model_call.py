"""One call of a model's own forward, with what is asked of the model's LM head."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.module import FusedHeadBinding
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.head.request import HeadRequest
from liger_trainer.instance.binding import call_previous
from liger_trainer.varlen.host_copies import values_of

_FOR_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # from these a model would compute a loss

LogitsT = TypeVar("LogitsT", torch.Tensor, DeferredLogits)


class ModelCall(NamedTuple):
    """A call of the model's own forward, and what it asks of the head.

    Attributes:
        model (`nn.Module`): The model.
        head (`nn.Module`): Its LM head.
        args (`tuple`): Arguments of the model's own forward by position.
        kwargs (`dict`): Its arguments by name.
        options (`HeadOptions`): Options of the head.
        request (`HeadRequest`): What the call asks for.
    """

    model: nn.Module
    head: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: HeadOptions
    request: HeadRequest

    @property
    def token_outputs(self) -> tuple[str, ...]:
        """The fields of `FusedLMOutput` that the call asks for."""
        asked = self.request.token_outputs
        return self.options.outputs if asked is None else asked

    @property
    def has_labels(self) -> bool:
        """Whether the model's own forward computes a loss."""
        return self.kwargs.get("labels") is not None or self.kwargs.get("shift_labels") is not None

    def run(self) -> Any:
        """Run the forward that the model would have without ours."""
        kwargs = self.kwargs
        if self.request.replaces_loss:
            kwargs = {name: value for name, value in kwargs.items() if name not in _FOR_THE_LOSS}
        return call_previous(self.model, FusedHeadBinding, self.args, kwargs)

    def shifted(self, logits: LogitsT) -> tuple[LogitsT, torch.Tensor]:
        """Pair the logits that predict a label with the labels: the next tokens, or `shift_labels` as they are.

        Raises:
            ValueError: The call has neither `labels` nor `shift_labels`.
        """
        labels = self.kwargs.get("labels")
        shift_labels = self.kwargs.get("shift_labels")
        if shift_labels is not None:
            return logits, shift_labels
        if labels is None:
            raise ValueError(
                "labels is None; pass labels=(B, S) or shift_labels=(B, S) with fused_lm_head or label_smoothing."
            )
        return logits[:, :-1], labels[:, 1:]

    def labels_on_host(self) -> torch.Tensor | None:
        """Return the labels of `shifted` on the CPU, or None where the host does not know them."""
        shift_labels = self.kwargs.get("shift_labels")
        labels = self.kwargs["labels"] if shift_labels is None else shift_labels
        if torch.compiler.is_compiling() or labels.device.type == "cpu":
            return None
        known = values_of(labels)[0]
        if known.device.type != "cpu":
            return None
        return known[:, 1:] if shift_labels is None else known
