"""Swapped LoRA layers over an FP8 base, compared with PEFT's code over the same base.

A single layer rounds the same tensors with the same scales, so it agrees to fp32. A whole MLP rounds the gradients of
gate and up with one common scale, so its input's gradient differs by one FP8 rounding.
"""

import copy
import pickle

import pytest
import torch
from frozen_bases import LAYERS, adapted, distance, frozen
from peft import LoraConfig
from tiny_models import assert_same_step, collate, ragged_rows, step, tiny_model
from torch import nn

from liger_trainer import apply_liger, remove_liger
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.lora import layers as lora
from liger_trainer.lora.layers import LoRA
from liger_trainer.patching import mlps
from liger_triton import Float8Weight

OTHERS = dict.fromkeys(("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"), False) | {"rebuild_above_mib": 0}
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"lora_dropout": 0.3}, id="dropout"),
    pytest.param({"bias": "all"}, id="bias"),
    pytest.param({"rank_pattern": {"q_proj": 2, "down_proj": 7}}, id="mixed-ranks"),
    pytest.param({"modules_to_save": ["lm_head"]}, id="modules-to-save"),
    pytest.param({"target_modules": ["q_proj", "up_proj"]}, id="some-layers"),
    pytest.param({"init_lora_weights": "pissa"}, id="pissa"),
]


@pytest.fixture
def calls(monkeypatch):
    """The base weights in our functions' LoRA calls."""
    seen = []

    def counted(x, weight, bias, own=lora.lora_linear, **options):
        if x.shape[1:] not in ((5, 6), (5, 16)):  # skip proofs
            seen.append(weight)
        return own(x, weight, bias, **options)

    def counted_mlp(x, *projections, own=mlps.lora_mlp, **options):
        seen.extend(weight for weight, _, adapter in projections if adapter is not None)
        return own(x, *projections, **options)

    monkeypatch.setattr(lora, "lora_linear", counted)
    monkeypatch.setattr(mlps, "lora_mlp", counted_mlp)
    return seen


@pytest.mark.parametrize("options", OPTIONS)
def test_each_layer_alone(options, calls):
    stock, model = frozen(**options), frozen(**options)
    report = apply_liger(model, OTHERS)["lora"]
    expected = 2 * len(options.get("target_modules", range(7)))
    assert len(report.swapped) == expected and not report.skipped
    assert set(report.swapped.values()) == {"linear in fp8 + default"}
    assert_same_step(
        step(model), step(stock), 1e-4, floor=0
    )  # another order of the sum may round to the other neighbour
    assert len(calls) == expected and all(isinstance(weight, Float8Weight) for weight in calls)


@pytest.mark.parametrize("options", OPTIONS)
def test_whole_mlps(options, calls):
    """The loss equals single layers', except with dropout, where layers run singly anyway."""
    stock, model = frozen(**options), frozen(**options)
    apply_liger(model, OTHERS | {"swiglu": True})
    got, want = step(model), step(stock)
    loss, gradients = distance(got, want)
    assert loss < 1e-4 and gradients < 0.05
    assert len(calls) == 2 * len(options.get("target_modules", range(7)))
    in_16_bits = distance(step(adapted(**options)), want)[1]
    assert gradients < in_16_bits, "no further from PEFT's FP8 code than that is from 16 bits"


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_dtypes(dtype, autocast, calls):
    """The dtype of x may be any; the weight does not affect it."""
    stock, model = frozen(dtype), frozen(dtype)
    apply_liger(model, OTHERS | {"swiglu": True})
    loss, gradients = distance(step(model, autocast=autocast), step(stock, autocast=autocast))
    assert loss < 3e-3 and gradients < 0.1
    # no function of ours multiplies in FP8 for fp32 adapters on fp16, so they keep PEFT's code
    assert len(calls) == (0 if dtype == torch.float16 and autocast is None else LAYERS)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_16_bit_layers_share_their_input_with_fp8_layers(autocast, calls):
    """k and v are too narrow for FP8, and share their input, and so its gradient, with q."""

    def narrow():
        return tiny_model("llama", num_key_value_heads=1)

    stock, model = frozen(model=narrow()), frozen(model=narrow())
    apply_liger(model, OTHERS | {"swiglu": True})
    attention = model.get_base_model().model.layers[0].self_attn
    assert [type(p.base_layer) for p in (attention.q_proj, attention.k_proj)] == [FrozenFloat8Linear, nn.Linear]
    loss, gradients = distance(step(model, autocast=autocast), step(stock, autocast=autocast))
    assert loss < 3e-3 and gradients < 0.05
    assert sum(isinstance(weight, Float8Weight) for weight in calls) == LAYERS - 4 and len(calls) == LAYERS


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "not-reentrant"])
def test_checkpointing_and_two_backward_passes(checkpointing, calls):
    model, other = frozen(), frozen()
    apply_liger(model)
    apply_liger(other)
    want = step(other)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    once = step(model)
    if checkpointing is True:  # its first pass has no graph, so q, k and v are computed one by one
        loss, gradients = distance(once, want)
        assert loss < 1e-5 and gradients < 0.02
        return
    assert distance(once, want) == (0, 0)
    twice = step(model, backwards=2)
    assert_same_step(twice, (want[0], {name: 2 * grad for name, grad in want[1].items()}), 1e-5, floor=0)


def test_steps_without_backward_and_in_eval_between():
    model, other = frozen(), frozen()
    apply_liger(model)
    apply_liger(other)
    model(**collate(ragged_rows(4)))
    with torch.no_grad():
        model.eval()(**collate(ragged_rows(4)))
    assert distance(step(model.train()), step(other)) == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.base_model.disable_adapter_layers(), id="disabled"),
        pytest.param(lambda m: m.set_adapter("other"), id="switched"),
        pytest.param(lambda m: m.base_model.set_adapter(["default", "other"]), id="two"),
        pytest.param(lambda m: m.delete_adapter("other"), id="deleted"),
    ],
)
def test_adapters_are_changed_after_patching(change):
    found = []
    for patched in (True, False):
        model = frozen()
        torch.manual_seed(5)
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        if patched:
            apply_liger(model, OTHERS)
        change(model)
        with torch.no_grad():
            found.append(model(**collate(ragged_rows(4))).loss)
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.parametrize("part", ["base_layer", "lora_A"])
def test_a_user_s_hook_is_called(part, calls):
    """The layer runs PEFT's code, which calls the hook."""
    seen, model = [], frozen()
    apply_liger(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    hooked = layer.base_layer if part == "base_layer" else layer.lora_A["default"]
    hooked.register_forward_hook(lambda *args: seen.append(1))
    step(model)
    assert len(seen) == 1


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_and_unpatching(make, calls):
    model = frozen()
    want = step(model)
    apply_liger(model)
    ours = step(model)
    other = make(model)
    apply_liger(other)
    assert distance(step(other), ours) == (0, 0)
    remove_liger(model)
    calls.clear()
    assert distance(step(model), want) == (0, 0) and not calls


def test_x_of_another_kind_runs_peft_s_code():
    model = frozen()
    apply_liger(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match=r"x is \(3, 32\) torch.int64"):
        layer(torch.ones(3, 32, dtype=torch.int64))
    x = torch.randn(3, 32, dtype=torch.float64)
    assert (layer(x) - layer(x.float())).norm() < 0.1 * layer(x).norm()


def test_the_proof_runs_an_fp8_layer():
    layer = frozen().get_base_model().model.layers[0].self_attn.q_proj
    assert lora.prove(layer) == (("lora", LoRA(("default",), False, "in fp8"), lora.forward), None)
    copied = lora._small_copy(layer, torch.Generator().manual_seed(0), torch.float32, (16, 32))
    assert type(copied._modules["base_layer"]) is FrozenFloat8Linear

    class Wrong(type(layer)):
        def forward(self, x):
            return super().forward(x) * 1.01

    Wrong.__module__ = type(layer).__module__
    Wrong.__qualname__ = type(layer).__qualname__
    layer.__class__ = Wrong
    assert lora.prove(layer) == (None, "it is not x W^T + b + the sum of s (x A^T) B^T")


def test_an_mlp_without_adapters_calls_its_layers(monkeypatch):
    """It calls them as modules, with our gate between them. Only the gate reads its inputs."""
    seen, own = [], FrozenFloat8Linear.forward
    monkeypatch.setattr(FrozenFloat8Linear, "forward", lambda self, x: seen.append(self) or own(self, x))
    stock, model = frozen(target_modules=["q_proj"]), frozen(target_modules=["q_proj"])
    report = apply_liger(model, OTHERS | {"swiglu": True})
    assert len(report["swiglu"].swapped) == 2
    want = step(stock)
    seen.clear()
    assert_same_step(step(model), want, 1e-4, floor=0)
    mlp = model.get_base_model().model.layers[0].mlp
    assert all(layer in seen for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def test_gate_and_up_are_written_over():
    from liger_trainer.memory.rebuild import only_caller_reads

    layer = FrozenFloat8Linear.of(nn.Linear(32, 48).requires_grad_(False))
    assert only_caller_reads(layer, layer(torch.randn(2, 3, 32).requires_grad_()))
