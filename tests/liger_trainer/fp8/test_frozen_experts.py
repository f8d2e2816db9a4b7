"""Blocks of frozen FP8 experts: their numbers, which blocks are converted, and training around them."""

import copy
import pickle

import pytest
import torch
from frozen_bases import adapted, built, distance, fresh_state
from medusa_brute_force import medusa_trainer
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import assert_same_step, step, tiny_model
from torch._subclasses import FakeTensorMode
from trainer_parity import run
from transformers import AutoModelForCausalLM

from liger_trainer import LigerTrainer, apply_liger
from liger_trainer.fitting.meta_model import ModelSpec, freed_by_fp8, on_meta, without_values
from liger_trainer.fp8.frozen_experts import WEIGHTS, FrozenFloat8Experts
from liger_trainer.fp8.quantize_base import prepare_for_shards, quantize_base
from liger_triton.frozen_float8 import dequantized, quantized

KINDS = {"qwen3_moe": {"moe_intermediate_size": 32}, "gpt_oss": {"intermediate_size": 32}}
ATTENTION = ["q_proj", "v_proj"]


def moe(kind="qwen3_moe", targets=ATTENTION, dtype=torch.float32, **options):
    return adapted(model=tiny_model(kind, dtype=dtype, **KINDS[kind]), target_modules=targets, **options)


def blocks(model):
    return [module for module in model.modules() if isinstance(module, FrozenFloat8Experts)]


def in_16_bits(model):
    """`model` with 16-bit experts that hold the dequantised FP8 numbers."""
    for block in blocks(model):
        made = {name: getattr(block, name).clone() for name in WEIGHTS}
        for names in block.weights.values():
            for name in names:
                del block._parameters[name]
        block.__class__ = block.unpacked_class
        for name, weight in made.items():
            block.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights(kind):
    """Each matrix equals an FP8 linear layer's, in the block's own memory order."""
    before = tiny_model(kind, dtype=torch.bfloat16, **KINDS[kind]).model.layers[0].mlp.experts
    model = moe(kind, dtype=torch.bfloat16)
    report = quantize_base(model)
    assert not any("experts" in name for name in report.skipped)
    block = blocks(model)[0]
    assert report.swapped["model.layers.0.mlp.experts"] == "e4m3 with a scale for each row, from bfloat16"
    for name in WEIGHTS:
        bits = block.get_parameter(f"{name}_bits")
        weight = getattr(before, name).detach()
        assert bits.dtype == torch.uint8 and bits.nbytes == weight.numel() and not bits.requires_grad
        turned = weight.mT if before.is_transposed else weight
        want = torch.stack([dequantized(quantized(matrix), torch.bfloat16) for matrix in turned])
        got = getattr(block, name)
        assert torch.equal(got, want.mT if before.is_transposed else want) and got.dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="would write to an fp8 weight of the base"), torch.no_grad():
            got.zero_()
    assert len(blocks(model)) == 2 and quantize_base(model).swapped == report.swapped, "there is nothing left to do"


@pytest.mark.diagonal
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_computes_with_these_numbers(kind, implementation):
    """Runs transformers' code and ours, and compares with the same numbers in 16 bits.

    The blocks are swapped as usual.
    """
    found, padding = [], []
    for patched, unpacked in ((False, True), (False, False), (True, True), (True, False)):
        model = moe(kind)
        model.get_base_model().set_experts_implementation(implementation)
        quantize_base(model)
        model = in_16_bits(model) if unpacked else model
        if patched:
            report = apply_liger(model)
            assert len(report["experts"].swapped) == 2
            padding.append(report["varlen_attention"].swapped)
        found.append(step(model))
    assert padding[0] == padding[1] and (padding[0] or kind == "qwen3_moe"), "it is left out as before"
    for want, got in (found[:2], found[2:]):
        assert_same_step(got, want, rtol=0)
    loss, gradients = distance(found[3], step(moe(kind)))
    assert 0 < loss < 0.02 and 0.001 < gradients < 0.5


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "state_dict", "words"])
def test_copies(make):
    model, others = moe(), moe()
    for one in (model, others):
        quantize_base(one)
    want = step(model)
    if callable(make):
        others = make(model)
    else:
        for block in blocks(others):
            block.down_proj_scale.data.mul_(2)
        assert not torch.equal(step(others)[0], want[0])
        if make == "words":
            prepare_for_shards(model)
            prepare_for_shards(others)
            assert blocks(model)[0].gate_up_proj_bits.dtype == torch.bfloat16
        assert not any(others.load_state_dict(model.state_dict()))
    got = step(others)
    assert_same_step(got, want, rtol=0)
    before = [p.clone() for block in blocks(others) for p in block.parameters()]
    others.half().float()
    assert all(map(torch.equal, before, [p for block in blocks(others) for p in block.parameters()]))


def test_states_and_files_do_not_fit_16_bits(tmp_path):
    """A loader that takes the bytes for numbers would train on noise."""
    packed, plain = moe(), moe()
    quantize_base(packed)
    for one, other, reason in ((plain, packed, "size mismatch"), (packed, plain, "is an fp8 layer")):
        state = {name: t for name, t in other.state_dict().items() if "experts" in name}
        with pytest.raises(RuntimeError, match=reason):
            one.load_state_dict(state, strict=False)
    packed.get_base_model().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "change", "why"),
    [
        ({"target_parameters": ["mlp.experts.down_proj"]}, lambda block: None, "PEFT adapts its weights"),
        ({}, lambda block: block.requires_grad_(True), "it is trained"),
        ({}, lambda block: block.register_forward_hook(lambda *_: None), "a hook on it"),
        ({}, lambda block: setattr(block, "forward", lambda *_: None), "its forward was replaced"),
    ],
)
def test_blocks_that_stay(options, change, why):
    model = moe(**options)
    for module in model.modules():
        if hasattr(type(module).forward, "__wrapped__") and "gate_up_proj" in module._parameters:
            change(module)
    report = quantize_base(model)
    left = {name: reason for name, reason in report.skipped.items() if "experts" in name}
    assert not blocks(model) and len(left) == 2 and all(why in reason for reason in left.values())


def test_widths_that_do_not_fit_stay():
    report = quantize_base(adapted(model=tiny_model("qwen3_moe"), target_modules=ATTENTION))
    assert "its widths, 24 and 32, are not both multiples of 16" in report.skipped["model.layers.0.mlp.experts"]


@pytest.mark.usefixtures("fresh_accelerator", "no_torchao", "any_device")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trained_saved_and_loaded_in_16_bits(checkpointing, tmp_path):
    """Losses are near bf16's. Only the adapter is saved, and it fits the base in its original precision."""
    options = {"activation_checkpointing": checkpointing}
    want, _ = run(LigerTrainer, moe(), tmp_path, bf16=True, **options)
    fresh_state()
    got, trainer = run(LigerTrainer, moe(), tmp_path, fp8=True, **options)
    torch.testing.assert_close(got[:, 0], want[:, 0], rtol=0.03, atol=0)
    assert not torch.equal(got, want) and len(blocks(trainer.model)) == 2
    assert len(trainer.liger_report["experts"].swapped) == 2
    assert sum("experts" in name for name in trainer.liger_report["frozen_float8"].swapped) == 2
    trainer.save_model(tmp_path / "saved")
    assert all("lora" in name for name in load_file(tmp_path / "saved" / "adapter_model.safetensors"))
    assert not list((tmp_path / "saved").glob("model*"))
    base = tiny_model("qwen3_moe", **KINDS["qwen3_moe"])
    merged = PeftModel.from_pretrained(base, tmp_path / "saved").merge_and_unload()
    fresh = tiny_model("qwen3_moe", **KINDS["qwen3_moe"])
    assert torch.equal(merged.model.layers[0].mlp.experts.down_proj, fresh.model.layers[0].mlp.experts.down_proj)
    again = built(trainer.model, tmp_path, fp8=False)
    assert len(blocks(again.model)) == 2 and len(again.liger_report["experts"].swapped) == 2


@pytest.mark.usefixtures("fresh_accelerator", "no_torchao", "any_device")
def test_medusa_heads_on_them(tmp_path):
    trainer = medusa_trainer(tiny_model("qwen3_moe", **KINDS["qwen3_moe"]), tmp_path, fp8=True)
    assert len(blocks(trainer.model)) == 2
    before = [p.clone() for block in blocks(trainer.model) for p in block.parameters()]
    trainer.train()
    assert all(map(torch.equal, before, [p for block in blocks(trainer.model) for p in block.parameters()]))


def test_fit_counts_the_bytes_that_are_stored():
    model = moe(dtype=torch.bfloat16)
    config = model.get_base_model().config
    plain = sum(p.nbytes for p in model.parameters())
    quantize_base(model)
    hollow = on_meta(ModelSpec(config, torch.bfloat16, model.peft_config["default"], fp8=True))
    with FakeTensorMode():
        counted = sum(weight.bytes() for weight in without_values(hollow) if not weight.trained)
    assert len(blocks(hollow)) == 2
    assert counted == sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert freed_by_fp8(model) == plain - sum(p.nbytes for p in model.parameters()) == freed_by_fp8(hollow)
