"""Inputs for `liger_trainer.verify`: a config of any model type, a few rows, and a trainer."""

from peft import LoraConfig
from transformers import AutoConfig, DataCollatorForSeq2Seq

import liger_trainer
from liger_trainer.verify import Setup, verify
from liger_trainer.verify.small import small_tokenizer


def texts(n):
    return [f"word{i} and {i * 7 % 13} more about {i * 3} things that are said here, number {i}" for i in range(n)]


def rows_of(method, n=24):
    one, other = texts(n), texts(n)[::-1]
    if method in ("SFT", "Medusa"):
        return [{"prompt": a, "completion": " it is " + b} for a, b in zip(one, other, strict=True)]
    if method in ("DPO", "ORPO", "CPO"):
        return [
            {"prompt": a, "chosen": " yes " + b[:30], "rejected": " no " + b[5:50]}
            for a, b in zip(one, other, strict=True)
        ]
    if method == "KTO":
        return [
            {"prompt": a, "completion": " so " + b[:30], "label": i % 2 == 0}
            for i, (a, b) in enumerate(zip(one, other, strict=True))
        ]
    if method == "":
        return [
            {"input_ids": list(range(i, i + 12 + i % 7)), "labels": [-100] * 3 + list(range(i + 3, i + 12 + i % 7))}
            for i in range(n)
        ]
    return [{"prompt": text} for text in one]


def setup_of(method, model_type="llama", config=None, **parts):
    """A setup of `Liger{method}Trainer`. `config` sets fields of the model's config, `parts` fields of the setup."""
    trainer = getattr(liger_trainer, f"Liger{method}Trainer")
    names = {"Medusa": "LigerMedusaConfig", "": "LigerTrainingArguments"}
    arguments = getattr(liger_trainer, names.get(method, f"Liger{method}Config"))
    model = AutoConfig.for_model(model_type, **(config or {}))
    if method in ("GRPO", "RLOO"):
        parts = {"rewards": 1, "options": {"beta": 0.1}} | parts
    if method == "Distillation":
        parts.setdefault("teacher", AutoConfig.for_model(model_type))
    if method == "":
        parts.setdefault("given", {"data_collator": DataCollatorForSeq2Seq(small_tokenizer(), padding=True)})
    return Setup(trainer, arguments, model, rows_of(method), **parts)


def lora(*names, **options):
    names = names or ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    return LoraConfig(r=4, lora_alpha=16, target_modules=list(names), task_type="CAUSAL_LM", **options)


def failed(*args, **parts):
    """The names of the failed checks, with their messages."""
    report = verify(setup_of(*args, **parts))
    return {check.name: check.detail for check in report.checks if check.verdict == "FAILED"}
