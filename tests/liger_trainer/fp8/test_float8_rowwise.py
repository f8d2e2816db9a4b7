"""torchao's recipes with row scales in a patched model, compared with the same model running torchao's code.

On a CPU both multiply in fp32 (`emulate`). The twins run there, because Triton's interpreter rounds to FP8 wrongly.
"""

import copy
import importlib

import pytest
import torch
from tiny_models import collate, ragged_rows

from liger_trainer import apply_liger
from liger_trainer.fp8 import layers as float8

pytest.importorskip("torchao", reason="torchao is not installed")
from fp8_models import LAYERS, RTOL, config_of, fp8_model, patched  # noqa: E402
from tiny_models import assert_same_gradients, assert_same_step, step  # noqa: E402
from torchao.float8.float8_linear import Float8Linear  # noqa: E402

kernels = importlib.import_module("liger_triton.float8_linear")
RECIPES = ["rowwise", "rowwise_with_gw_hp"]
VARIANTS = [
    pytest.param("rowwise", {}, "rowwise, scales in powers of 2", id="rowwise"),
    pytest.param("rowwise_with_gw_hp", {}, "rowwise_with_gw_hp, scales in powers of 2", id="gw_hp"),
    pytest.param("rowwise", {"round_scales_to_power_of_2": False, "pad_inner_dim": True}, "rowwise", id="any scale"),
]


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    for name in ("float8_cast",):
        monkeypatch.setattr(importlib.import_module(f"liger_triton.{name}"), "runs_triton", lambda *tensors: False)


@pytest.fixture
def theirs(monkeypatch):
    """The calls of torchao's code."""
    seen, own = [], Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", lambda self, input: seen.append(1) or own(self, input))
    return seen


def prepared(recipe, **options):
    """A patched model after its proofs, which run torchao's code."""
    model = fp8_model(config=config_of(recipe), **options)
    assert len(patched(model).swapped) == LAYERS
    return model


@pytest.mark.parametrize("tokens", [(3, 7), (32,), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe, options, variant", VARIANTS)
def test_one_layer(recipe, options, variant, dtype, tokens, theirs):
    """With power-of-two scales, output and both gradients are bit-equal to torchao's.

    Other scales multiply the sum here, and each number there.
    """
    layer = fp8_model(dtype=dtype, config=config_of(recipe, **options)).model.layers[0].mlp.up_proj
    with torch.no_grad():  # a common scale would then differ
        layer.weight.mul_(torch.logspace(-6, 0, 32)).mul_(torch.logspace(2, -2, 48)[:, None])
    stock = copy.deepcopy(layer)
    assert patched(layer).swapped == {"": variant}
    x = torch.randn(*tokens, 32) * torch.logspace(1, -3, 32)
    dy = torch.randn(*tokens, 48).to(dtype)
    x = x.to(dtype).requires_grad_()
    results = []
    theirs.clear()
    for module in (layer, stock):
        y = module(x)
        y.backward(dy)
        results.append({"y": y.detach(), "x": x.grad, "weight": module.weight.grad})
        x.grad = None
    assert len(theirs) == 1
    assert_same_gradients(*results, 1e-6 if dtype == torch.float32 else 3e-3, floor=0)
    if not options and tokens != (1,):  # PyTorch sums the products of a single row in another order
        assert all(torch.equal(results[0][name], want) for name, want in results[1].items())


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_numbers_are_torchao_s(recipe, dtype, rtol, theirs):
    want = step(fp8_model(dtype=dtype, config=config_of(recipe)))
    model = prepared(recipe, dtype=dtype)
    theirs.clear()
    assert_same_step(step(model), want, rtol, floor=0)
    assert not theirs


def test_with_a_bias(theirs):
    want = step(fp8_model(config=config_of("rowwise"), attention_bias=True))
    model = fp8_model(config=config_of("rowwise"), attention_bias=True)
    assert "rowwise, scales in powers of 2, with bias" in patched(model).swapped.values()
    theirs.clear()
    assert_same_step(step(model), want, rtol=RTOL, floor=0)
    assert not theirs


@pytest.mark.parametrize("recipe", RECIPES)
def test_inside_the_other_operations(recipe, theirs):
    """Swaps everything, with recomputable results not kept, and compares with the rest swapped without our FP8."""
    want = fp8_model(config=config_of(recipe))
    model = fp8_model(config=config_of(recipe))
    apply_liger(want, {"float8": False, "rebuild_above_mib": 0})
    report = apply_liger(model, {"rebuild_above_mib": 0})
    assert len(report["float8"].swapped) == LAYERS and len(report["swiglu"].swapped) == 2
    want = step(want)
    theirs.clear()
    got = step(model)
    assert not theirs
    assert_same_step(got, want, rtol=RTOL, floor=0)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_casts_of_a_step(rebuilds, monkeypatch):
    """Each input is cast by rows once, for q, k and v together and for gate and up together.

    It is cast by columns once: in the forward pass, or in the backward pass if it is recomputed.
    """
    model = fp8_model(dtype=torch.bfloat16, config=config_of("rowwise"))
    apply_liger(model, {"rebuild_above_mib": 0} if rebuilds else dict.fromkeys(("rms_norm", "swiglu", "rope"), False))
    seen, weights = [], {tuple(p.shape) for p in model.parameters()}
    for name, own in (("rows", kernels.float8_rows), ("columns", kernels.float8_columns)):

        def counted(t, *args, own=own, name=name, **options):
            seen.append((name, tuple(t.shape) in weights))
            return own(t, *args, **options)

        monkeypatch.setattr(kernels, f"float8_{name}", counted)
    loss = model(**collate(ragged_rows(4))).loss
    assert seen.count(("rows", False)) == 2 * 4 and seen.count(("rows", True)) == LAYERS
    assert seen.count(("columns", False)) == (2 * 1 if rebuilds else 2 * 4)  # the attention's output is kept
    seen.clear()
    loss.backward()
    inputs = 2 * 3 if rebuilds else 0
    assert seen.count(("columns", False)) == inputs + LAYERS and seen.count(("columns", True)) == LAYERS
    assert seen.count(("rows", False)) == LAYERS


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, recipe, theirs):
    want, model = step(fp8_model(config=config_of(recipe))), prepared(recipe)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    theirs.clear()
    assert_same_step(step(model), want, rtol=RTOL, floor=0)
    assert not theirs


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_without_a_backward_pass_and_evaluation_between(recipe, theirs):
    model, stock = prepared(recipe), fp8_model(config=config_of(recipe))
    model(**collate(ragged_rows(4)))
    with torch.no_grad():
        model.eval()(**collate(ragged_rows(3)))
    assert_same_step(step(model.train()), step(stock), rtol=RTOL, floor=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_an_optimizer_has_changed(recipe):
    """The change may come without a new version. No cast of a weight outlives its call."""
    results = []
    for model in (prepared(recipe), fp8_model(config=config_of(recipe))):
        step(model)
        for p in model.parameters():
            p.data.sub_(0.1 * p.grad)
        results.append(step(model))
    assert_same_step(*results, rtol=RTOL, floor=0)


def test_layers_of_two_recipes_in_one_model(theirs):
    """Layers that share an input do not share its cast."""

    def mixed():
        model = fp8_model(config=config_of("rowwise"))
        for layer in model.model.layers:
            layer.self_attn.k_proj.config = config_of()
            layer.self_attn.v_proj.config = config_of("rowwise_with_gw_hp")
        return model

    model = mixed()
    assert len(set(patched(model).swapped.values())) == 3
    theirs.clear()
    got = step(model)
    assert not theirs
    assert_same_step(got, step(mixed()), rtol=RTOL, floor=0)


def test_a_copy_with_another_recipe_runs_torchao_s_code(theirs):
    layer = prepared("rowwise").model.layers[0].mlp.up_proj
    layer.config = config_of("rowwise_with_gw_hp")
    theirs.clear()
    layer(torch.randn(3, 32))
    assert theirs


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_formula_that_changes_is_not_swapped(recipe, monkeypatch):
    """A release of torchao might scale the weight differently in the backward pass, for example."""
    own = float8.form_of
    monkeypatch.setattr(float8, "form_of", lambda config: own(config)._replace(gw_hp=recipe == "rowwise"))
    report = patched(fp8_model(config=config_of(recipe)))
    assert not report.swapped and all("with the scales of its recipe" in why for why in report.skipped.values())
