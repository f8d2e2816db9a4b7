"""Layers with a state on concatenated rows with offsets, as on a GPU: proven, and compared with stock."""

import copy
import sys

import pytest
import torch
from installed_packages import install_packages
from tiny_models import largest_difference, step
from transformers import DataCollatorWithFlattening
from varlen_batches import ON, assert_same_with_states, batch, drawn_model, rows_of

from liger_trainer import apply_liger
from liger_trainer.varlen import state_layers
from liger_trainer.varlen.proof import backbone, convolutions, rules
from liger_trainer.varlen.proof.packed_rows import kernel_behind
from liger_trainer.varlen.rows import Rows

RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(model)` patches a model as on a machine with a GPU. Its layers run on the CPU as they would there."""
    monkeypatch.setattr(backbone, "_has_gpu", lambda: True)

    def patched(model):
        report = apply_liger(model, ON)["varlen_attention"]
        for module in model.modules():
            binding = state_layers.StateBinding.of(module)
            if binding is not None:
                binding.on_cpu = True
        return [text for text in report.swapped.values() if "one after the other" in text]

    return patched


@pytest.fixture
def offsets(monkeypatch):
    """The numbers of tokens and rows that convolutions got with their offsets."""
    found, own = [], convolutions._rows_of_tokens

    def rows_of_tokens(x, offsets):
        if offsets is not None:
            found.append((x.shape[0], x.shape[2], len(offsets) - 1))
        return own(x, offsets)

    monkeypatch.setattr(convolutions, "_rows_of_tokens", rows_of_tokens)
    return found


def assert_steps_are_stock_s(model, gpu, offsets, stock):
    right, left = batch(), batch(side="left")
    want = [step(stock, call) for call in (right, left)]
    assert gpu(model)
    packed = dict(DataCollatorWithFlattening()(rows_of(right)))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for call, wanted in ((right, want[0]), (left, want[1]), (packed, want[0])):
            offsets.clear()
            got = step(model, call)
            assert offsets and set(offsets) == {(1, 41, 4)}
            assert_same_with_states(got, wanted)


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_convolutions_alone(name, gpu, offsets):
    model = drawn_model(name)
    assert_steps_are_stock_s(model, gpu, offsets, copy.deepcopy(model))


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "olmo_hybrid", "kimi_linear")),
    ],
)
def test_with_a_rule_that_takes_offsets(name, gpu, offsets, monkeypatch):
    """This holds even if the layer passes `cu_seqlens` on under a name that the rule does not know."""
    model = drawn_model(name)
    stock, scope = copy.deepcopy(model), sys.modules[type(model).__module__]
    right, left = batch(), batch(side="left")
    want = {"right": step(stock, right), "left": step(stock, left)}
    install_packages(monkeypatch, type(model).__module__, RULES)
    assert any(kernel_behind(vars(scope).get(name)) is not None for name in RULES)
    assert gpu(model)
    packed = dict(DataCollatorWithFlattening()(rows_of(right)))
    for call, wanted in ((right, want["right"]), (left, want["left"]), (packed, want["right"])):
        offsets.clear()
        got = step(model, call)
        assert offsets and {rows for _, _, rows in offsets} == {4}
        assert_same_with_states(got, wanted)


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", pytest.param("zaya", marks=pytest.mark.slow)])
def test_a_rule_that_is_told_nothing_keeps_rows_side_by_side(name, gpu):
    model = drawn_model(name)
    assert not gpu(model)
    assert all(
        not state_layers.StateBinding.of(m).by_rows
        for m in model.modules()
        if state_layers.StateBinding.of(m) is not None
    )


def test_without_a_gpu_rows_are_side_by_side(monkeypatch):
    model = drawn_model("lfm2")
    monkeypatch.setattr(backbone, "_has_gpu", lambda: False)
    report = apply_liger(model, ON)["varlen_attention"]
    assert not any("one after the other" in text for text in report.swapped.values())


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_package_s_rule_gets_the_offsets_on_a_gpu(monkeypatch):
    model = drawn_model("qwen3_5_text")
    install_packages(monkeypatch, type(model).__module__, RULES)
    given = []

    own = vars(sys.modules[type(model).__module__])[RULES[0]]
    kernel = kernel_behind(own)
    rule = rules._with_rows(lambda *args, **kwargs: given.append(kwargs), kernel)
    rows = Rows([3, 2], torch.device("cpu"))
    q = torch.ones(1, 5, 2, 4).as_subclass(OnGPU)
    with state_layers.use_layer_rows(rows):
        rule(q, q, q, cu_seqlens=None)
    rule(q, q, q, cu_seqlens=None)
    assert given[0]["cu_seqlens"] is rows.offsets and given[1]["cu_seqlens"] is None


def test_a_forward_that_asks_for_its_device_is_not_shown_on_a_cpu():
    def asks(self, hidden_states, attention_mask=None):
        return hidden_states.is_cuda

    def names(self, hidden_states, attention_mask=None):
        return "cuda" in str(hidden_states)

    def neither(self, hidden_states, attention_mask=None):
        return hidden_states

    assert rules.asks_for_device(asks) and rules.asks_for_device(names) and not rules.asks_for_device(neither)


def test_a_convolution_that_the_kernel_does_not_take_computes_padding(gpu, monkeypatch):
    """Packed rows are refused then, because the model's own code would mix them."""
    model = drawn_model("lfm2")
    stock, call = copy.deepcopy(model), batch()
    assert gpu(model)
    want = step(stock, call)
    monkeypatch.setattr(convolutions, "fits", lambda *given: False)
    assert_same_with_states(step(model, call), want)
    with pytest.raises(ValueError, match="Packed rows would see each other"):
        step(model, dict(DataCollatorWithFlattening()(rows_of(call))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "qwen3_5_text", "bamba"])
def test_on_a_gpu(name, monkeypatch):
    """In fp32, and no further from the stock model on a CPU than stock is here. `lfm2` computes no padding.

    flash-linear-attention multiplies fp32 in TF32, so the decay of a gated delta rule is off by 0.5 % in stock too.
    """
    model = drawn_model(name)
    right, left = batch(side="right"), batch(side="left")
    packed = dict(DataCollatorWithFlattening()(rows_of(right)))
    with monkeypatch.context() as patch:
        scope = sys.modules[type(model).__module__]
        for function in (RULES[0], "causal_conv1d_fn"):
            if kernel_behind(vars(scope).get(function)) is not None:  # a package's, which takes no tensors of a CPU
                patch.setattr(scope, function, vars(scope)[function].__wrapped__)
        exact = {side: step(copy.deepcopy(model), call) for side, call in (("right", right), ("left", left))}
    stock = model.cuda()
    model = copy.deepcopy(stock)
    report = apply_liger(model, ON)["varlen_attention"]
    by_rows = any("one after the other" in text for text in report.swapped.values())
    assert by_rows or not name.startswith("lfm2")
    rounding = {}
    for side, call in (("right", right), ("left", left)):
        rounding[side] = largest_difference(on_cpu(step(stock, on_gpu(call))), exact[side])
    for call, side in ((right, "right"), (left, "left"), (packed, "right")):
        apart = largest_difference(on_cpu(step(model, on_gpu(call))), exact[side])
        assert apart <= 1e-4 + 2 * rounding[side], (side, rounding)


def on_gpu(call):
    return {name: x.cuda() for name, x in call.items()}


def on_cpu(result):
    """The loss and the gradients that `step` returned, on the CPU."""
    loss, gradients = result
    return loss.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}
