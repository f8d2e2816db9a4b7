"""Whole models with LoRA equal stock: ranks up to 256, and the widths of Qwen3-0.6B."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import apply_liger

QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
}
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
MODELS = [
    pytest.param("llama", LLAMA, 8, id="r8"),
    pytest.param("llama", LLAMA, 64, id="r64"),
    pytest.param("llama", LLAMA, 256, id="r256"),
    pytest.param("qwen3", QWEN3_06B, 16, id="qwen3-0.6b"),
]


def results(name, widths, rank, dtype, patched=False, exact=False, autocast=False):
    """Logits and all gradients of a step, with random A and B."""
    model = tiny_model(name, dtype=dtype, **widths)
    torch.manual_seed(3)
    config = LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, config).train()
    if exact:
        model.double()
    if patched:
        others = dict.fromkeys(("rms_norm", "rope", "fused_linear_cross_entropy"), False)
        report = apply_liger(model, others | {"rebuild_above_mib": 0})
        assert len(report["lora"].swapped) == 7 * model.config.num_hidden_layers
        assert len(report["swiglu"].swapped) == model.config.num_hidden_layers
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outputs = model(**collate(ragged_rows(4)))
    outputs.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": outputs.logits.detach()} | grads


@pytest.mark.parametrize("name, widths, rank", MODELS)
def test_in_fp32(name, widths, rank):
    got, want = (results(name, widths, rank, torch.float32, patched) for patched in (True, False))
    assert got.keys() == want.keys()
    for key, w in want.items():
        assert (got[key] - w).norm() <= 1e-5 * w.norm(), key


@pytest.mark.diagonal
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name, widths, rank", MODELS)
def test_in_bf16_the_error_is_near_stock_s(name, widths, rank, autocast):
    exact = results(name, widths, rank, torch.bfloat16, exact=True)
    ours, stock = (results(name, widths, rank, torch.bfloat16, patched, autocast=autocast) for patched in (True, False))
    assert ours.keys() == stock.keys() == exact.keys()
    for key, w in exact.items():
        assert ours[key].dtype == stock[key].dtype
        errors = [(got[key].double() - w).norm() for got in (ours, stock)]
        assert errors[0] <= 1.5 * errors[1], key
