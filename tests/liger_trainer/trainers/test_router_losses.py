"""`router_aux_loss_coef` of TRL's trainers, also for models whose own forward computes no auxiliary loss."""

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
import transformers
from architectures import LIMIT, MODEL_TYPES, build, left_padded_batch
from tiny_models import largest_difference, tiny_model
from trainer_parity import STOCK, assert_same_training, one, ours
from trl.trainer.utils import add_fused_lm_head

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.head.calls import install_fused_head

# one with its own loss, two without, one with no loss in TRL
QUICK = ("qwen3_moe", "deepseek_v2", "lfm2_moe", "deepseek_v3")


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
    """Loss and gradients agree for every model of transformers for which TRL computes it."""
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


def _trained_once(rows_at_once, steps, tmp_path, trainer_class=LigerTrainer, **keys):
    """A trainer after one SGD step with learning rate 1 over the same six rows, and its logs."""
    torch.manual_seed(0)
    model = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=1.0)
    ids = torch.randint(3, 131, (6, 12), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = LigerTrainingArguments if trainer_class is LigerTrainer else transformers.TrainingArguments
    args = arguments(
        str(tmp_path),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=steps,
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        bf16=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **keys,
    )
    batches = []

    def collate(part):
        batches.append(transformers.default_data_collator(part))
        return batches[-1]

    trainer = trainer_class(model=model, args=args, train_dataset=rows, data_collator=collate)
    trainer.train()
    trainer.batches = [batch["input_ids"].cpu() for batch in batches]
    return trainer, next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def test_the_auxiliary_loss_of_a_step_is_the_mean_of_its_micro_batches(tmp_path):
    """One token's loss and each micro-batch's auxiliary loss equal the model's own; so do the weights afterwards."""
    model = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=1.0)
    for rows_at_once, steps in ((6, 1), (2, 3), (1, 6)):
        trainer, loss = _trained_once(rows_at_once, steps, tmp_path, router_aux_loss="per_step")
        assert [len(part) for part in trainer.batches] == [rows_at_once] * steps
        expected = copy.deepcopy(model)
        total = torch.zeros(())
        for part in trainer.batches:
            outputs = expected(part, labels=part)
            total = total + outputs.loss / steps
        total.backward()
        assert loss == pytest.approx(total.item(), rel=1e-4)
        trained = dict(trainer.model.named_parameters())
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(trained[name], parameter - parameter.grad, rtol=1e-4, atol=1e-5)
        assert trainer.model.router_aux_loss_coef == 1.0


def test_the_default_is_the_stock_trainer_s_and_is_told(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        _, loss = _trained_once(1, 6, tmp_path)
    _, stock = _trained_once(1, 6, tmp_path, transformers.Trainer)
    _, whole = _trained_once(6, 1, tmp_path)
    assert loss == pytest.approx(stock, rel=1e-5) and loss > whole + 4
    told = [record.getMessage() for record in caplog.records if "auxiliary loss" in record.getMessage()]
    assert len(told) == 1 and "each of 6 micro-batches" in told[0] and "router_aux_loss='per_step'" in told[0]


def test_options_that_would_have_no_effect(tmp_path):
    args = LigerTrainingArguments(str(tmp_path), router_aux_loss="per_step", report_to="none", use_cpu=True, bf16=False)
    for model in (tiny_model("llama"), tiny_model("qwen3_moe")):
        with pytest.raises(ValueError, match="router_aux_loss is 'per_step', but the model adds no auxiliary loss"):
            LigerTrainer(model=model, args=args)
