"""Bugs that show only in a longer run, an evaluation or 16 bits, and the check of `verify` that finds each."""

from unittest import mock

import pytest
import torch
from verify_setups import (
    ADAM_GRADIENTS,
    ADAM_LOGS,
    ADAM_WEIGHTS,
    BF16,
    CHUNKS,
    DROPOUT,
    EVALUATION,
    GATES,
    HEAD,
    LEFT,
    LOGGED,
    SAVED,
    SEEN,
    TRAINS,
    UNCHANGED,
    assert_clean,
    assert_found,
    cases,
    of_a_trainer,
    once_built,
    setups,
)

from liger_trainer import LigerDPOTrainer, LigerMedusaTrainer, LigerSFTTrainer
from liger_trainer.varlen import unpad_plan
from liger_triton import _chunks, reference
from liger_triton._chunks import Accumulator


def first_chunk_alone(stock, self, dl, x):
    if not self.started:
        stock(self, dl, x)


def margins_of_the_other_sign(stock, self, *args, **kwargs):
    for values in self._metrics.values():
        if "rewards/margins" in values:
            values["rewards/margins"] = [-value for value in values["rewards/margins"]]
    stock(self, *args, **kwargs)


def accuracy_a_little_off(stock, self, mode):
    return {name: value * 1.01 for name, value in stock(self, mode).items()}


def loss_a_little_off(stock, self, *args, **kwargs):
    loss, *others = stock(self, *args, **kwargs)
    return (loss * 1.001, *others)


def a_weight_is_cast(stock, self, *args, **kwargs):
    found = stock(self, *args, **kwargs)
    weight = self.model.get_output_embeddings().weight
    weight.data.copy_(weight.data.bfloat16())
    return found


def a_gradient_is_left(stock, self, *args, **kwargs):
    found = stock(self, *args, **kwargs)
    weight = self.model.get_output_embeddings().weight
    weight.grad = torch.ones_like(weight)
    return found


def without_autocast(stock, self, *args, **kwargs):
    forward = self.model.forward
    plain = forward.__wrapped__ if hasattr(forward, "__wrapped__") else forward
    with mock.patch.object(self.model, "forward", plain):
        return stock(self, *args, **kwargs)


def positions_from_the_first_token(stock, self, call):
    found = stock(self, call)
    if self.index is None:
        return found
    lengths = call["attention_mask"].sum(-1).tolist()
    return found | {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}


def positions_end_at_255(stock, self, model, inputs, *args, **kwargs):
    length = inputs["input_ids"].shape[1]
    positions = torch.arange(length).clamp(max=255)[None]
    return stock(self, model, inputs | ({"position_ids": positions} if length > 256 else {}), *args, **kwargs)


def other_epsilon(stock, self, *args, **kwargs):
    optimizer = stock(self, *args, **kwargs)
    for group in optimizer.param_groups:
        group["eps"] = 1e-6
    return optimizer


def decayed_norms(stock, self, *args, **kwargs):
    optimizer = stock(self, *args, **kwargs)
    for group in optimizer.param_groups:
        group["weight_decay"] = self.args.weight_decay
    return optimizer


def moments_are_forgotten(stock, self, *args, **kwargs):
    for state in self.optimizer.state.values():
        if "exp_avg_sq" in state:
            state["exp_avg_sq"].mul_(0.5)
    return stock(self, *args, **kwargs)


def no_warmup(stock, self, num_training_steps, optimizer=None):
    with mock.patch.object(type(self.args), "get_warmup_steps", lambda *_: 0):
        return stock(self, num_training_steps, optimizer)


def full_windows(stock, self, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss = stock(self, model, inputs, return_outputs, num_items_in_batch)
    return loss * self.current_gradient_accumulation_steps / self.args.gradient_accumulation_steps


class OneOrder(torch.utils.data.SequentialSampler):
    def __iter__(self):
        order = torch.randperm(len(self.data_source), generator=torch.Generator().manual_seed(0))
        return iter(order.tolist())


def one_order_for_all_epochs(stock, self, dataset=None):
    return OneOrder(self.train_dataset)


def random_numbers_are_drawn(stock, self, *args, **kwargs):
    torch.rand(1)
    return stock(self, *args, **kwargs)


def dropped_again(patch):
    stock = torch.utils.checkpoint.checkpoint

    def checkpoint(*args, **kwargs):
        return stock(*args, **(kwargs | {"preserve_rng_state": False}))

    patch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    patch.setattr("transformers.modeling_utils.checkpoint", checkpoint)


def untied(stock, self, *args, **kwargs):
    stock(self, *args, **kwargs)
    head = self.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def saved_in_16_bits(stock, self, output_dir=None, state_dict=None):
    state_dict = {name: x.bfloat16() for name, x in self.model.state_dict().items()}
    return stock(self, output_dir, state_dict)


def half_a_derivative(stock, g, u, **options):
    return u * (g * g.sigmoid().detach()) if g.dtype == torch.bfloat16 else stock(g, u, **options)


SEEDS = {
    "the head's gradient has the first chunk alone": (
        of_a_trainer(Accumulator, "add", first_chunk_alone),
        ("SFT",),
        {},
        {CHUNKS},
    ),
    "the margins that are logged have the other sign": (
        of_a_trainer(LigerDPOTrainer, "log", margins_of_the_other_sign),
        ("DPO",),
        {},
        {LOGGED, ADAM_LOGS},
    ),
    "the accuracy of Medusa heads is a percent off": (
        of_a_trainer(LigerMedusaTrainer, "_mean_metrics", accuracy_a_little_off),
        ("Medusa",),
        {},
        {LOGGED},
    ),
    "the loss of an evaluation is a thousandth off": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", loss_a_little_off),
        ("SFT",),
        {},
        {EVALUATION},
    ),
    "an evaluation rounds a weight": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", a_weight_is_cast),
        ("SFT",),
        {},
        {UNCHANGED},
    ),
    "an evaluation leaves a gradient": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", a_gradient_is_left),
        ("SFT",),
        {},
        {UNCHANGED},
    ),
    "an evaluation runs without autocast": (
        of_a_trainer(LigerSFTTrainer, "prediction_step", without_autocast),
        ("SFT",),
        {},
        {BF16},
    ),
    "positions begin at the first token of a row that is padded on the left": (
        once_built(unpad_plan.UnpadPlan, "unpad", positions_from_the_first_token),
        ("SFT", "gpt2"),
        {},
        {LEFT},
    ),
    "positions end at 255": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", positions_end_at_255),
        ("SFT",),
        {},
        {ADAM_LOGS, ADAM_GRADIENTS},
    ),
    "Adam has another epsilon": (
        of_a_trainer(LigerSFTTrainer, "create_optimizer", other_epsilon),
        ("SFT",),
        {},
        {ADAM_WEIGHTS},
    ),
    "norms are decayed": (
        of_a_trainer(LigerSFTTrainer, "create_optimizer", decayed_norms),
        ("SFT",),
        {},
        {ADAM_WEIGHTS},
    ),
    "Adam's second moment is scaled": (
        of_a_trainer(LigerSFTTrainer, "training_step", moments_are_forgotten),
        ("SFT",),
        {},
        {ADAM_WEIGHTS},
    ),
    "the warmup is left out": (
        of_a_trainer(LigerSFTTrainer, "create_scheduler", no_warmup),
        ("SFT",),
        {},
        {ADAM_LOGS, ADAM_WEIGHTS},
    ),
    "a window that is cut short counts as a full one": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", full_windows),
        ("SFT",),
        {},
        {ADAM_LOGS},
    ),
    "the second epoch has the order of the first": (
        of_a_trainer(LigerSFTTrainer, "_get_train_sampler", one_order_for_all_epochs),
        ("SFT",),
        {},
        {SEEN},
    ),
    "a step draws a random number": (
        of_a_trainer(LigerSFTTrainer, "compute_loss", random_numbers_are_drawn),
        ("SFT",),
        {},
        {SEEN},
    ),
    "dropout is drawn again in the recomputation": (dropped_again, ("SFT",), {}, {DROPOUT}),
    "the head is tied no longer": (
        of_a_trainer(LigerSFTTrainer, "__init__", untied),
        ("SFT",),
        {"config": {"tie_word_embeddings": True}},
        {TRAINS, SEEN},
    ),
    "the model is saved in 16 bits": (of_a_trainer(LigerSFTTrainer, "_save", saved_in_16_bits), ("SFT",), {}, {SAVED}),
    "a gate in 16 bits has half of its derivative": (
        once_built(reference, "swiglu", half_a_derivative),
        ("SFT",),
        {},
        {GATES, BF16},
    ),
    "the head's gradient is summed in 16 bits": (
        lambda patch: patch.setattr(_chunks, "sum_dtype", lambda like, lean: like.dtype),
        ("SFT",),
        {},
        {HEAD},
    ),
}
# `test_seeded.py` runs these without a bug.
ELSEWHERE = [(("SFT",), {}), (("DPO",), {}), (("Medusa",), {})]


@pytest.mark.parametrize(("seed", "what", "parts", "found_by"), cases(SEEDS))
def test_each_bug_is_found(seed, what, parts, found_by, monkeypatch):
    assert_found(seed, what, parts, found_by, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "parts"), [setup for setup in setups(SEEDS) if setup not in ELSEWHERE])
def test_without_the_bug_nothing_is_found(what, parts):
    assert_clean(what, parts)
