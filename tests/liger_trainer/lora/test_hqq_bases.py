"""LoRA on HQQ bases, compared with the stock layers on the same bases."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import assert_same_step, step, tiny_model
from torch import nn

from liger_trainer import apply_liger
from liger_trainer.lora import layers as lora

quantize = pytest.importorskip("hqq.core.quantize")

PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
RTOL = {torch.float32: 1e-5, torch.bfloat16: 8e-2}  # stock differs by up to 0.06, because it rounds every step to bf16


def quantised(bits, axis, dtype, bias=False):
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16, attention_bias=bias, dtype=dtype)
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and name != "lm_head":
            parent, _, child = name.rpartition(".")
            config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
            layer = quantize.HQQLinear(linear, config, compute_dtype=dtype, device="cpu")
            setattr(model.get_submodule(parent), child, layer)
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False)).train()


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_a_step_equals_stock(bits, axis, dtype, monkeypatch):
    monkeypatch.setattr(lora, "LEAST_WORK", 0)
    stock, model = (quantised(bits, axis, dtype) for _ in range(2))
    report = apply_liger(model, {"rms_norm": False, "rope": False, "fused_linear_cross_entropy": False})["lora"]
    assert set(report.swapped.values()) == {"linear HQQLinear + default"} and len(report.swapped) == 14
    assert_same_step(step(model), step(stock), RTOL[dtype], floor=0)


@pytest.mark.parametrize("mlp", [False, True], ids=["layers", "mlps"])
def test_with_a_bias(mlp, monkeypatch):
    monkeypatch.setattr(lora, "LEAST_WORK", 0)
    stock, model = (quantised(4, 1, torch.float32, bias=True) for _ in range(2))
    report = apply_liger(model, {"rms_norm": False, "rope": False, "swiglu": mlp})["lora"]
    assert sum("with bias" in variant for variant in report.swapped.values()) == 8
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
