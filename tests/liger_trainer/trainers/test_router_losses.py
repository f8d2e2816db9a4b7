"""`router_aux_loss_coef` of TRL's trainers, also for models whose own forward computes no auxiliary loss."""

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
import transformers
from architectures import LIMIT, MODEL_TYPES, build, left_padded_batch
from parity_models import largest_difference
from step_parity import assert_same_training
from trl.trainer.utils import add_fused_lm_head
from trl_trainers import STOCK, one, ours

from liger_trainer.head.calls import install_fused_head

QUICK = ("qwen3_moe", "deepseek_v2", "lfm2_moe", "deepseek_v3")  # with a loss of its own, two without, none in TRL


def step(model):
    transformers.set_seed(1)
    batch = left_padded_batch()
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
    outputs = model(**batch, use_cache=False, fused_lm_head=True, output_router_logits=True)
    (0.01 * outputs.log_probs.sum() + outputs.aux_loss).backward()
    return outputs.aux_loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MODEL_TYPES]
)
def test_the_auxiliary_loss_is_trl_s(model_type):
    """With its gradients, for every model of transformers for which TRL computes it."""
    model, reason = build(model_type)
    if model is None:
        pytest.skip(reason)
    stock = copy.deepcopy(model)
    add_fused_lm_head(stock)
    try:
        want = step(stock)
    except Exception as error:  # noqa: BLE001 - no experts, or a config that TRL does not know
        unfit = error
    else:
        unfit = None
    unfused = install_fused_head(model)
    if unfit is None:
        assert unfused is None and largest_difference(step(model), want) < LIMIT
    elif model_type == "deepseek_v3":
        assert "num_experts" in str(unfit)
        with pytest.raises(ValueError, match="computes no auxiliary loss.*Set router_aux_loss_coef to 0.0"):
            step(model)


@pytest.mark.parametrize("method", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_trainers_of_a_model_that_computes_none(method, tmp_path):
    """With transformers 5.17 this model returns no router logits. Both trainers refuse the option there."""
    model, _ = build("deepseek_v2")
    trainers = []
    for classes in (ours(method), STOCK[method]):
        refused = nullcontext()
        if not hasattr(model.config, "output_router_logits"):
            refused = pytest.raises(ValueError, match="router_aux_loss_coef.* is not a Mixture-of-Experts model")
        with refused:
            trainers.append(one(method, classes, tmp_path, copy.deepcopy(model), router_aux_loss_coef=0.3))
    if trainers:
        assert_same_training(*trainers, metrics=("aux_loss",))
