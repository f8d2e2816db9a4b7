"""Checks options that the main trainings leave at their defaults: dropout, and the optimizer in the backward pass."""

import math
from typing import Any

import torch
from torch import nn

from liger_trainer.head.module import base_and_adapters, innermost, output_head
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.verify.adam_training import chosen_optimizer, exact
from liger_trainer.verify.figures import RTOL, Check, steps_of, worst
from liger_trainer.verify.observed import KeepGradients
from liger_trainer.verify.runs import Bench, Run


class _KeepNothing(KeepGradients):
    """Records no gradients, because each is freed in the backward pass."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        pass


class _SeedBatches(KeepGradients):
    """Seeds each micro-batch except the first, which the run itself seeds.

    It is for trainers that draw the same masks in a micro-batch, but another number of random numbers. Without it the
    masks of the next micro-batch would differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.ended += 1
        torch.manual_seed(self.ended)


def dropout_drawn_once(bench: Bench, kind: str, noise: dict[str, float], ours: Run, stock: Run) -> Check:
    """Compare a step with recomputed layers with one that saves activations. `ours` and `stock` have no dropout."""
    if bench.setup.is_medusa and ours.trainer.args.medusa_stage == 1:
        return Check("the model is frozen, so it runs without dropout")
    if not bench.dropouts() and bench.setup.peft_config is None:
        return Check("nothing in the model drops out")
    options: dict[str, Any] = {"dropout": 0.2, "max_steps": 1}
    try:
        stored = bench.run("ours", **options, gradient_checkpointing=False)
    except ValueError:
        refused = _refusal(bench, kind, options | {"gradient_checkpointing": False})
        if refused is None:
            raise
        return refused
    if stored.logs[0]["loss"] == ours.logs[0]["loss"]:
        other = bench.run(kind, **options, gradient_checkpointing=False)
        if other.logs[0]["loss"] == stock.logs[0]["loss"]:
            return Check("nothing in the model drops out")
        return Check("dropout has no effect", math.inf, RTOL)
    recomputed = bench.run("ours", **options, gradient_checkpointing=True)
    check = worst(steps_of(recomputed), steps_of(stored), noise)
    check.detail = f"recomputed with what the forward pass has dropped, {check.detail}"
    return check


def _refusal(bench: Bench, kind: str, options: dict[str, Any]) -> Check | None:
    """Return the check of a model that refuses dropout in the stock trainer too, or None if the stock trainer runs."""
    try:
        bench.run(kind, **options)
    except ValueError as error:
        return Check(f"the model refuses dropout: {error}")
    return None


def dropout_as_stock(bench: Bench, kind: str, noise: dict[str, float]) -> Check:
    """Compare a step with one row per batch: without padding, both trainers draw the same dropout masks."""
    setup = bench.setup
    if setup.stock.__name__ not in ("SFTTrainer", "Trainer") or setup.is_medusa:
        return Check("its batches have padding, and the stock trainer draws masks for padding too")
    if not bench.dropouts() and setup.peft_config is None:
        return Check("nothing in the model drops out")
    options: dict[str, Any] = {
        "dropout": 0.2,
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": False,
        "packing": False,
        "padding_free": False,
    }
    try:
        ours = bench.run("ours", **options)
    except ValueError:
        refused = _refusal(bench, kind, options)
        if refused is None:
            raise
        return refused
    reason = _why_counts_differ(ours.trainer, kind)
    if reason is not None:
        ours = bench.run("ours", recorder=_SeedBatches(), **options)
    stock = bench.run(kind, recorder=_SeedBatches() if reason is not None else None, **options)
    check = worst(steps_of(ours), steps_of(stock), noise)
    if reason is not None:
        check.detail += f"; each micro-batch has its own seed, since {reason}"
    return check


def _why_counts_differ(trainer: LigerTrainerMixin, kind: str) -> str | None:
    """Return why `trainer`, which is ours, draws fewer random numbers than the trainer of `kind`, or None.

    Only known reasons count, so that a pass that we forget or run twice fails the check.
    """
    if _head_drops_out(trainer.model):
        return "a fused head draws for fewer positions"  # a row's last token predicts nothing
    if kind == "stock" and _has_one_pass_less(trainer):
        return "the stock trainer's metrics take a second forward pass, which drops out too"
    return None


def _has_one_pass_less(trainer: LigerTrainerMixin) -> bool:
    """Return whether TRL computes metrics in a forward pass of their own, and `trainer` does not.

    `SFTTrainer` smooths the labels of full logits, and then calls the model again for entropy and accuracy.
    """
    if not isinstance(trainer, LigerSFTTrainer) or not trainer.uses_fused_head:
        return False
    return trainer.label_smoother is not None and trainer.args.loss_type == "nll"


def _head_drops_out(model: nn.Module) -> bool:
    """Return whether an adapter on the head of `model` has dropout."""
    head = output_head(model)
    if head is None:
        return False
    inner: Any = innermost(head)
    _, adapters = base_and_adapters(inner)
    return any(not isinstance(inner.lora_dropout[name], nn.Identity) for name in adapters)


def optimizer_in_backward(bench: Bench, *_: Any) -> Check:
    """Compare optimizer steps in the backward pass with steps after it, if the recipe asks for them."""
    if not bench.setup.options.get("optimizer_in_backward"):
        return Check("the recipe steps after the backward pass")
    options: dict[str, Any] = {
        "max_grad_norm": 0.0,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "optim": chosen_optimizer(bench.setup),
    }
    within, after = (
        bench.run("ours", recorder=_KeepNothing(), optimizer_in_backward=early, **options) for early in (True, False)
    )
    check = exact([within.after, within.states], [after.after, after.states])
    check.detail = f"weights and states, {check.detail}"
    return check
