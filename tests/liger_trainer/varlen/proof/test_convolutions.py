"""The short convolution of layers with a state: which function of transformers ours replaces, and where."""

import copy
import importlib
import types

import pytest
import torch
from attentions import with_own_attention
from tiny_models import assert_same_step, step
from transformers import DataCollatorWithFlattening
from transformers.integrations import hub_kernels
from varlen_batches import ON, batch, rows_of

from liger_trainer import apply_liger
from liger_trainer.varlen.proof import convolutions

TYPES = ("qwen3_5_text", "lfm2", "bamba")
MODELING = "transformers.models.{0}.modeling_{0}"
FILES = (
    "qwen3_5",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "kimi_linear",
    "zamba2",
)


def scope_of(name):
    return vars(pytest.importorskip(MODELING.format(name), exc_type=ImportError))


@pytest.fixture
def on_cpu(monkeypatch):
    """The convolutions that ours computed, with the CPU treated as a GPU. The kernel's twin runs."""
    found, own = [], convolutions.by_kernel
    monkeypatch.setattr(convolutions, "_takes", convolutions.fits)
    monkeypatch.setattr(convolutions, "by_kernel", lambda *given: found.append(given) or own(*given))
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_function_of_transformers_is_proven(name):
    ((replaced, function),) = convolutions.replacement(scope_of(name))
    assert replaced == "causal_conv1d_fn" and function is not scope_of(name)[replaced]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 11, 6), (1, 4, 6), (2, 1, 6)], ids=str)
def test_values_and_gradients(shape, bias, activation, on_cpu):
    scope = scope_of("qwen3_5")
    own, ours = scope["causal_conv1d_fn"], convolutions.replacement(scope)[0][1]
    x = torch.randn(shape)
    w = torch.randn(6, 4)
    b = torch.randn(6)
    upstream, results = torch.randn(shape).transpose(1, 2), []
    for function in (own, ours):
        leaves = [t.clone().requires_grad_() for t in ((x, w, b) if bias else (x, w))]
        y = function(leaves[0].transpose(1, 2), leaves[1], leaves[2] if bias else None, activation=activation)
        results.append((y, *torch.autograd.grad(y, leaves, upstream)))
    assert len(on_cpu) == 1
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_nothing_is_transposed(monkeypatch):
    """The kernel reads the projection's memory, and its output is the result."""
    given = []

    def recorded(x, *others, **options):
        given.append(x)
        return x.clone()

    monkeypatch.setattr(convolutions, "short_conv", recorded)
    projected = torch.randn(2, 5, 12)
    y = convolutions.by_kernel(projected.transpose(1, 2), torch.randn(12, 4), None, None)
    assert given[0].data_ptr() == projected.data_ptr() and given[0].shape == (10, 12)
    assert y.shape == (2, 12, 5) and y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", TYPES)
def test_a_step_with_it_equals_stock(name, on_cpu):
    model, _ = with_own_attention(name)
    stock, call = copy.deepcopy(model.train()), batch()
    report = apply_liger(model, ON)["varlen_attention"]
    assert any("its convolution by liger_triton.short_conv" in text for text in report.swapped.values())
    on_cpu.clear()
    want = step(stock, call)
    assert not on_cpu
    for given in (call, dict(DataCollatorWithFlattening()(rows_of(call)))):
        on_cpu.clear()
        assert_same_step(step(model, given), want)
        assert on_cpu
    on_cpu.clear()
    with torch.no_grad():
        got, want = (m(input_ids=call["input_ids"]).logits for m in (model, stock))
    assert on_cpu, "a call without a plan too"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_on_a_cpu_transformers_own_runs(monkeypatch):
    model, _ = with_own_attention("lfm2")
    apply_liger(model, ON)
    monkeypatch.setattr(convolutions, "by_kernel", None)
    step(model.train(), batch())


def test_another_function_stays():
    own = scope_of("qwen3_5")["causal_conv1d_fn"]

    def scaled(*args, **kwargs):
        return 1.001 * own(*args, **kwargs)

    def without_activation(x, weight, bias=None, activation=None):
        return own(x, weight, bias)

    for function in (scaled, without_activation, torch.nn.Identity(), None):
        assert convolutions.replacement({"causal_conv1d_fn": function}) == ()


def test_a_package_that_is_installed_stays(monkeypatch):
    decorator = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
    if decorator is None:
        pytest.skip("this transformers chooses packages in another way")
    own = scope_of("qwen3_5")["causal_conv1d_fn"]
    package = types.ModuleType("installed_conv")
    package.causal_conv1d_fn = lambda x, weight, bias=None, activation=None, seq_idx=None: x
    monkeypatch.setitem(importlib.sys.modules, package.__name__, package)
    decorated = decorator("causal_conv1d_fn", package.__name__)(own.__wrapped__)
    assert convolutions.replacement({"causal_conv1d_fn": decorated}) == ()


def test_unsupported_convolutions_run_transformers_code(on_cpu):
    scope = scope_of("qwen3_5")
    own, ours = scope["causal_conv1d_fn"], convolutions.replacement(scope)[0][1]
    on_cpu.clear()
    x = torch.randn(2, 6, 5)
    weight = torch.randn(6, 4)
    rows = torch.zeros(2, 5, dtype=torch.int32)
    answers = []
    for function in (own, ours):
        try:
            answers.append(function(x, weight, seq_idx=rows).tolist())
        except ValueError as error:  # from transformers 5.24 on
            answers.append(str(error))
    assert answers[0] == answers[1]
    ours(x, torch.randn(6, 9))
    ours(x.double(), torch.randn(6, 4).double())
    ours(x, torch.randn(6, 4), activation="gelu")
    assert not on_cpu


def test_a_function_that_was_replaced_since_runs(on_cpu, monkeypatch):
    model, _ = with_own_attention("lfm2")
    apply_liger(model, ON)
    scope = importlib.import_module(type(model).__module__)
    own, calls = scope.causal_conv1d_fn, []
    monkeypatch.setattr(scope, "causal_conv1d_fn", lambda *a, **k: calls.append(1) or own(*a, **k))
    on_cpu.clear()
    step(model.train(), batch())
    assert calls and not on_cpu
