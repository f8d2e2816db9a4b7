"""A stock Trainer with `LigerCallback` trains as `LigerTrainer` does, which is how LLaMA-Factory and others get in."""

import pytest
from tiny_models import collate, ragged_rows, tiny_model
from transformers import Trainer, TrainingArguments

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.head.find import has_fused_head
from liger_trainer.integrations.callback import LigerCallback


def losses_of(trainer_class, args_class, out, callbacks=(), **options):
    args = args_class(
        output_dir=str(out), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, save_strategy="no", **options,
    )  # fmt: skip
    trainer = trainer_class(
        model=tiny_model("llama"), args=args, train_dataset=ragged_rows(16), data_collator=collate,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_a_stock_trainer_with_the_callback(tmp_path):
    callback = LigerCallback()
    trainer, losses = losses_of(Trainer, TrainingArguments, tmp_path, [callback])
    assert has_fused_head(trainer.model) and callback.liger_report["rms_norm"].swapped
    _, ours = losses_of(LigerTrainer, LigerTrainingArguments, tmp_path)
    assert losses == ours
    _, stock = losses_of(Trainer, TrainingArguments, tmp_path)
    assert losses == pytest.approx(stock, rel=1e-5) and losses != stock, "the kernels ran"


def test_parts_can_be_switched_off_and_errors_are_told(tmp_path):
    callback = LigerCallback({"fused_linear_cross_entropy": False})
    trainer, _ = losses_of(Trainer, TrainingArguments, tmp_path, [callback])
    assert not has_fused_head(trainer.model) and callback.liger_report["swiglu"].swapped
    with pytest.raises(ValueError, match="liger_config"):
        losses_of(Trainer, TrainingArguments, tmp_path, [LigerCallback({"ropes": False})])
    with pytest.raises(ValueError, match="use_liger_kernel is true"):
        losses_of(Trainer, TrainingArguments, tmp_path, [LigerCallback()], use_liger_kernel=True)
