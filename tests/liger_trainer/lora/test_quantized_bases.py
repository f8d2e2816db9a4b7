"""LoRA on bitsandbytes bases, which compute on CPUs too, compared with the stock layers on the same bases."""

import copy
import importlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import assert_same_step, collate, ragged_rows, step, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from liger_trainer import apply_liger, remove_liger
from liger_trainer.lora import layers as lora
from liger_trainer.patching import mlps

bitsandbytes = pytest.importorskip("bitsandbytes")

LAYERS = 14
ALONE = dict.fromkeys(("rms_norm", "rope", "fused_linear_cross_entropy"), False) | {"rebuild_above_mib": 0}
# In bf16, PEFT's layer rounds the product, the adapter's part and their sum; ours rounds once. Over two such layers,
# gradients differ by up to 0.030.
RTOL = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
KINDS = {
    "nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    return folder


def quantised(saved, kind="nf4-nested", dtype=torch.float32, compute=None, **options):
    settings = dict(KINDS[kind])
    if "load_in_4bit" in settings:
        settings["bnb_4bit_compute_dtype"] = compute or dtype
    config = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, quantization_config=config)
    torch.manual_seed(3)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**options)).train()


@pytest.fixture
def patched(calls):
    """Patch a model's LoRA layers, and its MLPs too."""

    def patch(model, mlp=False):
        report = apply_liger(model, ALONE | {"swiglu": mlp})["lora"]
        calls.clear()  # drop the calls of proofs
        return report

    return patch


@pytest.fixture
def calls(monkeypatch):
    """The calls of our functions."""
    monkeypatch.setattr(lora, "LEAST_WORK", 0)
    seen = []
    for module, name in ((lora, "lora_linear"), (mlps, "lora_mlp")):
        inner = getattr(module, name)

        def counted(x, *given, inner=inner, name=name, **options):
            seen.append(name)
            return inner(x, *given, **options)

        monkeypatch.setattr(module, name, counted)

    return seen


@pytest.mark.parametrize("mlp", [False, True], ids=["layers", "mlps"])
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_stock(kind, dtype, mlp, saved, patched, calls):
    stock, model = (quantised(saved, kind, dtype) for _ in range(2))
    report = patched(model, mlp)
    assert len(report.swapped) == LAYERS and not report.skipped
    assert_same_step(step(model), step(stock), RTOL[dtype], floor=0)
    assert len(calls) == (10 if mlp else LAYERS)
    assert set(report.swapped.values()) == {f"linear Linear{'8bitLt' if kind == 'int8' else '4bit'} + default"}


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind, saved, patched, calls):
    stock, model = (quantised(saved, kind, torch.bfloat16) for _ in range(2))
    patched(model, mlp=True)
    assert_same_step(
        step(model, autocast=torch.bfloat16), step(stock, autocast=torch.bfloat16), RTOL[torch.bfloat16], floor=0
    )
    assert len(calls) == 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, saved, patched, calls):
    stock, model = (quantised(saved) for _ in range(2))
    patched(model, mlp=True)
    for one in (stock, model):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
    assert len(calls) == 20


@pytest.mark.parametrize("kind, sliced", [("nf4-nested", True), ("int8", False)])
def test_an_mlp_of_many_rows(kind, sliced, saved, patched, calls, monkeypatch):
    """int8 computes a column in 16 bits if any row has an outlier there, so rows depend on each other.

    On CPUs it does so only in eval mode.
    """
    sizes = importlib.import_module("liger_triton.lora_mlp")
    monkeypatch.setattr(sizes, "SLICE_ABOVE", 0)
    monkeypatch.setattr(sizes, "SLICE_BYTES", 1 << 12)
    monkeypatch.setattr(sizes, "SLICE_UNIT", 8)
    in_slices, own = [], sizes._SlicedMLP.apply
    monkeypatch.setattr(sizes._SlicedMLP, "apply", lambda *given: in_slices.append(1) or own(*given))
    stock, model = (quantised(saved, kind) for _ in range(2))
    patched(model, mlp=True)
    for one in (stock, model):
        one.eval()
        for norm in (m for name, m in one.named_modules() if name.endswith("post_attention_layernorm")):
            norm.weight.data[3] = 40.0
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
    assert len(in_slices) == (2 if sliced else 0) and calls.count("lora_mlp") == 2


def test_no_weight_is_kept_unpacked(saved, patched, calls):
    model = quantised(saved)
    patched(model, mlp=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(**collate(ragged_rows(4)))
    trained = {tuple(p.shape) for p in model.parameters() if p.requires_grad}
    widths = {(64, 64), (128, 64), (64, 128), (32, 64)}
    assert not {tuple(t.shape) for t in kept} & (widths - trained)


def test_layers_in_another_dtype_keep_their_code(saved, patched, calls):
    """fp32 in a bf16 model, and an autocast of another dtype."""
    stock, model = (quantised(saved, dtype=torch.bfloat16, compute=torch.float32) for _ in range(2))
    report = patched(model)
    assert set(report.skipped.values()) == {
        "its base was quantized from torch.bfloat16 and computes in torch.float32: set bnb_4bit_compute_dtype: bfloat16"
    }
    assert_same_step(step(model), step(stock), 0, floor=0)
    stock, model = (quantised(saved) for _ in range(2))
    assert len(patched(model).swapped) == LAYERS
    assert_same_step(step(model, autocast=torch.bfloat16), step(stock, autocast=torch.bfloat16), 0, floor=0)
    assert not calls


def test_the_first_call_decides_the_dtype(saved, patched, calls):
    stock, model = (quantised(saved) for _ in range(2))
    for one in (stock, model):
        for module in one.modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                module.compute_dtype, module.compute_type_is_set = None, False
    patched(model)
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
    assert len(calls) == LAYERS
    assert all(m.compute_type_is_set for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit))


def test_some_projections_without_an_adapter(saved, patched, calls):
    stock, model = (quantised(saved, target_modules=["q_proj", "up_proj"]) for _ in range(2))
    patched(model, mlp=True)
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
    assert calls.count("lora_mlp") == 2 and calls.count("lora_linear") == 2


def test_dropout_disabled_and_merged(saved, patched, calls):
    stock, model = (quantised(saved, lora_dropout=0.5) for _ in range(2))
    patched(model)
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
    for one in (stock, model):
        one.eval()
    rows = collate(ragged_rows(4))
    with torch.no_grad():
        torch.testing.assert_close(model(**rows).logits, stock(**rows).logits)
        with model.disable_adapter(), stock.disable_adapter():
            assert torch.equal(model(**rows).logits, stock(**rows).logits)
        for one in (stock, model):
            one.merge_adapter()
        assert torch.equal(model(**rows).logits, stock(**rows).logits)


def test_trained_after_an_evaluation(saved, patched, calls):
    """On a CPU with the right instructions, bitsandbytes repacks weights during an evaluation and keeps them so."""
    stock, model = (quantised(saved, dtype=torch.bfloat16) for _ in range(2))
    patched(model)
    rows = collate(ragged_rows(4))
    for one in (stock, model):
        one.eval()
        with torch.no_grad():
            one(**rows)
        one.train()
    calls.clear()
    states = [m.weight.quant_state for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    repacked = any(getattr(state, "packing_format_for_cpu", False) for state in states)
    assert_same_step(step(model), step(stock), 0 if repacked else RTOL[torch.bfloat16], floor=0)
    assert bool(calls) != repacked


def test_rows_that_are_no_multiple_of_a_block(saved, patched, calls):
    """For such rows, bitsandbytes 0.50 unpacks other numbers on CPUs than it packed."""
    stock, model = (quantised(saved) for _ in range(2))
    for one in (stock, model):
        for module in one.modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit) and module.in_features == 64:
                weight = torch.randn(module.out_features, 64, generator=torch.Generator().manual_seed(2)) / 8
                settings = {"blocksize": 128, "compress_statistics": True, "quant_type": "nf4", "module": module}
                module.weight = bitsandbytes.nn.Params4bit(weight, False, **settings).to("cpu")
    patched(model)
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
    assert len(calls) == 2, "down_proj has rows of 128"


def test_a_second_backward_a_copy_and_removal(saved, patched, calls):
    stock, model = (quantised(saved) for _ in range(2))
    patched(model, mlp=True)
    loss = model(**collate(ragged_rows(4))).loss
    loss.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.equal(p.grad, 2 * first[name])
    want, made = step(stock), len(calls)
    assert_same_step(step(copy.deepcopy(model)), want, RTOL[torch.float32], floor=0)
    assert len(calls) == 2 * made
    remove_liger(model)
    assert_same_step(step(model), want, 0, floor=0)
    assert len(calls) == 2 * made


def test_a_hook_on_the_base(saved, patched, calls):
    model, seen = quantised(saved), []
    patched(model, mlp=True)
    model.base_model.model.model.layers[0].mlp.up_proj.base_layer.register_forward_hook(lambda *given: seen.append(1))
    step(model)
    assert len(seen) == 1


def test_a_forward_that_was_replaced(saved, patched, calls, monkeypatch):
    stock, model = (quantised(saved) for _ in range(2))
    patched(model, mlp=True)
    own = bitsandbytes.nn.Linear4bit.forward
    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", lambda self, x: 2 * own(self, x))
    assert_same_step(step(model), step(stock), RTOL[torch.float32], floor=0)
    assert not calls
