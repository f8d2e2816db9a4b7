"""The loss of Medusa heads written down once more, from full logits: the stock trainer that Medusa does not have."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from liger_trainer.head.find import output_head
from liger_trainer.medusa.config import schedule_of
from liger_trainer.medusa.heads import MedusaHead, heads_of
from liger_trainer.medusa.trainer import LigerMedusaTrainer


class PlainMedusaTrainer(LigerMedusaTrainer):
    """Calls the model once for its own logits and once for each head, whose output takes the place of the LM head's."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        args: Any = self.args
        call = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
        if args.medusa_stage == 2 and self.aux_loss_enabled:
            call["output_router_logits"] = True
        own = model(**call)
        teacher = torch.log_softmax(own.logits.detach().float(), -1)
        share = self.state.global_step / max(self.state.max_steps, 1)
        weight = args.medusa_heads_coefficient * schedule_of(args.medusa_schedule)(share)
        total: Any = self._sum(own.logits, inputs, 0, None) if args.medusa_stage == 2 else 0.0
        heads: Any = heads_of(self.model)
        for k, head in enumerate(heads, 1):
            hook = output_head(self.model).register_forward_hook(partial(_in_its_place, head))  # type: ignore[union-attr]
            try:
                logits = model(**call).logits
            finally:
                hook.remove()
            soft = args.medusa_targets == "soft"
            total = total + weight * args.medusa_decay**k * self._sum(logits, inputs, k, teacher if soft else None)
        count = max(len(list(_guesses(inputs, 0))), 1) if num_items_in_batch is None else num_items_in_batch
        loss = total / count
        if call.get("output_router_logits"):
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * own.aux_loss / steps
        return (loss, own) if return_outputs else loss

    @staticmethod
    def _sum(logits: torch.Tensor, inputs: dict[str, Any], k: int, teacher: torch.Tensor | None) -> torch.Tensor:
        """The cross-entropy with the labels or, if there is a `teacher`, the divergence from its log-probabilities."""
        rows, places, same, labels = torch.tensor(list(_guesses(inputs, k)), device=logits.device).T
        log_p = torch.log_softmax(logits[rows, places].float(), -1)
        if teacher is None:
            return F.nll_loss(log_p, labels, reduction="sum")
        return F.kl_div(log_p, teacher[rows, same], log_target=True, reduction="sum")


def _in_its_place(head: MedusaHead, lm_head: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
    x = args[0]
    for layer in range(head.num_layers):
        x = x + F.silu(F.linear(x, head[layer].linear.weight, head[layer].linear.bias))
    return F.linear(x, lm_head.weight if head.lm_head is None else head.lm_head.weight)


def _guesses(inputs: dict[str, Any], k: int) -> Iterator[tuple[int, int, int, int]]:
    """What head k (0: the LM head) guesses: the row, its place, where the LM head guesses the same, and the label."""
    labels, positions, mask = (inputs.get(name) for name in ("labels", "position_ids", "attention_mask"))
    for row, row_labels in enumerate(labels.tolist()):  # type: ignore[union-attr]
        documents: list[list[int]] = []
        for t in range(len(row_labels)):
            if mask is not None and not mask[row, t]:
                continue
            if not documents or (positions is not None and int(positions[row, t]) == 0):
                documents.append([])
            documents[-1].append(t)
        for places in documents:
            for i in range(len(places) - k - 1):
                if (label := row_labels[places[i + k + 1]]) != -100:
                    yield row, places[i], places[i + k], label
