"""`fp8` for models with adapters: trainers quantise the frozen base to FP8. Needs no GPU and no torchao."""

import importlib.util
import json
import os
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from frozen_bases import LAYERS, adapted, built, fresh_state
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model
from trainer_parity import run
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from liger_trainer import LigerSFTTrainer, LigerTrainer
from liger_trainer.fp8 import feature as fp8_fields
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "no_torchao")


def layers_of(model):
    return [module for module in model.modules() if type(module) is FrozenFloat8Linear]


def near(got, want, rtol):
    """Assert that numbers are near the 16-bit ones, but differ."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)
    assert not torch.equal(got, want)


@pytest.mark.parametrize("asked", ["by fp8: true", "by the launcher", "by the launcher, with the stock arguments"])
def test_losses_are_near_bf16(asked, any_device, tmp_path, monkeypatch):
    """No adapter matrix is converted, the base does not change, and the report says what was done."""
    want, _ = run(LigerTrainer, adapted(), tmp_path, bf16=True)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    options = {}
    if asked == "by fp8: true":
        options["fp8"] = True
    else:
        monkeypatch.setitem(os.environ, "ACCELERATE_MIXED_PRECISION", "fp8")
    if "stock" in asked:
        monkeypatch.setattr("trainer_parity.LigerTrainingArguments", TrainingArguments)
    model = adapted()
    got, trainer = run(LigerTrainer, model, tmp_path, **options)
    near(got[:, 0], want[:, 0], 0.03)
    near(got[:1, 1], want[:1, 1], 0.05)  # the gradient norm of the first step
    assert str(trainer.accelerator.mixed_precision) == "bf16" and trainer.args.mixed_precision == "fp8"
    assert len(layers_of(trainer.model)) == len(trainer.liger_report["frozen_float8"].swapped) == LAYERS
    written = json.loads((tmp_path / "LigerTrainer" / "liger_report.json").read_text())["operations"]["frozen_float8"]
    assert written["found"] == LAYERS + 1 and "LM head" in written["skipped"][0]["reason"]
    assert f"frozen_float8 {LAYERS}/{LAYERS + 1}" in trainer.liger_report.one_line()
    assert len(trainer.liger_report["lora"].swapped) == LAYERS
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * LAYERS and all("lora_" in name for name in trained)
    assert all(p.dtype == torch.float32 and not torch.equal(p, model.get_parameter(n)) for n, p in trained.items())
    again = FrozenFloat8Linear.of(model.get_base_model().model.layers[0].mlp.up_proj.base_layer)
    assert torch.equal(layers_of(trainer.model)[5].bits, again.bits)


@pytest.mark.parametrize("bf16", [None, True, False])
def test_sft_and_the_precision_of_autocast(bf16, any_device, tmp_path):
    """The user's `bf16` wins. With False there is no autocast, and the base's dtype decides."""
    given = {"trainer_options": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}}
    want, _ = run(LigerSFTTrainer, tiny_model("llama"), tmp_path, bf16=bf16 is not False, **given)
    fresh_state()
    got, trainer = run(LigerSFTTrainer, tiny_model("llama"), tmp_path, fp8=True, bf16=bf16, **given)
    near(got[:, 0], want[:, 0], 0.03)
    assert str(trainer.accelerator.mixed_precision) == ("no" if bf16 is False else "bf16")
    assert len(layers_of(trainer.model)) == LAYERS


def test_the_same_arguments_for_a_model_without_adapters(any_device, tmp_path):
    """Their fp8 is torchao's, which is missing here."""
    trainer = built(adapted(), tmp_path)
    args = trainer.args
    assert trainer.freezes_in_fp8 and args.mixed_precision == "fp8"
    with pytest.raises(ValueError, match="fp8 is true, which needs torchao for a model without adapters"):
        LigerTrainer(tiny_model("llama"), args, train_dataset=ragged_rows(), data_collator=collate)


def test_a_later_trainer_keeps_the_model_in_fp8(any_device, tmp_path):
    """It need not ask for fp8, because fp8 cannot be undone, and it reports the base's state."""
    _, trainer = run(LigerTrainer, adapted(), tmp_path, fp8=True)
    model = trainer.model
    before = [layer.bits for layer in layers_of(model)]
    for options in ({"fp8": True}, {"bf16": True}):
        _, trainer = run(LigerTrainer, model, tmp_path, **options)
        assert len(trainer.liger_report["frozen_float8"].swapped) == LAYERS
    assert all(torch.equal(a.bits, b) for a, b in zip(layers_of(trainer.model), before, strict=True))
    fresh_state()
    _, trainer = run(LigerTrainer, adapted(), tmp_path)
    assert "frozen_float8" not in trainer.liger_report.operations


def test_without_a_gpu_it_is_refused_at_construction(tmp_path):
    model = adapted()
    with pytest.raises(ValueError, match="fp8 is asked for, but cpu is not a GPU. Use bf16"):
        built(model, tmp_path)
    assert not layers_of(model)


class FullySharding(LigerTrainer):
    """Pretends, once the accelerator exists, that FSDP1 would shard the model."""

    def _apply_liger(self, *args, **kwargs):
        self.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
        try:
            super()._apply_liger(*args, **kwargs)
        finally:
            self.accelerator.state.fsdp_plugin = None


class Speeding(LigerTrainer):
    def _apply_liger(self, *args, **kwargs):
        self.is_deepspeed_enabled = True
        super()._apply_liger(*args, **kwargs)


@pytest.mark.parametrize(
    "trainer_class, message",
    [
        (FullySharding, "fsdp_version is 1.*Set fsdp_version to 2, or leave out fp8"),
        (
            Speeding,
            r"DeepSpeed \(deepspeed\).* cannot shard the frozen fp8 base.*with DDP or with FSDP2, or leave out",
        ),
    ],
)
def test_other_shards_are_refused(trainer_class, message, any_device, tmp_path):
    model = adapted()
    with pytest.raises(ValueError, match=message):
        built(model, tmp_path, trainer_class)
    assert not layers_of(model)


@pytest.mark.parametrize("flag", ["is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit"])
def test_a_base_that_is_quantised_already_is_refused(flag, any_device, tmp_path, monkeypatch):
    model = adapted()
    base = type(model.get_base_model())
    monkeypatch.setattr(base, flag, True, raising=False)
    monkeypatch.setattr(base, "hf_quantizer", MagicMock(), raising=False)
    with pytest.raises(ValueError, match="the base is already quantized.*without load_in_4bit, load_in_8bit"):
        built(model, tmp_path)
    assert not layers_of(model)


def test_vllm_is_refused(any_device, tmp_path):
    """To send weights to vLLM, TRL would merge the adapters into the base."""
    with pytest.raises(ValueError, match="use_vllm is True.*Set use_vllm to False"):
        built(adapted(), tmp_path, use_vllm=True)


def test_a_model_of_which_nothing_can_be_converted_is_refused(any_device, tmp_path):
    model = tiny_model("llama", hidden_size=24, intermediate_size=40)
    with pytest.raises(ValueError, match="no layer of the base of LlamaForCausalLM can be quantized to fp8.*of 16"):
        built(adapted(model=model), tmp_path)


def test_gpt2_s_conv1d_layers_are_refused(any_device, tmp_path):
    sizes = {"vocab_size": 131, "n_embd": 32, "n_layer": 1, "n_head": 4, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match=r"no layer of the base of GPT2.*it is a Conv1D, which may not compute"):
        built(model, tmp_path)


def test_a_model_init_with_adapters_is_refused(any_device, tmp_path, monkeypatch):
    """accelerate has been told to convert before the model exists."""
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "torchao" or own(name, *rest))
    monkeypatch.setattr(fp8_fields, "prepare", lambda args, accelerator: None)
    config = type("Config", (), {"emulate": True})
    handler = type("Handler", (), {"module_filter_func": None, "config": config})
    monkeypatch.setattr(fp8_fields, "handler_of", lambda accelerator: handler)
    monkeypatch.setattr(fp8_fields.Fp8, "check", lambda self, args: None)  # accelerate would ask for torchao
    with pytest.raises(ValueError, match="model from model_init has adapters.*Pass the model to"):
        built(lambda: adapted(), tmp_path)
