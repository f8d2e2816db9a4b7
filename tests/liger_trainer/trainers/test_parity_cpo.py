"""`LigerCPOTrainer` against `trl.experimental.cpo.CPOTrainer` from one seed, over all loss types in TRL."""

import dataclasses
import re

import pytest
from tiny_models import tiny_model
from trainer_parity import (
    CHUNK_BYTES,
    PAIR_LIMITS,
    PAIR_SPLITS,
    WORDS,
    assert_head_is_ours,
    assert_no_logits,
    assert_same_metrics,
    assert_same_step,
    assert_same_training,
    batch_of,
    build_pairs,
    logged,
    step,
    with_lora,
    without_times,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.trainer.base_config import _BaseConfig

from liger_trainer import LigerCPOConfig, LigerCPOTrainer
from liger_trainer.command.recipe.read import parse_recipe, recipe_names

FIELDS = {f.name: f for f in dataclasses.fields(CPOConfig)}
LOSS_TYPES = FIELDS["loss_type"].metadata["choices"]


def pair(model, tmp_path, **options):
    stock = build_pairs(CPOTrainer, CPOConfig, model, tmp_path, **options)
    ours = build_pairs(LigerCPOTrainer, LigerCPOConfig, model, tmp_path, **options)
    assert_head_is_ours(ours)
    return ours, stock


@pytest.mark.parametrize(
    "loss_type, model_type, kind, split",
    [
        (loss_type, *(("llama", "full", PAIR_SPLITS[1]), ("qwen3", "lora", PAIR_SPLITS[0]))[i % 2])
        for i, loss_type in enumerate(LOSS_TYPES)
    ],
    ids=str,
)
def test_every_logged_number_of_every_step(loss_type, model_type, kind, split, tmp_path):
    model = tiny_model(model_type)
    if kind == "lora":
        model = with_lora(model, ["q_proj", "v_proj", "gate_proj", "lm_head"])
    ours, stock = pair(model, tmp_path, split=split, loss_type=loss_type)
    want = assert_same_training(ours, stock, limits=PAIR_LIMITS)
    assert len(want) == 3 and {"grad_norm", "logits/chosen", "rewards/margins", "nll_loss"} <= want[0].keys()


def test_every_option_is_covered():
    """A new field of CPOConfig needs a test here."""
    assert FIELDS.keys() - {f.name for f in dataclasses.fields(_BaseConfig)} == {
        "loss_type",
        "beta",
        "label_smoothing",
        "cpo_alpha",
        "simpo_gamma",
        "alpha",
        "max_length",  # below
        "max_completion_length",
        "is_encoder_decoder",  # for encoder-decoders: test_other_people_s_models.py
        "disable_dropout",
        "generate_during_eval",
        "model_init_kwargs",
        "trust_remote_code",
        "dataset_num_proc",  # does not affect the loss
    }


OPTIONS = {
    "label-smoothing": {"label_smoothing": 0.2},
    "no-likelihood": {"cpo_alpha": 0.0},
    "weights": {"cpo_alpha": 0.3, "beta": 0.8, "simpo_gamma": 1.5, "max_length": 9},
    "alpha": {"alpha": 0.05},
    "checkpointing": {"gradient_checkpointing": True},
}


USED = {  # the loss types that use each option
    "label-smoothing": ("sigmoid", "hinge"),
    "no-likelihood": ("simpo", "ipo"),
    "weights": LOSS_TYPES,
    "alpha": ("alphapo", "sigmoid"),
    "checkpointing": ("sigmoid",),
}


@pytest.mark.parametrize(
    "loss_type, options",
    [pytest.param(loss, OPTIONS[name], id=f"{loss}-{name}") for name, losses in USED.items() for loss in losses],
)
def test_losses_gradients_and_metrics(loss_type, options, tmp_path):
    ours, stock = pair(tiny_model("qwen3"), tmp_path, loss_type=loss_type, **options)
    batch = batch_of(stock)
    assert_same_step(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo"])
def test_any_upstream_gradient_with_experts(loss_type, tmp_path):
    """The loss, including the experts' auxiliary loss, times 3.7, plus a loss of the weights."""
    model = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    ours, stock = pair(model, tmp_path, loss_type=loss_type)
    batch = batch_of(stock)

    def upstream(loss, model):
        return 3.7 * loss + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert_same_step(step(ours, batch, upstream), step(stock, batch, upstream))


def test_softcap_and_evaluation(tmp_path):
    """Here the mean of the logits includes the last row, and a softcap makes it take a product."""
    ours, stock = pair(tiny_model("gemma2"), tmp_path)
    got, want = without_times(ours.evaluate()), without_times(stock.evaluate())
    assert_same_metrics(got, want)
    batch = batch_of(stock)
    assert_same_step(step(ours, batch), step(stock, batch))


def test_no_tensor_of_tokens_times_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", CHUNK_BYTES)
    assert_no_logits(*pair(tiny_model("llama", vocab_size=WORDS), tmp_path))


def test_use_liger_false_is_the_stock_trainer_bit_for_bit(tmp_path):
    stock = build_pairs(CPOTrainer, CPOConfig, tiny_model("llama"), tmp_path)
    ours = build_pairs(LigerCPOTrainer, LigerCPOConfig, tiny_model("llama"), tmp_path, use_liger=False)
    assert logged(ours) == logged(stock)


def test_the_command_for_simpo_in_the_orpo_recipe():
    text = recipe_names()["llama3_8b/orpo"].read_text()
    options = re.search(r"For SimPO: (.*)", text)[1].split()
    training = parse_recipe("llama3_8b/orpo", ["--bf16", "false", *options]).training
    assert (training.loss_type, training.cpo_alpha, training.beta, training.simpo_gamma) == ("simpo", 0, 2, 1)


def test_options_that_would_be_ignored_are_refused(tmp_path):
    message = "label_smoothing_factor is 0.1, which CPOTrainer does not use. Remove it, or set label_smoothing instead"
    with pytest.raises(ValueError, match=message):
        build_pairs(LigerCPOTrainer, LigerCPOConfig, tiny_model("llama"), tmp_path, label_smoothing_factor=0.1)
