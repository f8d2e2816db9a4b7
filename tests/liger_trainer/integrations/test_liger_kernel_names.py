"""Entry points for people who load models themselves."""

import pytest
import torch
from tiny_models import NO_HEAD, largest_difference, step, tiny_model, whole_batch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import liger_trainer
from liger_trainer import AutoLigerKernelForCausalLM
from liger_trainer.integrations import liger_kernel_names


def swapped(model):
    return {type(m).__name__ for m in model.modules() if "forward" in m.__dict__}


def test_from_pretrained(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    loaded = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded) is LlamaForCausalLM
    assert {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaForCausalLM"} <= swapped(loaded)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert swapped(plain) == set()
    assert largest_difference(step(loaded, whole_batch()), step(plain, whole_batch())) < 1e-5
    loaded = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, liger_config={**NO_HEAD, "rope": False})
    assert swapped(loaded) == {"LlamaRMSNorm", "LlamaMLP"}


def test_from_config():
    config = tiny_model("gemma2").config
    model = AutoLigerKernelForCausalLM.from_config(config, liger_config=NO_HEAD)
    assert swapped(model) == {"Gemma2RMSNorm", "Gemma2MLP", "Gemma2Attention"}


def test_bad_config_is_found_before_loading():
    with pytest.raises(ValueError, match="did you mean 'rms_norm'"):
        AutoLigerKernelForCausalLM.from_pretrained("there/is-no-such-model", liger_config={"rmsnorm": False})


def test_function_for_one_model_type():
    model = tiny_model("llama")
    report = liger_trainer.apply_liger_kernel_to_llama(model=model, rope=False, fused_linear_cross_entropy=False)
    assert swapped(model) == {"LlamaRMSNorm", "LlamaMLP"} and not report["rope"].enabled
    assert liger_trainer.apply_liger_kernel_to_llama is liger_kernel_names.apply_liger_kernel_to_llama
    assert liger_kernel_names.apply_liger_kernel_to_llama.__name__ == "apply_liger_kernel_to_llama"


def test_function_for_a_model_with_a_text_config():
    assert liger_kernel_names.apply_liger_kernel_to_qwen2_5_vl(tiny_model("qwen2_5_vl"), **NO_HEAD)["rope"].swapped
    assert liger_kernel_names.apply_liger_kernel_to_qwen2_5_vl_text(tiny_model("qwen2_5_vl"), **NO_HEAD)["rope"].swapped


def test_errors_of_the_functions():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="unknown key 'rmsnorm'; did you mean 'rms_norm'"):
        liger_kernel_names.apply_liger_kernel_to_llama(model=model, rmsnorm=False)
    with pytest.raises(AttributeError, match="transformers has no model type 'lama'"):
        _ = liger_trainer.apply_liger_kernel_to_lama
    assert swapped(model) == set()


def test_scripts_written_for_liger_kernel_run_or_get_the_line_to_write():
    """Calling it before the model is built is an error that gives the line to write. `cross_entropy` may be off."""
    with pytest.raises(ValueError, match=r"builds the model, write apply_liger_kernel_to_llama\(model=model\)"):
        liger_kernel_names.apply_liger_kernel_to_llama(rope=True)
    model = tiny_model("llama")
    assert liger_kernel_names.apply_liger_kernel_to_llama(model=model, cross_entropy=False, rope=True)["rope"].swapped
    with pytest.raises(ValueError, match="cross_entropy is True, but the cross-entropy of logits is not swapped"):
        liger_kernel_names.apply_liger_kernel_to_llama(
            model=model, cross_entropy=True, fused_linear_cross_entropy=False
        )
    with pytest.raises(TypeError, match="unexpected keyword argument 'swiglu'"):
        AutoLigerKernelForCausalLM.from_config(model.config, swiglu=True)


def test_every_model_type_has_its_function():
    names = [name for name in dir(liger_kernel_names) if name.startswith("apply_liger_kernel_to_")]
    assert len(names) > 300 and all(name.isidentifier() for name in names)
    assert all(callable(getattr(liger_kernel_names, name)) for name in names)
