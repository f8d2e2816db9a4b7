"""LoRA on torchao's int8 weights as transformers loads them, compared with the stock layers on the same weights."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import assert_same_step, collate, ragged_rows, step, tiny_model
from transformers import AutoModelForCausalLM, TorchAoConfig

from liger_trainer import apply_liger
from liger_trainer.lora import layers as lora

quantization = pytest.importorskip("torchao.quantization")
granularity = pytest.importorskip("torchao.quantization.granularity")

GRAINS = {
    "rows": granularity.PerRow(),
    "tensor": granularity.PerTensor(),
    "groups": granularity.PerGroup(32),
}
RTOL = {torch.float32: 5e-6, torch.bfloat16: 8e-2}  # stock differs by up to 0.05, because it rounds every step to bf16


@pytest.fixture(scope="module", params=[False, True], ids=["", "bias"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny_model("llama", attention_bias=request.param, **sizes).save_pretrained(folder)
    return folder


def quantised(saved, grain="rows", dtype=torch.float32, **options):
    config = quantization.Int8WeightOnlyConfig(granularity=GRAINS[grain])
    settings = {"dtype": dtype, "quantization_config": TorchAoConfig(config)}
    model = AutoModelForCausalLM.from_pretrained(saved, **settings)
    torch.manual_seed(3)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**options)).train()


def patched(model, monkeypatch, mlp=True):
    monkeypatch.setattr(lora, "LEAST_WORK", 0)
    options = {"rms_norm": False, "rope": False, "fused_linear_cross_entropy": False, "rebuild_above_mib": 0}
    return apply_liger(model, options | {"swiglu": mlp})["lora"]


@pytest.mark.parametrize("mlp", [False, True], ids=["layers", "mlps"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("grain", GRAINS)
def test_a_step_equals_stock(grain, dtype, mlp, saved, monkeypatch):
    stock, model = (quantised(saved, grain, dtype) for _ in range(2))
    report = patched(model, monkeypatch, mlp)
    assert len(report.swapped) == 14 and not report.skipped
    assert {name.split(" ")[1] for name in report.swapped.values()} == {"Int8Tensor"}
    assert_same_step(step(model), step(stock), RTOL[dtype], floor=0)
    if dtype == torch.bfloat16:
        assert_same_step(step(model, autocast=dtype), step(stock, autocast=dtype), RTOL[dtype], floor=0)


@pytest.mark.parametrize("grain", GRAINS)
def test_the_base_has_the_bits_of_stock(grain, saved, monkeypatch):
    """With B = 0, the output and the gradient of x equal the base's."""
    stock, model = (quantised(saved, grain, torch.bfloat16, init_lora_weights=True) for _ in range(2))
    patched(model, monkeypatch)
    torch.manual_seed(5)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    dy = torch.randn(64, 128, dtype=torch.bfloat16)
    found = []
    for one in (model, stock):
        layer = one.base_model.model.model.layers[0].mlp.up_proj
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(dy)
        found.append((y, given.grad))
    assert "forward" in model.base_model.model.model.layers[0].mlp.up_proj.__dict__
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


def test_no_weight_is_kept_unpacked(saved, monkeypatch):
    model = quantised(saved)
    patched(model, monkeypatch)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(**collate(ragged_rows(4)))
    assert not {tuple(t.shape) for t in kept} & {(64, 64), (128, 64), (64, 128), (32, 64), (64, 32)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, saved, monkeypatch):
    stock, model = (quantised(saved) for _ in range(2))
    patched(model, monkeypatch)
    for one in (stock, model):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)


def test_dropout_disabled_merged_and_copied(saved, monkeypatch):
    stock, model = (quantised(saved, lora_dropout=0.5) for _ in range(2))
    patched(model, monkeypatch)
    want = step(stock)
    assert_same_step(step(model), want, RTOL[torch.float32], floor=0)
    assert_same_step(step(copy.deepcopy(model)), want, RTOL[torch.float32], floor=0)
    rows = collate(ragged_rows(4))
    for one in (stock, model):
        one.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**rows).logits, stock(**rows).logits)
        with model.disable_adapter(), stock.disable_adapter():
            assert torch.equal(model(**rows).logits, stock(**rows).logits)
        for one in (stock, model):
            one.merge_adapter()
        assert torch.equal(model(**rows).logits, stock(**rows).logits)
        for one in (stock, model):
            one.unmerge_adapter()
        torch.testing.assert_close(model(**rows).logits, stock(**rows).logits)


def test_a_base_that_quantises_its_input_keeps_its_code(saved, monkeypatch):
    model = quantised(saved)
    for layer in model.base_model.model.model.layers:
        del layer.self_attn.q_proj.base_layer.weight
        layer.self_attn.q_proj.base_layer.weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)
        quantization.quantize_(layer.self_attn.q_proj.base_layer, quantization.Int8DynamicActivationInt8WeightConfig())
    report = patched(model, monkeypatch)
    assert len(report.swapped) == 12
    assert set(report.skipped.values()) == {"its base quantizes or scales its input"}
