"""torchao's FP8 layers in a patched model, compared with the same model running torchao's code.

On a CPU both multiply in fp32 (`emulate`). The twins run there, because Triton's interpreter rounds to FP8 wrongly.
"""

import copy
import importlib
import pickle

import pytest
import torch
from tiny_models import collate, ragged_rows
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer import apply_liger, remove_liger
from liger_trainer.fp8 import layers as float8
from liger_trainer.patching.core.binding import Binding

pytest.importorskip("torchao", reason="torchao is not installed")
from fp8_models import LAYERS, RTOL, config_of, fp8_model, patched  # noqa: E402
from tiny_models import assert_same_gradients, assert_same_step, step  # noqa: E402
from torchao.float8 import CastConfig, ScalingGranularity, ScalingType  # noqa: E402
from torchao.float8.float8_linear import Float8Linear  # noqa: E402

kernels = importlib.import_module("liger_triton.float8_linear")


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    monkeypatch.setattr(importlib.import_module("liger_triton.float8_cast"), "runs_triton", lambda *tensors: False)


@pytest.fixture
def ours(monkeypatch):
    """The weights that our function multiplied by."""
    seen = []

    def counted(x, weight, bias=None, **options):
        seen.append(tuple(weight.shape))
        return kernels.float8_linear(x, weight, bias, **options)

    monkeypatch.setattr(float8, "float8_linear", counted)
    return seen


VARIANTS = {
    "torchao's default": ({}, "tensorwise, gradients in e5m2"),
    "powers of two": ({"round_scales_to_power_of_2": True}, "tensorwise, gradients in e5m2, scales in powers of 2"),
    "e4m3 gradients": (
        {"cast_config_grad_output": CastConfig(target_dtype=torch.float8_e4m3fn)},
        "tensorwise, gradients in e4m3",
    ),
}


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)], ids=str)
@pytest.mark.parametrize("options, variant", VARIANTS.values(), ids=VARIANTS)
def test_one_layer(options, variant, dtype, rtol, ours):
    """Output and both gradients agree, for row counts that are not multiples of 16."""
    layer = fp8_model(dtype=dtype, config=config_of(**options)).model.layers[0].mlp.up_proj
    stock = copy.deepcopy(layer)
    assert patched(layer).swapped == {"": variant}
    ours.clear()
    x = torch.randn(3, 7, 32).to(dtype).requires_grad_()
    dy = torch.randn(3, 7, 48).to(dtype)
    results = []
    for module in (layer, stock):
        y = module(x)
        y.backward(dy)
        results.append({"y": y.detach(), "x": x.grad, "weight": module.weight.grad})
        x.grad = None
    assert len(ours) == 1
    assert_same_gradients(*results, rtol, floor=0)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("options, variant", VARIANTS.values(), ids=VARIANTS)
def test_the_numbers_are_torchao_s(options, variant, dtype, rtol, ours):
    """Loss and gradients of a model equal torchao's.

    A sum in another order may give the next layer another FP8 number.
    """
    want = step(fp8_model(dtype=dtype, config=config_of(**options)))
    model = fp8_model(dtype=dtype, config=config_of(**options))
    report = patched(model)
    assert set(report.swapped.values()) == {variant} and len(report.swapped) == LAYERS
    ours.clear()
    assert_same_step(step(model), want, rtol, floor=0)
    assert len(ours) == LAYERS


def test_with_a_bias(ours):
    want = step(fp8_model("llama", attention_bias=True))
    model = fp8_model("llama", attention_bias=True)
    assert "tensorwise, gradients in e5m2, with bias" in patched(model).swapped.values()
    assert_same_step(step(model), want, rtol=RTOL, floor=0)


def test_inside_the_other_operations(ours):
    """Swaps everything, with recomputable results not kept, and compares with the rest swapped without our FP8."""
    want, model = fp8_model(), fp8_model()
    apply_liger(want, {"float8": False, "rebuild_above_mib": 0})
    report = apply_liger(model, {"rebuild_above_mib": 0})
    assert len(report["float8"].swapped) == LAYERS and len(report["swiglu"].swapped) == 2
    want = step(want)
    ours.clear()
    got = step(model)
    assert len(ours) == LAYERS
    assert_same_step(got, want, rtol=RTOL, floor=0)


def kept_bytes(model):
    seen = {}

    def pack(t):
        seen[t.data_ptr(), t.shape] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(**collate(ragged_rows(4)))
    return sum(seen.values())


def test_an_input_is_cast_once_and_kept_in_fp8(monkeypatch):
    casts = []

    def counted(t, *args, own=kernels.float8_cast, **options):
        casts.append(tuple(t.shape))
        return own(t, *args, **options)

    model = fp8_model(dtype=torch.bfloat16)
    before = kept_bytes(model)
    patched(model)
    monkeypatch.setattr(kernels, "float8_cast", counted)
    kept = kept_bytes(model)
    of_weights = {tuple(p.shape) for p in model.parameters()}
    rows = [shape for shape in casts if shape not in of_weights]
    assert len(rows) == 2 * 4  # q, k and v; o; gate and up; down
    assert kept < before


def test_recomputable_results_are_not_kept_twice():
    """Outputs of norms and gates are recomputed and then cast to FP8.

    Only the attention's output is kept; on a CPU it is a copy of what the attention itself keeps.
    """
    model = fp8_model(dtype=torch.bfloat16)
    apply_liger(model, {"rebuild_above_mib": 0})
    kept = []
    original = kernels._Kept.forward

    def forward(ctx, given, *rest):
        kept.append(given.keeps_input)
        return original(ctx, given, *rest)

    kernels._Kept.forward = staticmethod(forward)
    try:
        step(model)
    finally:
        kernels._Kept.forward = staticmethod(original)
    assert kept == [True, True, True, False, True, True, True] * 2


def test_an_attention_saves_its_output():
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert float8._attention_saves(y) and float8._attention_saves(y.view(2, 16, 4, 2, 4))
    copied = y.contiguous().view(2, 16, 32)
    assert not any(map(float8._attention_saves, (copied, y * 1, q, torch.ones(3))))


def by_row(dtype=torch.float8_e4m3fn):
    return CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=dtype)


UNKNOWN = {
    "one cast by row": {"cast_config_input": by_row()},
    "by row, e5m2 gradients": {
        "cast_config_input": by_row(),
        "cast_config_weight": by_row(),
        "cast_config_grad_output": by_row(torch.float8_e5m2),
    },
    "16-bit gradients": {
        f"cast_config_{name}_for_grad_weight": CastConfig(scaling_type=ScalingType.DISABLED)
        for name in ("input", "grad_output")
    },
}


@pytest.mark.parametrize("options", UNKNOWN.values(), ids=UNKNOWN)
def test_other_recipes_keep_their_code(options):
    model = fp8_model(config=config_of(**options))
    report = patched(model)
    assert not report.swapped and len(report.skipped) == LAYERS
    assert all("its recipe is not one of" in why for why in report.skipped.values())


def test_widths_that_are_no_multiples_of_16():
    model = fp8_model(config=config_of(pad_inner_dim=True), intermediate_size=40)
    report = patched(model)
    assert len(report.skipped) == 6 and all("not multiples of 16" in why for why in report.skipped.values())


def test_a_formula_that_changes_is_not_swapped(monkeypatch):
    """A release of torchao might round the output once more, for example."""
    own = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", lambda self, input: own(self, input) * 1.01)
    report = patched(fp8_model())
    assert not report.swapped and all("does not compute" in why for why in report.skipped.values())


def test_switched_off(ours):
    model = fp8_model()
    assert not apply_liger(model, {"float8": False})["float8"].enabled
    ours.clear()
    step(model)
    assert not ours


@pytest.mark.parametrize("change", ["another config", "no emulation", "another dtype"])
def test_unsupported_calls_run_torchao_s_code(change, ours, monkeypatch):
    layer = fp8_model().model.layers[0].mlp.up_proj
    patched(layer)
    ours.clear()
    called = []
    own = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", lambda self, input: called.append(1) or own(self, input))
    x = torch.randn(3, 32)
    if change == "another config":
        layer.config = config_of(round_scales_to_power_of_2=True)
    elif change == "no emulation":
        monkeypatch.setattr(float8, "_takes", lambda *args: False)
    else:
        x, layer = x.double(), layer.double()
    layer(x)
    assert called and not ours


def test_hooks_see_each_call(ours):
    model, seen = fp8_model(), []
    patched(model)
    layer = model.model.layers[0].self_attn.k_proj
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, y: seen.append("after"))
    step(model)
    assert seen == ["before", "after"]


def test_a_hook_that_overwrites_the_input_takes_effect(ours):
    """The hook writes in place, without a new version: layers with hooks cast their inputs themselves."""

    def write(module, args):
        args[0].data.mul_(0.5)

    results = []
    for patch in (False, True):
        model = fp8_model()
        if patch:
            patched(model)
        model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(write)
        results.append(model(**collate(ragged_rows(4))).loss.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)


def test_copies_pickles_and_removal(ours):
    model = fp8_model()
    keys = list(model.state_dict())
    patched(model)
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    ours.clear()
    want = step(model)
    assert_same_step(step(twin), want, rtol=RTOL, floor=0)
    assert len(ours) == 2 * LAYERS
    layer = pickle.loads(pickle.dumps(model.model.layers[0].mlp.up_proj))
    assert Binding.of(layer) is None
    remove_liger(model)
    ours.clear()
    assert_same_step(step(model), want, rtol=RTOL, floor=0)
    assert not ours and all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, ours):
    want, model = step(fp8_model()), fp8_model()
    patched(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours.clear()
    assert_same_step(step(model), want, rtol=RTOL, floor=0)
    assert len(ours) == 2 * LAYERS


def test_a_step_without_a_backward_pass_and_evaluation_between(ours):
    model, stock = fp8_model(), fp8_model()
    patched(model)
    model(**collate(ragged_rows(4)))
    with torch.no_grad():
        model.eval()(**collate(ragged_rows(3)))
    assert_same_step(step(model.train()), step(stock), rtol=RTOL, floor=0)


def test_weights_that_an_optimizer_has_changed(ours):
    """The change may come without a new version. No cast of a weight outlives its call."""
    results = []
    for patch in (False, True):
        model = fp8_model()
        if patch:
            patched(model)
        step(model)
        for p in model.parameters():
            p.data.sub_(0.1 * p.grad)
        results.append(step(model))
    assert_same_step(*reversed(results), rtol=RTOL, floor=0)


def test_one_layer_checkpointed_by_hand(ours):
    model, stock = fp8_model(), fp8_model()
    patched(model)
    x = torch.randn(3, 32, requires_grad=True)
    grads = []
    for layer in (model.model.layers[0].mlp, stock.model.layers[0].mlp):
        y = checkpoint(layer, x, use_reentrant=False)
        grads.append(torch.autograd.grad(y.square().sum(), (x, layer.down_proj.weight)))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_layers_with_fp8_all_gather_are_left_to_torchao():
    model = fp8_model(config=config_of(enable_fsdp_float8_all_gather=True))
    report = patched(model)
    assert not report.swapped
    assert set(report.skipped.values()) == {
        "FSDP2 gathers its weights in fp8 (enable_fsdp_float8_all_gather), which only torchao's code reads"
    }
