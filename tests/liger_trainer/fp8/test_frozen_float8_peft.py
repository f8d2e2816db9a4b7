"""What PEFT may do to a model with frozen FP8 layers."""

import copy
import inspect
import pickle

import pytest
import torch
from frozen_bases import adapted, add_inside, distance, frozen
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import step, tiny_model

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.fp8.quantize_base import quantize_base


def q_proj(model):
    return model.get_base_model().model.layers[0].self_attn.q_proj


@pytest.mark.parametrize("kind", ["itself", "a copy", "a pickle"])
def test_nothing_is_merged_into_bits(kind):
    """Every way raises and leaves everything unchanged. Otherwise PEFT's own `merge` would lose the sum."""
    model = frozen()
    model = {"itself": lambda m: m, "a copy": copy.deepcopy, "a pickle": lambda m: pickle.loads(pickle.dumps(m))}[kind](
        model
    )
    want, weight = step(model), q_proj(model).base_layer.weight.clone()
    for merge in (
        model.merge_and_unload,
        model.base_model.merge_and_unload,
        model.merge_adapter,
        lambda: model.merge_adapter(safe_merge=True),
        q_proj(model).merge,
        lambda: q_proj(model).merge(safe_merge=True),
    ):
        with pytest.raises(RuntimeError, match="fp8 weight.*liger-trainer merge"):
            merge()
    assert torch.equal(q_proj(model).base_layer.weight, weight)
    assert distance(step(model), want) == (0, 0)


def frozen_inside():
    """An FP8 base with adapters that transformers added, so no PEFT model wraps it."""
    model = tiny_model("llama")
    add_inside(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    quantize_base(model)
    return model


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("by", ["peft", "transformers"])
def test_adapters_that_change_the_weights_are_not_added_later(by, init):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    model = frozen_inside() if by == "transformers" else frozen()
    with pytest.raises(RuntimeError, match="would write to an fp8 weight of the base"):
        model.add_adapter("more", config) if by == "peft" else model.add_adapter(config, "more")


@pytest.mark.parametrize("kind", ["itself", "a copy", "a pickle"])
def test_an_adapter_that_transformers_adds_later(kind):
    """It writes to no weight of the base."""
    model = frozen_inside()
    model = {"itself": lambda m: m, "a copy": copy.deepcopy, "a pickle": lambda m: pickle.loads(pickle.dumps(m))}[kind](
        model
    )
    want = step(model)
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), "more")
    got = step(model)
    assert got[0] != want[0]
    assert len(got[1]) == 2 * 2 and all(".more." in name for name in got[1])
    model.set_adapter("default")
    assert distance(step(model), want) == (0, 0)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_have_begun_from_the_weights(init):
    """They changed the base before it was quantised."""
    model = adapted(init_lora_weights=init)
    want = step(model)
    quantize_base(model)
    assert distance(step(model), want)[0] < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_adapter_that_is_added_later(dtype):
    """It gets the dtype that it would get next to the original weight."""
    model, other = frozen(dtype), adapted(dtype)
    for each in (model, other):
        as_it_is = {"autocast_adapter_dtype": False}  # this PEFT lacks the argument too
        known = as_it_is.keys() & inspect.signature(each.add_adapter).parameters.keys()
        each.add_adapter("more", LoraConfig(r=4, target_modules=["q_proj"]), **(as_it_is if known else {}))
        each.set_adapter("more")
    assert [q_proj(each).lora_A["more"].weight.dtype for each in (model, other)] == [dtype, dtype]
    assert distance(step(model), step(other))[0] < 0.01


@pytest.mark.parametrize("later", [False, True])
def test_dora(later):
    """PEFT asks for the norm of the base's weight, and gets the norm of the dequantised numbers."""
    with_dora = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    model = adapted(target_modules=["v_proj"])
    other = adapted(target_modules=["v_proj"])
    if later:
        model = adapted(target_modules=["q_proj"])
        other = adapted(target_modules=["q_proj"])
        quantize_base(model)
    for each in (model, other):
        torch.manual_seed(4)
        each.add_adapter("dora", with_dora)
        each.set_adapter("dora")
    if not later:
        quantize_base(model)
    assert type(q_proj(model).base_layer) is FrozenFloat8Linear
    loss, gradients = distance(step(model), step(other))
    assert loss < 0.01 and gradients < 0.15
    magnitude = q_proj(model).lora_magnitude_vector["dora"].weight
    torch.testing.assert_close(magnitude, q_proj(other).lora_magnitude_vector["dora"].weight, rtol=0.02, atol=0)


def test_unloading_and_what_follows():
    """Without adapters the base is unchanged. PEFT refuses a LoRA on its layers or on new ones."""
    model = frozen(target_modules=["q_proj"])
    with pytest.raises(ValueError, match="Target module FrozenFloat8Linear.* is not supported"):
        model.add_adapter("more", LoraConfig(r=4, target_modules=["up_proj"]))
    base = model.unload()
    assert type(base.model.layers[0].self_attn.q_proj) is FrozenFloat8Linear
    with pytest.raises(ValueError, match="Target module FrozenFloat8Linear.* is not supported"):
        get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))


def test_an_adapter_is_saved_and_loaded(tmp_path):
    """Only the adapter is saved, and it loads on a base in FP8 or in 16 bits."""
    model = frozen()
    model.save_pretrained(tmp_path)
    want = step(model)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
    }
    model.load_adapter(tmp_path, "again", is_trainable=True)
    model.set_adapter("again")
    loaded = step(model)
    assert loaded[0] == want[0]
    whole = PeftModel.from_pretrained(tiny_model("llama"), tmp_path, is_trainable=True).train()
    assert distance(step(whole), want)[0] < 0.01
    whole.merge_and_unload()
