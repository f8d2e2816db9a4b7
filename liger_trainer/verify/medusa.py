"""Computes the loss of Medusa heads from full logits, as a stock trainer for Medusa would."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer

from liger_trainer.head.module import output_head
from liger_trainer.medusa.config import schedule_of
from liger_trainer.medusa.heads import MedusaHead, heads_of
from liger_trainer.medusa.trainer import LigerMedusaTrainer


class PlainMedusaTrainer(LigerMedusaTrainer):
    """Calls the model once for its own logits, and once for each head in the place of the LM head."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        args: Any = self.args
        call = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
        if args.medusa_stage == 2 and self.aux_loss_enabled:
            call["output_router_logits"] = True
        outputs, targets = model(**call), _targets(inputs, args.medusa_num_heads)
        training, joint = self.model.training, args.medusa_stage == 2
        teacher = torch.log_softmax(outputs.logits.detach().float(), -1) if args.medusa_targets == "soft" else None
        share = self.state.global_step / max(self.state.max_steps, 1)
        weight = args.medusa_heads_coefficient * (schedule_of(args.medusa_schedule)(share) if training else 1.0)
        total: Any = _sum(outputs.logits, targets[0]) if joint else 0.0
        seen = [_counts(total, outputs.logits, targets[0])] if joint else []
        heads, lm_head = heads_of(self.model), output_head(self.model)
        for k, head in enumerate(heads, 1):  # type: ignore[arg-type]
            hook = lm_head.register_forward_hook(partial(_in_its_place, head))  # type: ignore[union-attr]
            try:
                logits = model(**call).logits
            finally:
                hook.remove()
            same = None if teacher is None else teacher.roll(-k, 1)  # the teacher for the same token, k places ahead
            loss_of_head = _sum(logits, targets[k], same)
            total = total + weight * args.medusa_decay**k * loss_of_head
            seen.append(_counts(loss_of_head, logits, targets[k]))
        count = (targets[0] != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = total / count
        if call.get("output_router_logits"):
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._sums.add("train" if training else "eval", torch.tensor(seen).T, inputs)
        return (loss, outputs) if return_outputs else loss

    def _mean_metrics(self, mode: str) -> dict[str, float]:
        """Return losses and accuracies of the heads, over all their targets since the last log."""
        sums, tokens = self._sums.take(mode, self.accelerator)
        self._total_train_tokens += int(tokens) if mode == "train" else 0
        metrics: dict[str, float] = {"num_tokens": self._total_train_tokens}
        joint = self.args.medusa_stage == 2
        for k, (loss, right, targets) in enumerate(zip(*sums, strict=True), 0 if joint else 1):
            metrics[f"medusa_head{k}_loss" if k else "lm_loss"] = loss / max(targets, 1)
            metrics[f"medusa_head{k}_accuracy" if k else "mean_token_accuracy"] = right / max(targets, 1)
        return metrics

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create transformers' parameter groups, and split each: the heads get a multiple of the learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = Trainer.create_optimizer(self, *args, **kwargs)
        heads = {id(p) for head in heads_of(self.model) for p in head.parameters()}  # type: ignore[union-attr]
        for group in list(optimizer.param_groups):
            head_parameters = [p for p in group["params"] if id(p) in heads]
            group["params"] = [p for p in group["params"] if id(p) not in heads]
            if head_parameters:
                optimizer.add_param_group(
                    group | {"params": head_parameters, "lr": group["lr"] * self.args.medusa_lr_multiplier}
                )
        return optimizer


def _targets(inputs: dict[str, Any], heads: int) -> torch.Tensor:
    """Return the targets of each head (K + 1, B, S), int64, the LM head first, -100 where there is nothing to guess.

    This uses the documents, and `head/targets.py` uses positions, so that the two do not share a mistake.
    """
    labels, documents = inputs["labels"], _documents(inputs)
    targets = labels.new_full((heads + 1, *labels.shape), -100)
    for place in range(labels.shape[1]):
        for k in range(heads + 1):
            guessed = place + k + 1
            if guessed == labels.shape[1]:
                break
            of_one = (documents[:, place] == documents[:, guessed]) & (documents[:, place] >= 0)
            # The LM head also learns across documents, as in the stock trainers, which give first tokens label -100.
            targets[k, :, place] = torch.where(of_one | (k == 0), labels[:, guessed], -100)
    return targets


def _documents(inputs: dict[str, Any]) -> torch.Tensor:
    """Return the number of the document that each token (B, S) is in, -1 for padding."""
    labels, mask = inputs["labels"], inputs.get("attention_mask")
    positions, borders = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    documents = torch.zeros_like(labels)
    if positions is not None:
        positions = (positions[0] if positions.ndim == 3 else positions).expand(labels.shape)
        documents[:, 1:] = (positions.diff(dim=1) != 1).cumsum(1)
    elif inputs.get("seq_idx") is not None:
        documents = inputs["seq_idx"].long()
    elif borders is not None:
        places = torch.arange(labels.numel(), device=labels.device)
        documents = torch.bucketize(places, borders[1:].long(), right=True).view(labels.shape)
    return documents if mask is None or mask.ndim != 2 else documents.masked_fill(mask == 0, -1)


def _counts(loss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Return the sums that are logged for a head: its losses, its right first choices, and its targets."""
    counted = target != -100
    right = (logits.argmax(-1) == target)[counted]
    return [float(loss), float(right.sum()), float(counted.sum())]


def _sum(logits: torch.Tensor, target: torch.Tensor, teacher: torch.Tensor | None = None) -> torch.Tensor:
    """Return the cross-entropy with the labels, or with a `teacher` the divergence from its log-probabilities."""
    counts = target != -100
    log_p = torch.log_softmax(logits[counts].float(), -1)
    if teacher is None:
        return F.nll_loss(log_p, target[counts], reduction="sum")
    return F.kl_div(log_p, teacher[counts], log_target=True, reduction="sum")


def _in_its_place(head: MedusaHead, lm_head: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
    x = args[0]
    for layer in range(head.num_layers):
        x = x + F.silu(F.linear(x, head[layer].linear.weight, head[layer].linear.bias))
    return F.linear(x, lm_head.weight if head.lm_head is None else head.lm_head.weight)
