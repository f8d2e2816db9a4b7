"""Frozen FP8 layers: the layer itself, and which layers of a model are converted."""

import copy
import pickle

import pytest
import torch
from frozen_bases import LAYERS, adapted, distance, frozen
from peft import IA3Config, LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model
from tiny_models import step, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.fp8.quantize_base import quantize_base
from liger_triton.frozen_float8 import dequantized, quantized

HEAD = "it is the LM head, which is fused with the loss"


def linear(bias=True, dtype=torch.float32, width=48):
    torch.manual_seed(0)
    return nn.Linear(32, width, bias=bias, dtype=dtype).requires_grad_(False)


def q_proj(model):
    return model.get_base_model().model.layers[0].self_attn.q_proj


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_layer(dtype, bias):
    """It takes half the memory of 16 bits. Its error is the rounding of two factors with three mantissa bits."""
    stock = linear(bias, dtype)
    layer = FrozenFloat8Linear.of(stock)
    assert layer.bits.nbytes == 32 * 48 and layer.bits.dtype == torch.uint8 and layer.bias is stock.bias
    x = torch.randn(5, 32, dtype=dtype).requires_grad_()
    (want_dx,) = torch.autograd.grad(stock(x).sum(), x)
    (dx,) = torch.autograd.grad(layer(x).sum(), x)
    assert layer(x).dtype == dx.dtype == dtype
    for got, want in ((layer(x), stock(x)), (dx, want_dx)):
        assert 1e-4 < (got - want).norm() / want.norm() < 0.06
    got = layer.weight
    assert got.dtype == dtype and (got - stock.weight).norm() / stock.weight.norm() < 0.03
    assert "in_features=32, out_features=48" in repr(layer) and "float8_e4m3fn" in repr(layer)


def test_a_trained_bias_gets_a_gradient():
    stock = linear()
    stock.bias.requires_grad_(True)
    layer = FrozenFloat8Linear.of(stock)
    layer(torch.randn(5, 32)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((48,), 5.0)) and layer.bits.grad is None


@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "float", "cpu"])
def test_conversions_leave_weight_and_scale_alone(change):
    layer = FrozenFloat8Linear.of(linear())
    weight, scale = layer.bits.clone(), layer.scale.clone()
    model = nn.ModuleDict({"layer": layer})
    getattr(model, change)()
    assert torch.equal(layer.bits, weight) and torch.equal(layer.scale, scale)
    assert layer.bits.dtype == torch.uint8 and layer.scale.dtype == torch.float32
    expected = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}.get(change, torch.float32)
    assert layer.bias.dtype == expected


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "state_dict", "assign"])
def test_copies(make):
    layer = FrozenFloat8Linear.of(linear())
    x = torch.randn(3, 32)
    want = layer(x)
    if callable(make):
        got = make(layer)
    else:
        got = FrozenFloat8Linear.of(linear().apply(lambda m: nn.init.normal_(m.weight)))
        assert not torch.equal(got(x), want)
        got.load_state_dict(layer.state_dict(), assign=make == "assign")
    assert torch.equal(got(x), want)
    assert set(layer.state_dict()) == {"weight", "scale", "bias"}


def test_it_moves_to_another_device_and_back():
    layer = FrozenFloat8Linear.of(linear()).to("meta")
    assert layer.bits.is_meta and layer.scale.is_meta and layer.bias.is_meta
    again = FrozenFloat8Linear.of(linear().to("meta"))
    assert again.bits.is_meta and again.bits.dtype == torch.uint8 and again.scale.shape == (48,)


@pytest.mark.parametrize("change", ["bits", "scale"])
def test_converted_bytes_are_not_multiplied(change):
    layer = FrozenFloat8Linear.of(linear())
    getattr(layer, change).data = getattr(layer, change).data.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="expected torch.uint8 and torch.float32.*Load the model again"):
        layer(torch.randn(3, 32))


def test_all_frozen_layers_of_a_model():
    """With an adapter or without, loss and gradients are near the 16-bit ones, but differ."""
    model = adapted(target_modules=["q_proj", "up_proj"])
    want, before = step(model), sum(p.nbytes for p in model.parameters())
    report = quantize_base(model)
    assert len(report.swapped) == LAYERS and report.skipped == {"lm_head": HEAD}
    assert next(iter(report.swapped.values())) == "e4m3 with a scale for each row, from float32"
    loss, gradients = distance(step(model), want)
    assert 0 < loss < 0.01 and 0.001 < gradients < 0.15
    assert sum(p.nbytes for p in model.parameters()) < 0.6 * before
    assert len(quantize_base(model).swapped) == LAYERS  # a second call has nothing left to do
    assert distance(step(model), step(model)) == (0, 0)


def test_one_layer_at_a_time(monkeypatch):
    """Each original weight is freed before the next is quantised."""
    import weakref

    from liger_trainer.fp8 import frozen_layer as frozen_float8

    model, before = adapted(), []

    def seen(weight):
        assert not before or before[-1]() is None
        before.append(weakref.ref(weight))
        return quantized(weight)

    monkeypatch.setattr(frozen_float8, "quantized", seen)
    quantize_base(model)
    assert len(before) == LAYERS


def reasons(model, change=lambda model: None):
    change(model)
    report = quantize_base(model)
    assert not set(report.swapped) & set(report.skipped)
    return {name.removeprefix("model.layers."): why for name, why in report.skipped.items() if why != HEAD}


def test_trained_and_copied_weights_are_not_converted():
    found = reasons(adapted(target_modules=["q_proj"], modules_to_save=["up_proj"]))
    assert found == {f"{k}.mlp.up_proj.original_module": "modules_to_save has a trained copy of it" for k in (0, 1)}

    def train(model):
        model.get_base_model().model.layers[0].mlp.up_proj.weight.requires_grad_(True)

    assert reasons(adapted(target_modules=["q_proj"]), train) == {"0.mlp.up_proj": "it is trained"}


def test_adapters_stay_whether_they_are_active_or_not():
    model = adapted(r=16)
    model.add_adapter("other", LoraConfig(r=16, target_modules=["q_proj"]))
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".other." in n)
    assert reasons(model) == {}
    assert type(q_proj(model).lora_A["other"]) is type(q_proj(model).lora_A["default"]) is nn.Linear


def test_shared_weights_stay():
    def share(model):
        layers = model.get_base_model().model.layers
        layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
        layers[1].mlp.gate_proj = layers[0].mlp.gate_proj

    shared = "its weight is shared with another module"
    found = reasons(adapted(target_modules=["q_proj"]), share)
    assert found == {"0.mlp.up_proj": shared, "1.mlp.up_proj": shared, "0.mlp.gate_proj": shared}


def test_tied_embeddings_stay():
    model = frozen(model=tiny_model("llama", tie_word_embeddings=True))
    base = model.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight and base.lm_head.weight.dtype == torch.float32


def test_other_layers_that_stay():
    def change(model):
        first, second = model.get_base_model().model.layers
        first.mlp.up_proj = nn.Linear(32, 40, bias=False).requires_grad_(False)
        first.mlp.gate_proj.double()
        first.self_attn.k_proj.register_forward_hook(lambda *args: None)
        second.mlp.up_proj.forward = lambda x: x
        second.mlp.gate_proj = type("Own", (nn.Linear,), {})(32, 48).requires_grad_(False)

    assert reasons(adapted(target_modules=["q_proj"]), change) == {
        "0.mlp.up_proj": "its widths, 32 and 40, are not both multiples of 16",
        "0.mlp.gate_proj": "its weight is float64",
        "0.self_attn.k_proj": "a hook on it gathers its weight, or would be lost",
        "1.mlp.gate_proj": "it is a Own, which may not compute x W^T + b",
        "1.mlp.up_proj": "its forward was replaced on the instance by test_other_layers_that_stay.<locals>.change."
        "<locals>.<lambda>",
    }


def test_a_model_that_reads_weights():
    """T5 converts the input of `wo` to the dtype of its weight: it must see the numbers' dtype, not the bytes'."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 131}
    config = AutoConfig.for_model("t5", decoder_start_token_id=0, feed_forward_proj="gated-gelu", **sizes)
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForSeq2SeqLM.from_config(config), LoraConfig(r=4, target_modules=["q", "wo"]))
    ids = torch.tensor([[3, 4, 5]])
    want = model.eval()(input_ids=ids, labels=ids).loss
    report = quantize_base(model)
    assert len(report.swapped) == 18
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, want, rtol=0.01, atol=0)


def test_layers_that_a_state_space_mixer_hands_to_kernels_stay():
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=131, time_step_rank=16)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules=["in_proj"]))
    found = reasons(model)
    assert {name.rpartition(".")[2] for name in found} == {"x_proj", "dt_proj", "out_proj"}
    assert set(found.values()) == {"a state-space mixer hands its weight to a kernel, which needs it in 16-bit"}


@pytest.mark.parametrize("target_modules", [["q_proj"], "all-linear"])
def test_routers_stay(target_modules):
    """With an adapter or without."""
    model = tiny_model("qwen3")

    class OwnRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 16)

    for layer in model.model.layers:
        layer.gate, layer.own = nn.Linear(32, 16), OwnRouter()
    found = reasons(get_peft_model(model, LoraConfig(r=4, target_modules=target_modules)))
    assert len(found) == 4 and set(found.values()) == {"it chooses experts, and a rounding may change which"}


def test_other_methods():
    """The layers that they wrap stay as they are."""
    ia3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    vera = VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for config, left in ((ia3, 4), (vera, 2), (prompt, 0)):
        model = get_peft_model(tiny_model("llama"), config)
        want = step(model)
        found = reasons(model)
        assert len(found) == left and all("has its own code for it" in why for why in found.values())
        loss, gradients = distance(step(model), want)
        assert 0 < loss < 0.01 and 0.001 < gradients < 0.15


def test_merged_adapters_are_refused():
    model = adapted()
    model.merge_adapter()
    with pytest.raises(
        ValueError, match=r"\['default'\] are merged into model.layers.0.self_attn.q_proj.*unmerge_adapter"
    ):
        quantize_base(model)
    model.unmerge_adapter()
    assert len(quantize_base(model).swapped) == LAYERS


def test_code_that_reads_the_weight_gets_numbers():
    layer = FrozenFloat8Linear.of(linear(dtype=torch.bfloat16))
    want = dequantized(quantized(linear(dtype=torch.bfloat16).weight), torch.bfloat16)
    assert torch.equal(layer.weight, want) and layer.weight.dtype == torch.bfloat16
    for value in (want, nn.Parameter(want)):
        with pytest.raises((AttributeError, KeyError), match="weight"):
            layer.weight = value
    assert all(p is layer.get_parameter(name) for name, p in layer.named_parameters())


WRITES = {
    "in place": lambda w: w.add_(1),
    "through data": lambda w: w.data.copy_(torch.zeros_like(w)),
    "to data": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "a row": lambda w: w.__setitem__(0, 0.0),
    "a view": lambda w: w.T[0].zero_(),
    "a part": lambda w: w.chunk(2)[0].mul_(2),
    "an operator": lambda w: w.__iadd__(1),
    "an output": lambda w: torch.add(w, 1, out=w),
    "an initialisation": nn.init.zeros_,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_to_the_weight_raises(write):
    layer = FrozenFloat8Linear.of(nn.Linear(32, 16))
    with pytest.raises(RuntimeError, match="would write to an fp8 weight of the base"), torch.no_grad():
        write(layer.weight)


def test_results_computed_from_the_weight_can_be_written():
    weight = FrozenFloat8Linear.of(nn.Linear(32, 16)).weight
    for result in (weight + 1, weight @ weight.T, weight.clone(), copy.deepcopy(weight), nn.Parameter(weight.clone())):
        assert type(result) in (torch.Tensor, nn.Parameter)
        with torch.no_grad():
            result.add_(1)
