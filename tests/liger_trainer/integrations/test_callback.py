"""A stock Trainer with `LigerCallback` trains like `LigerTrainer`. LLaMA-Factory and others use it this way."""

import pickle

import pytest
from tiny_models import collate, ragged_rows, tiny_model
from transformers import Trainer, TrainingArguments

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.head.module import has_fused_head
from liger_trainer.integrations.callback import LigerCallback


def losses_of(trainer_class, args_class, out, callbacks=(), **options):
    args = args_class(
        output_dir=str(out),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy="no",
        **options,
    )
    trainer = trainer_class(
        model=tiny_model("llama"),
        args=args,
        train_dataset=ragged_rows(16),
        data_collator=collate,
        callbacks=list(callbacks),
    )
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


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=str)
def test_a_model_that_the_trainer_makes_when_it_trains(options, tmp_path):
    """`model_init` makes a second model, and that one trains. The callback reports what it did to it."""
    runs = []
    for callbacks in ([], [LigerCallback()]):
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            save_strategy="no",
            **options,
        )
        trainer = Trainer(
            model_init=lambda: tiny_model("llama"),
            args=args,
            train_dataset=ragged_rows(16),
            data_collator=collate,
            callbacks=callbacks,
        )
        first = trainer.model
        for _ in range(2):
            trainer.train()
        assert trainer.model is not first
        runs.append([log[name] for log in trainer.state.log_history if "loss" in log for name in ("loss", "grad_norm")])
    assert has_fused_head(trainer.model)
    assert runs[1] == pytest.approx(runs[0], rel=5e-3 if options else 1e-5) and runs[1] != runs[0], "the kernels ran"
    trainer.model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: None)
    trainer.model(**collate(ragged_rows(2)))
    assert list(callbacks[0].liger_report["swiglu"].skipped) == ["model.layers.0.mlp"]
    assert pickle.loads(pickle.dumps(callbacks[0])).liger_config is None
