"""With `use_liger=False` every trainer is the stock one, even with options that `use_liger=True` refuses."""

import pytest
import torch
from tiny_models import classifier, collate, masked_lm, ragged_rows, tiny_model, tiny_tokenizer
from trainer_parity import STOCK, assert_same_training, one, ours
from transformers import Trainer, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
)

import liger_trainer

SMOOTHING = {"label_smoothing_factor": 0.1}  # of tokens; only SFT smooths them


@pytest.mark.parametrize(
    "method, options",
    [
        ("DPO", {"label_smoothing": 0.1}),
        ("DPO", {"label_smoothing": 0.1, "loss_type": ["ipo"]}),
        *[(method, SMOOTHING) for method in STOCK],
    ],
    ids=str,
)
def test_an_option_that_we_refuse_trains_as_stock(method, options, tmp_path):
    stock = one(method, STOCK[method], tmp_path, **options)
    trainer = one(method, ours(method), tmp_path, use_liger=False, **options)
    assert trainer.liger_report is None
    assert_same_training(trainer, stock, rtol=0.0)
    if method != "SFT":
        with pytest.raises(ValueError, match=f"{next(iter(options))} is 0.1, which {method}Trainer does not use"):
            one(method, ours(method), tmp_path, **options)


def test_a_model_that_is_patched_already_is_refused(tmp_path):
    model = tiny_model("llama")
    args = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    rows = {"train_dataset": ragged_rows(4), "data_collator": collate}
    liger_trainer.LigerTrainer(model, liger_trainer.LigerTrainingArguments(**args, max_steps=1), **rows).train()
    args = liger_trainer.LigerTrainingArguments(**args, use_liger=False)
    with pytest.raises(
        ValueError,
        match=r"use_liger is False, but another trainer or apply_liger has patched the model, .*remove_liger",
    ):
        liger_trainer.LigerTrainer(model, args)
    liger_trainer.remove_liger(model)
    assert liger_trainer.LigerTrainer(model, args).liger_report is None


@pytest.mark.parametrize("method", ["ORPO", "CPO"])
def test_a_tokenizer_without_padding_is_left_as_it_is(method, tmp_path):
    seen = {}
    for name, classes in (("stock", STOCK[method]), ("ours", ours(method))):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = None
        trainer_class, args_class = classes
        args = args_class(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            bf16=False,
            **({"use_liger": False} if name == "ours" else {}),
        )
        rows = one(method, STOCK[method], tmp_path).train_dataset.select_columns(["prompt", "chosen", "rejected"])
        trainer = trainer_class(model=tiny_model("llama"), args=args, train_dataset=rows, processing_class=tokenizer)
        seen[name] = tokenizer.pad_token, trainer.data_collator.pad_token_id
    assert seen["ours"] == seen["stock"]


@pytest.mark.parametrize("method", ["ORPO", "CPO"])
def test_a_model_that_is_loaded_goes_where_stock_puts_it(method, tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    rows = one(method, STOCK[method], tmp_path).train_dataset.select_columns(["prompt", "chosen", "rejected"])
    seen = {}
    for name, (trainer_class, args_class) in {"stock": STOCK[method], "ours": ours(method)}.items():
        options = {"use_liger": False} if name == "ours" else {}
        args = args_class(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False, **options)
        trainer = trainer_class(
            model=str(tmp_path / "model"), args=args, train_dataset=rows, processing_class=tiny_tokenizer()
        )
        seen[name] = args.model_init_kwargs, getattr(trainer.model, "hf_device_map", None)
    assert seen["ours"] == seen["stock"]


def test_an_unknown_argument_is_the_stock_trainer_s_error(tmp_path):
    messages = []
    for trainer_class, args_class, options in (
        (DPOTrainer, DPOConfig, {}),
        (*ours("DPO"), {"use_liger": False}),
    ):
        args = args_class(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False, **options)
        with pytest.raises(TypeError) as error:
            trainer_class(model=tiny_model("llama"), args=args, compute_loss_func=lambda *_: 0)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_a_masked_language_model_and_a_classifier_train_as_stock(tmp_path):
    def with_class(rows):
        return {**collate(rows), "labels": torch.arange(len(rows)) % 2}

    for make, collator in ((masked_lm, collate), (classifier, with_class)):
        runs = []
        for trainer_class, args_class, options in (
            (Trainer, TrainingArguments, {}),
            (liger_trainer.LigerTrainer, liger_trainer.LigerTrainingArguments, {"use_liger": False}),
        ):
            args = args_class(
                output_dir=str(tmp_path),
                use_cpu=True,
                report_to="none",
                max_steps=2,
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                **options,
            )
            torch.manual_seed(0)
            model = make()
            model.config.pad_token_id = 0
            trainer = trainer_class(model=model, args=args, train_dataset=ragged_rows(8), data_collator=collator)
            trainer.train()
            runs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert runs[0] == runs[1] and len(runs[0]) == 2
