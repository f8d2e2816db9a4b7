"""What a call asks of a model with a fused LM head (`HeadRequest`), and the call itself (`ModelCall`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.module import FusedHeadBinding
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.varlen.host_copies import values_of

LogitsT = TypeVar("LogitsT", torch.Tensor, DeferredLogits)
LogitsConsumer: TypeAlias = Callable[[Callable[[], Any]], Any]
LogitsObserver: TypeAlias = Callable[[Any], torch.Tensor]

_FOR_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # from these a model would compute a loss
# A request travels as one keyword of the model's call: wrappers (PEFT, DDP, FSDP, DeepSpeed) hand keywords on.
_ARGUMENT = "head_request"
# Keywords of a model's call that set a field of its request: for users, and for TRL, which passes `fused_lm_head=True`.
_FIELD_OF_KEYWORD = {
    "fused_lm_head": "token_scores",
    "token_outputs": "token_outputs",
    "token_predictions": "token_predictions",
    "label_smoothing": "label_smoothing",
    "uniform_grad": "uniform_grad",
    "skip_logits": "skip_logits",
}
_KEYWORDS = frozenset((_ARGUMENT, *_FIELD_OF_KEYWORD))


@dataclass(frozen=True)
class HeadRequest:
    """What a call asks of a model with a fused LM head. `run_request` makes the call.

    A request without any field set asks for the model's own outputs.

    Attributes:
        skip_logits (`bool`, *optional*): With labels, whether the model's own outputs have no logits. Unset: in
            training mode.
        token_scores (`bool`, *optional*, defaults to `False`): Return a `FusedLMOutput` with the log-probability of
            each label in place of the model's own outputs.
        token_outputs (`tuple[str, ...]`, *optional*): Which fields of `FusedLMOutput` `token_scores` computes. Unset:
            the ones in the model's `HeadOptions`.
        label_smoothing (`float`, *optional*, defaults to 0.0): Smoothing of the labels. Without `token_scores`, the
            call returns the smoothed loss.
        uniform_grad (`bool`, *optional*, defaults to `False`): Promises that the upstream gradients of all labels are
            equal, which saves a matrix product. A broken promise gives gradients of NaN.
        token_predictions (`bool`, *optional*, defaults to `False`): Add `predictions` to the outputs of a call with
            labels, for metrics: a dict of `token_ids`, `log_probs`, `ranks` and `labels`.
        logits_consumer (`Callable`, *optional*): Return `logits_consumer(run)` instead, called inside the model's
            forward, where sharded weights have been gathered. `run()` calls the model's own forward, which then
            returns `DeferredLogits`.
        logits_observer (`Callable`, *optional*): With `token_scores`, called with the call's logits after they are
            scored, inside the model's forward. They are `DeferredLogits` if the head is fused. Its result becomes the
            field `observed` of the answer, where DDP finds the parameters that it has used.
        replaces_loss (`bool`): Whether the answer is made from the logits, so that the model's own code need not
            compute a loss. It follows from the other fields.

    Raises:
        ValueError: `logits_consumer` is set together with another answer, or `logits_observer` without scores.
    """

    skip_logits: bool | None = None
    token_scores: bool = False
    token_outputs: tuple[str, ...] | None = None
    label_smoothing: float = 0.0
    uniform_grad: bool = False
    token_predictions: bool = False
    logits_consumer: LogitsConsumer | None = None
    logits_observer: LogitsObserver | None = None
    replaces_loss: ClassVar[bool] = False  # not a field: FSDP copies a request by passing all fields to __init__

    def __post_init__(self) -> None:
        replaces_loss = bool(self.token_scores or self.label_smoothing or self.logits_consumer is not None)
        # An attribute, not a property: each call reads it several times. The dataclass is frozen, so set it this way.
        object.__setattr__(self, "replaces_loss", replaces_loss)
        if self.logits_consumer is not None and (self.token_scores or self.label_smoothing or self.token_predictions):
            raise ValueError(
                "logits_consumer is set, which makes the answer itself, and so is token_scores, label_smoothing or "
                "token_predictions. Leave those out."
            )
        if self.logits_observer is not None and not self.token_scores:
            raise ValueError("logits_observer is set and token_scores is not, so that it would see nothing. Set both.")

    @staticmethod
    def is_in(call: dict[str, Any]) -> bool:
        """Return whether the keywords of a call of the model contain a request."""
        return not _KEYWORDS.isdisjoint(call)

    @classmethod
    def taken_from(cls, call: dict[str, Any]) -> "HeadRequest":
        """Take the request out of the keywords of a call of the model, and leave the model's own in `call`."""
        request: HeadRequest = call.pop(_ARGUMENT, _ASKS_FOR_NOTHING)
        changes = {}
        for keyword, name in _FIELD_OF_KEYWORD.items():
            if keyword in call:
                changes[name] = call.pop(keyword)
        return replace(request, **changes) if changes else request

    def added_to(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a call of the model with this request added, or `call` itself if it asks for nothing.

        A user's wrapper that takes only the model's own keywords thus gets the same call as without this package.
        """
        return call if self == _ASKS_FOR_NOTHING else {**call, _ARGUMENT: self}


_ASKS_FOR_NOTHING = HeadRequest()


def run_request(model: Callable[..., Any], request: HeadRequest, **inputs: Any) -> Any:
    """Call a model that has a fused LM head, or a wrapper of one, with a request.

    Args:
        model (`Callable`): The model, or anything that calls it with the same keywords.
        request (`HeadRequest`): What the call asks for.
        **inputs: The model's own arguments: `input_ids`, `labels`, ...

    Returns:
        The model's own outputs, a `FusedLMOutput`, or what `logits_consumer` returns, as `request` asks.
    """
    return model(**request.added_to(inputs))


class ModelCall(NamedTuple):
    """One call of a model: the arguments for its own forward, and what it asks of the head.

    Attributes:
        model (`nn.Module`): The model.
        bound (`FusedHeadBinding`): The binding of its forward.
        head (`nn.Module`): Its LM head.
        args (`tuple`): Arguments of the model's own forward by position.
        kwargs (`dict`): Its arguments by name.
        options (`HeadOptions`): Options of the head.
        request (`HeadRequest`): What the call asks for.
        skip_logits (`bool`): Whether the model's own outputs are returned without logits.
        unfused (`str` or `None`): Why the head returns real logits, or None.
    """

    model: nn.Module
    bound: FusedHeadBinding
    head: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: HeadOptions
    request: HeadRequest
    skip_logits: bool
    unfused: str | None

    @property
    def token_outputs(self) -> tuple[str, ...]:
        """Return the fields of `FusedLMOutput` that the call asks for."""
        asked = self.request.token_outputs
        return self.options.outputs if asked is None else asked

    @property
    def has_labels(self) -> bool:
        """Return whether the call has labels, from which the model's own forward computes a loss."""
        return self.kwargs.get("labels") is not None or self.kwargs.get("shift_labels") is not None

    def run(self) -> Any:
        """Run the forward that the model had before ours was bound, without labels if nothing reads its loss."""
        kwargs = self.kwargs
        if self.request.replaces_loss:
            kwargs = dict(kwargs)
            for name in _FOR_THE_LOSS:
                kwargs.pop(name, None)
        return self.bound.call_previous(self.args, kwargs)

    def shifted(self, logits: LogitsT) -> tuple[LogitsT, torch.Tensor]:
        """Return the logits that predict a label and these labels: the next tokens, or `shift_labels` as they are.

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
        """Return the labels of `shifted` on the CPU, or None if the host does not know them."""
        shift_labels = self.kwargs.get("shift_labels")
        labels = self.kwargs["labels"] if shift_labels is None else shift_labels
        if torch.compiler.is_compiling() or labels.device.type == "cpu":
            return None
        known = values_of(labels)[0]
        if known.device.type != "cpu":
            return None
        return known[:, 1:] if shift_labels is None else known
