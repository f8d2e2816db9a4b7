"""A patched model writes the gradients of gate and up over them exactly where nothing else reads them.

A gate's PyTorch twin never does. Here a gate in plain PyTorch replaces the kernel.
"""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from side_by_side import Gate
from tiny_models import collate, ragged_rows, tiny_model
from torch import nn

from liger_trainer import apply_liger
from liger_trainer.memory.rebuild import only_caller_reads
from liger_trainer.patching import gates, mlps
from liger_triton.halves import halves


@pytest.fixture
def patched(monkeypatch):
    """A function that patches a model with `Gate`. With `reuse=False`, the gate never overwrites anything."""

    def gate(a, b, reuse_inputs=False):
        return Gate.apply(a, b, reuse_inputs and patch.reuse)

    monkeypatch.setitem(gates.GATES, "silu", gate)
    # forwards are built once per process, and must not keep this gate
    monkeypatch.setattr(mlps, "build", mlps.build.__wrapped__)

    def patch(model, reuse):
        patch.reuse = reuse
        report = apply_liger(model, {"fused_linear_cross_entropy": False})
        assert len(report["swiglu"].swapped) == 2
        Gate.allowed = Gate.done = 0
        return model.train()

    patch.reuse = False
    return patch


def with_lora(model):
    targets = ["gate_proj", "up_proj", "gate_up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, init_lora_weights=False))


def checkpointed(use_reentrant):
    def make(model):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        return model

    return make


def hooked(model):
    """Keeps the results of the gate projections, like a tool that inspects activations."""
    model.kept = []
    for layer in model.model.layers:
        projection = getattr(layer.mlp, "gate_proj", None) or layer.mlp.gate_up_proj
        projection.register_forward_hook(lambda module, args, out: model.kept.append((out, out.clone())))
    return model


MODELS = {
    "plain": lambda model: model,
    "lora": with_lora,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "hook": hooked,
}


@pytest.mark.diagonal
@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize(
    "model_type, config", [("llama", {}), ("llama", {"mlp_bias": True}), ("glm4", {})], ids=["no-bias", "bias", "fused"]
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits(name, model_type, config, retain_graph, patched):
    found = []
    for reuse in (False, True):
        torch.manual_seed(0)
        model = patched(MODELS[name](tiny_model(model_type, **config)), reuse)
        loss = model(**collate(ragged_rows(4))).loss
        loss.backward(retain_graph=retain_graph)
        if retain_graph and name != "reentrant checkpoint":  # it runs a backward of its own graph
            assert Gate.done == 0
            model.zero_grad()
            loss.backward()
        in_one = name == "lora" and model_type == "llama"  # `lora_mlp` computes all three projections here
        assert bool(Gate.allowed) == bool(Gate.done) == (reuse and name != "hook" and not in_one)
        assert all(torch.equal(out, copy) for out, copy in getattr(model, "kept", ()))
        found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    never, allowed = found
    assert never.keys() == allowed.keys()
    assert all(torch.equal(never[key], allowed[key]) for key in never)


def test_the_gradient_of_halves_is_not_copied(monkeypatch):
    leaf = torch.randn(2, 5, 16, requires_grad=True)
    want = torch.autograd.grad(Gate.apply(*leaf.chunk(2, dim=-1), False).sum(), leaf)[0]
    out = Gate.apply(*halves(leaf), False).sum()

    def refuse(*args, **kwargs):
        raise AssertionError("copied")

    monkeypatch.setattr(torch, "cat", refuse)
    assert torch.equal(torch.autograd.grad(out, leaf)[0], want)


def test_halves_twice_differentiable():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    a, b = halves(x)
    (grad,) = torch.autograd.grad((a.exp() * b).sum(), x, create_graph=True)
    a, b = x.chunk(2, dim=-1)
    (want,) = torch.autograd.grad((a.exp() * b).sum(), x, create_graph=True)
    assert torch.equal(*(torch.autograd.grad(g.square().sum(), x)[0] for g in (grad, want)))


def lora_linear():
    return with_lora(nn.ModuleDict({"gate_proj": nn.Linear(6, 8)})).base_model.model["gate_proj"]


def with_hook_inside(module):
    module.base_layer.register_forward_hook(lambda *args: None)
    return module


class Keeping(nn.Linear):
    """A user's projection that keeps its result to look at it later."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Wrapped(nn.Linear):
    """Keeps its result too, under the names of the method that it wraps."""

    @functools.wraps(nn.Linear.forward)
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def with_own_forward(module):
    own = module.forward
    module.forward = lambda x: own(x)
    return module


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)], ids=str)
@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: nn.Linear(6, 8), True),
        (lambda: nn.Linear(6, 8, bias=False), True),
        (lora_linear, True),
        (lambda: with_hook_inside(lora_linear()), False),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU()), False),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Flatten(0, -2)), False),
        (nn.Identity, False),
        (lambda: Keeping(6, 8), False),
        (lambda: Wrapped(6, 8), False),
        (lambda: with_own_forward(nn.Linear(6, 8)), False),
    ],
    ids=[
        "bias",
        "no-bias",
        "lora",
        "lora-hook",
        "relu",
        "view-of-tanh",
        "identity",
        "subclass",
        "wrapped",
        "own-forward",
    ],
)
def test_other_readers_of_a_projection_prevent_reuse(make, expected, shape):
    module, x = make(), torch.randn(shape, requires_grad=True)
    assert only_caller_reads(module, module(x)) is expected
    with torch.no_grad():
        assert not only_caller_reads(module, module(x))


def test_a_global_hook_may_keep_anything():
    module = nn.Linear(6, 8)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not only_caller_reads(module, module(torch.randn(5, 6)))
    finally:
        handle.remove()
    assert only_caller_reads(module, module(torch.randn(5, 6)))
