"""`fp8` with adapters: quantising the base holds two copies of only one layer at a time."""

import importlib
import weakref

import pytest
from frozen_bases import LAYERS, adapted
from peft import LoraConfig
from tiny_models import tiny_model
from trainer_parity import build_dpo, run

from liger_trainer import LigerDPOTrainer, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments

LORA = LoraConfig(r=4, target_modules="all-linear")


def stock(tmp_path):
    LigerTrainer(adapted(), LigerTrainingArguments(output_dir=str(tmp_path), fp8=True, use_cpu=True, report_to="none"))


def sft(tmp_path):
    run(LigerSFTTrainer, tiny_model("llama"), tmp_path, fp8=True, trainer_options={"peft_config": LORA})


def dpo(tmp_path):
    build_dpo(LigerDPOTrainer, tiny_model("llama"), tmp_path, fp8=True, trainer_options={"peft_config": LORA})


@pytest.mark.parametrize("make", [stock, sft, dpo])
def test_the_weight_before_is_gone(make, any_device, tmp_path, monkeypatch):
    module, before = importlib.import_module("liger_trainer.fp8.frozen_layer"), []
    quantized = module.quantized

    def seen(weight):
        assert all(earlier() is None for earlier in before)
        before.append(weakref.ref(weight))
        return quantized(weight)

    monkeypatch.setattr(module, "quantized", seen)
    make(tmp_path)
    assert len(before) >= LAYERS
