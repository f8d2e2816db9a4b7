"""Keeps the rows of GRPO, RLOO and distillation on the host as well.

These trainers make their batches on the device, from completions. To find the rows of a call, the host would have to
wait until the device has finished everything launched before. Here, each generation batch is copied to the host once,
right after generation, when the device is idle. So the host knows the values of later model calls.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from liger_trainer.varlen.host_copies import remember, values_of

if TYPE_CHECKING:  # the mixin always goes before one of TRL's trainers
    from trl import GRPOTrainer as StockTrainer
else:
    StockTrainer = object

_KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class GeneratingTrainer(Protocol):
    """The attributes of a trainer that generates its rows, as far as they are copied. None is written."""

    _buffered_inputs: list[dict[str, Any]] | None  # the micro-batches of a generation batch; TRL's

    def wants_part(self, part: str) -> bool:
        """Return whether `liger_config` leaves this part on."""


class KeepsOnlineRows(StockTrainer):
    """Mixin that copies generated rows to the host. It goes before `LigerTRLMixin`."""

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        trainer: GeneratingTrainer = self
        inputs = super()._prepare_inputs(*args, **kwargs)
        if trainer.wants_part("varlen_attention"):
            for batch in (inputs, *(trainer._buffered_inputs or ())):
                _keep_on_host(batch)
        return inputs


class KnowsOnlineRows(KeepsOnlineRows):
    """Mixin that also tells the host the rows of each call in GRPO and RLOO. It goes before `LigerTRLMixin`."""

    _trained: dict[str, Any] | None = None  # the micro-batch, while its loss is computed

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._trained = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._trained = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        trainer: GeneratingTrainer = self
        if trainer.wants_part("varlen_attention"):
            if self._trained is not None:
                join_on_host(self._trained, input_ids, attention_mask)
            # Without a micro-batch, old policy and reference get the same tensors. The first call copies them.
            for x in (input_ids, attention_mask):
                _keep(x)
            ids, mask = values_of(input_ids, attention_mask)
            model = _with_known_rows(model, ids, mask, logits_to_keep)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )


def _keep_on_host(batch: dict[str, Any]) -> None:
    for name in _KEPT:
        _keep(batch[name])


def _keep(x: torch.Tensor) -> None:
    if not _is_on_host(x):
        remember(x, x.cpu())


def _is_on_host(x: torch.Tensor) -> bool:
    return values_of(x)[0].device.type == "cpu"


def join_on_host(batch: dict[str, Any], input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
    """Tell the host the values of prompts and completions that TRL has concatenated."""
    parts = [batch[name] for name in _KEPT]
    if not all(map(_is_on_host, parts)):
        return
    values = values_of(*parts)
    prompt_ids, prompt_mask, completion_ids, completion_mask = values
    ids, mask = torch.cat((prompt_ids, completion_ids), 1), torch.cat((prompt_mask, completion_mask), 1)
    if ids.shape == input_ids.shape and mask.shape == attention_mask.shape:
        remember(input_ids, ids)
        remember(attention_mask, mask)


def _with_known_rows(
    model: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int
) -> Callable[..., Any]:
    """Return `model` wrapped so that the host knows ids, mask and labels of each call.

    The calls go through the rows of a batch in order. The labels are TRL's: the ids of completions, and -100 for
    prompts and padding.
    """
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-logits_to_keep] = -100
    done = 0

    def call(**inputs: Any) -> Any:
        nonlocal done
        rows = slice(done, done + len(inputs["input_ids"]))
        done = rows.stop
        for name, values in (("input_ids", ids), ("attention_mask", mask), ("labels", labels)):
            if inputs[name].shape == values[rows].shape:
                remember(inputs[name], values[rows])
        return model(**inputs)

    return call
