"""`LigerTrainer` against `Trainer`, step by step from one seed: loss and gradient norm to 1e-5 relative in fp32."""

import copy

import pytest
import torch
from tiny_models import PARITY_SET, collate, ragged_rows, tiny_model
from trainer_parity import CELLS, SPLITS, assert_same_numbers, logged_values, run, with_lora
from transformers import Trainer, TrainingArguments

from liger_trainer import LigerTrainer, LigerTrainingArguments


@pytest.mark.parametrize("model_type, kind, checkpointing", CELLS)
def test_every_step_agrees_for_every_split(model_type, kind, checkpointing, tmp_path):
    model = tiny_model(model_type)
    if kind == "lora":
        model = with_lora(model, ["q_proj", "v_proj", "gate_proj", "down_proj"])
        model.enable_input_require_grads()
    runs = {}
    for split in SPLITS:
        options = {"gradient_checkpointing": checkpointing == "checkpointing"}
        want, _ = run(Trainer, model, tmp_path, split, **options)
        runs[split], trainer = run(LigerTrainer, model, tmp_path, split, **options)
        assert trainer.uses_fused_head
        assert_same_numbers(runs[split], want)
    assert_same_numbers(runs[4, 2], runs[8, 1])
    assert_same_numbers(runs[1, 8], runs[8, 1])


@pytest.mark.parametrize(
    "model_type, split", zip(["llama", "qwen3", "gemma2", "granite"], [*SPLITS, SPLITS[1]], strict=True), ids=str
)
def test_label_smoothing(model_type, split, tmp_path):
    model = tiny_model(model_type)
    want, _ = run(Trainer, model, tmp_path, split, label_smoothing_factor=0.1)
    got, trainer = run(LigerTrainer, model, tmp_path, split, label_smoothing_factor=0.1)
    assert_same_numbers(got, want)
    for (name, start), trained in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert not torch.equal(start, trained), f"{name} has not changed"


def test_a_lora_on_the_head_trains_as_in_stock(tmp_path):
    model = with_lora(tiny_model("llama"), ["q_proj", "lm_head"])
    want, stock = run(Trainer, model, tmp_path)
    got, ours = run(LigerTrainer, model, tmp_path)
    assert_same_numbers(got, want)
    for (name, start), trained, stock_trained in zip(
        model.named_parameters(), ours.model.parameters(), stock.model.parameters(), strict=True
    ):
        torch.testing.assert_close(trained, stock_trained, rtol=1e-4, atol=1e-6, msg=name)
        if "lm_head.lora" in name:
            assert not torch.equal(start, trained), f"{name} has not changed"


def test_use_liger_false_is_the_stock_trainer_bit_for_bit(tmp_path):
    model = tiny_model("llama")
    want, stock = run(Trainer, model, tmp_path)
    args = LigerTrainingArguments(**(stock.args.to_dict() | {"use_liger": False}))
    trainer = LigerTrainer(model=copy.deepcopy(model), args=args, train_dataset=ragged_rows(), data_collator=collate)
    trainer.train()
    assert trainer.liger_report is None
    for got, ref in zip(trainer.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(got, ref)
    assert "forward" not in vars(trainer.model)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_evaluation_gives_the_same_loss_with_and_without_metrics(smoothing, tmp_path):
    rows = ragged_rows(8)
    losses = {}
    for trainer_class, args_class in ((Trainer, TrainingArguments), (LigerTrainer, LigerTrainingArguments)):
        for metrics in (None, lambda prediction: {"shape": prediction.predictions.shape[-1]}):
            args = args_class(
                output_dir=str(tmp_path),
                use_cpu=True,
                report_to="none",
                label_smoothing_factor=smoothing,
                per_device_eval_batch_size=4,
                remove_unused_columns=False,
            )
            trainer = trainer_class(
                model=tiny_model("gemma2"), args=args, eval_dataset=rows, data_collator=collate, compute_metrics=metrics
            )
            result = trainer.evaluate()
            losses[trainer_class, metrics is None] = result["eval_loss"]
            assert ("eval_shape" in result) == (metrics is not None)
    want = losses[Trainer, True]
    assert losses == pytest.approx(dict.fromkeys(losses, want), rel=1e-5)


@pytest.mark.parametrize("model_type", PARITY_SET)
def test_every_family(model_type, tmp_path):
    model = tiny_model(model_type)
    want, _ = run(Trainer, model, tmp_path, (4, 2))
    got, trainer = run(LigerTrainer, model, tmp_path, (4, 2))
    assert trainer.uses_fused_head
    assert_same_numbers(got, want)


def test_mixed_precision(tmp_path):
    """accelerate wraps `model.forward` for bf16; label smoothing and loss-only evaluation must find the fused head."""
    options = {"bf16": True, "label_smoothing_factor": 0.1, "eval_strategy": "epoch"}
    want, stock = run(Trainer, tiny_model("llama"), tmp_path, eval_rows=ragged_rows(8), **options)
    got, ours = run(LigerTrainer, tiny_model("llama"), tmp_path, eval_rows=ragged_rows(8), **options)
    assert ours.uses_fused_head
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0)
    losses = [logged_values(t, "eval_loss") for t in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and len(losses[0]) == 1
