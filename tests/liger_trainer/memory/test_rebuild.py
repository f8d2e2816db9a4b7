"""Backward rebuilds the input of a down projection and the output of a norm; nothing else changes."""

import contextlib
import gc
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows, tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer import apply_liger
from liger_trainer.memory import rebuild
from liger_trainer.patching import gates, mlps
from liger_triton import geglu, reference, swiglu

ALL = {"rebuild_above_mib": 0}  # however small


def call_rebuilding(*args):
    return rebuild.call_rebuilding(*args, above=0)


class Watched:
    """A gate that counts its calls and watches its first result."""

    def __init__(self, gate=swiglu):
        self.gate = gate
        self.calls = 0
        self.product = None

    def __call__(self, a, b, **options):
        self.calls += 1
        x = self.gate(a, b, **options)
        self.product = self.product or weakref.ref(x)
        return x


def tensors(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, 12, requires_grad=True), torch.randn(*shape, 12, requires_grad=True)


def lora_linear(dropout):
    torch.manual_seed(0)
    model = get_peft_model(
        nn.Sequential(nn.Linear(12, 7, bias=False)),
        LoraConfig(r=2, target_modules=["0"], lora_dropout=dropout, init_lora_weights=False),
    )
    return model.base_model.model[0].train()


MODULES = {
    "linear": lambda: nn.Linear(12, 7, bias=False),
    "bias": lambda: nn.Linear(12, 7),
    "lora": lambda: lora_linear(0.0),
    "lora-dropout": lambda: lora_linear(0.3),
    "not-linear": lambda: nn.Sequential(nn.Tanh(), nn.Linear(12, 7)),
}


@pytest.mark.parametrize("gate", [swiglu, geglu])
@pytest.mark.parametrize("shape", [(5,), (2, 5)])
@pytest.mark.parametrize("name", MODULES)
def test_gradients(name, shape, gate):
    module, results = MODULES[name](), []
    for call in (lambda a, b: module(gate(a, b)), lambda a, b: call_rebuilding(module, gate, a, b)):
        a, b = tensors(*shape)
        module.zero_grad()
        torch.manual_seed(1)  # dropout
        out = call(a, b)
        (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
        results.append([out, a.grad, b.grad, *(p.grad for p in module.parameters() if p.requires_grad)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_the_product_is_not_kept_and_made_again_once():
    gate, module = Watched(), nn.Linear(12, 7, bias=False)
    out = call_rebuilding(module, gate, *tensors(2, 5))
    assert gate.product() is None and gate.calls == 1
    out.sum().backward()
    assert gate.calls == 2
    kept = Watched()
    out = module(kept(*tensors(2, 5)))
    assert kept.product() is not None  # the control: a plain call keeps it


def test_a_frozen_projection_rebuilds_nothing():
    gate, module = Watched(), nn.Linear(12, 7, bias=False).requires_grad_(False)
    call_rebuilding(module, gate, *tensors(4)).sum().backward()
    assert gate.calls == 1


def test_a_weight_changed_before_the_backward_raises():
    module = nn.Linear(12, 7, bias=False)
    out = call_rebuilding(module, swiglu, *tensors(4))
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    module, grads = nn.Linear(12, 7), []
    for call in (lambda a, b: module(swiglu(a, b)), lambda a, b: call_rebuilding(module, swiglu, a, b)):
        a, b = tensors(3)
        module.zero_grad()
        checkpoint(call, a, b, use_reentrant=reentrant).sum().backward()
        grads.append((a.grad, b.grad, module.weight.grad))
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def test_a_patched_model_keeps_no_product(monkeypatch):
    gate = Watched()
    monkeypatch.setitem(gates.GATES, "silu", gate)
    # forwards are built once per process, and must not keep this gate
    monkeypatch.setattr(mlps, "build", mlps.build.__wrapped__)
    model, batch = tiny_model("llama").train(), collate(ragged_rows(4))
    apply_liger(model, ALL)
    gate.calls, gate.product = 0, None
    loss = model(**batch).loss
    assert gate.calls == 2 and gate.product() is None  # two layers
    loss.backward()
    assert gate.calls == 4


def gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def with_lora(model):
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj", "gate_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    return get_peft_model(model, config)


# gemma2: four norms a layer. cohere2: one norm feeds both the attention and the MLP.
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "cohere2", "llama-lora"])
def test_norm_outputs_made_again_give_the_same_bits(model_type, monkeypatch):
    model = tiny_model(model_type.removesuffix("-lora")).train()
    batch = collate(ragged_rows(4))
    model = with_lora(model) if model_type.endswith("-lora") else model
    made, get = [], rebuild._Rebuilt.get
    monkeypatch.setattr(rebuild._Rebuilt, "get", lambda self, shape: made.append(shape[-1]) or get(self, shape))
    norm = 4 * batch["input_ids"].numel() * model.config.hidden_size / 2**20  # MiB
    apply_liger(model, {"rebuild_above_mib": norm})
    want = gradients(model, batch)
    assert model.config.hidden_size not in made
    apply_liger(model, {"rebuild_above_mib": 0.99 * norm})
    got = gradients(model, batch)
    assert model.config.hidden_size in made
    assert len(got) == len(want) and all(map(torch.equal, got, want))


def test_a_norm_output_is_not_kept_and_made_again_once_for_all_projections(monkeypatch):
    outputs = []

    def watched(*args, rms_norm=reference.rms_norm, **kwargs):
        y = rms_norm(*args, **kwargs)
        outputs.append(weakref.ref(y))
        return y

    monkeypatch.setattr(reference, "rms_norm", watched)
    model, batch = tiny_model("llama").train(), collate(ragged_rows(4))
    apply_liger(model, ALL)
    outputs.clear()
    loss = model(**batch).loss
    assert len(outputs) == 5 and not any(ref() is not None for ref in outputs[:4])  # two norms in each of two layers
    loss.backward()
    assert len(outputs) == 5 + 4


def test_a_norm_weight_changed_before_the_backward_raises():
    model, batch = tiny_model("llama").train(), collate(ragged_rows(4))
    apply_liger(model, ALL)
    loss = model(**batch).loss
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Skipped(Exception):
    pass


@pytest.mark.parametrize("how", ["no backward", "exception", "exception in forward"])
def test_a_forward_without_a_backward_leaves_nothing(how):
    """After a skipped step, an interrupted one, or a retry after running out of memory, all is freed as in stock."""
    model = tiny_model("llama").train()
    batch = collate(ragged_rows(4))
    watched = []
    assert apply_liger(model, ALL).skipped == {}

    def watch(module, args, output):
        watched.append(weakref.ref(output))  # the norm of the next layer keeps it

    def stop(module, args):
        if how == "exception in forward":
            raise Skipped

    model.model.layers[0].register_forward_hook(watch)
    model.model.norm.register_forward_pre_hook(stop)
    gc.collect()
    gc.disable()  # whatever only a collection frees has leaked
    try:
        with contextlib.suppress(Skipped):
            loss = model(**batch).loss
            assert watched[0]() is not None  # the control
            del loss
            if how == "exception":
                raise Skipped
        assert len(watched) == 1 and watched[0]() is None
    finally:
        gc.enable()


def double(x):
    x.mul_(2)


# A pre-hook on the consumer of a norm's output or of a product, through `data`, which autograd does not see.
DATA_OF = ("self_attn", "self_attn.q_proj", "mlp", "mlp.gate_proj", "mlp.down_proj")


def double_data(module, args, kwargs):
    (args[0] if args else kwargs["hidden_states"]).data.mul_(2)


@pytest.mark.diagonal
@pytest.mark.parametrize("above", [0, 16])
@pytest.mark.parametrize("how", ["in-place", "data", "pre-hook-of-a-projection", "product", *DATA_OF])
def test_a_tensor_changed_in_place_is_not_made_again_as_it_was(how, above):
    """A hook changes the output of a norm, or the input of a projection. The gradients equal stock's."""
    batch, results = collate(ragged_rows(4)), []
    for patched in (False, True):
        model = tiny_model("llama").train()
        if patched:
            apply_liger(model, {"rebuild_above_mib": above})
        layer = model.model.layers[0]
        if how == "in-place":
            layer.input_layernorm.register_forward_hook(lambda module, args, y: double(y))
        elif how == "data":
            layer.input_layernorm.register_forward_hook(lambda module, args, y: double(y.data))
        elif how == "pre-hook-of-a-projection":
            layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: double(args[0]))
        elif how in DATA_OF:
            layer.get_submodule(how).register_forward_pre_hook(double_data, with_kwargs=True)
        else:
            layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: double(args[0]))
        results.append(gradients(model, batch))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_parents_changed_in_place_raise():
    """If a tensor needed to rebuild another has changed since, that is an error, as in stock."""
    x = torch.randn(3, 8, requires_grad=True)
    parent = x * 1
    weight = nn.Parameter(torch.randn(8, 8))
    y = rebuild.rebuildable(parent.exp(), torch.exp, parent, above=0)
    with rebuild.rebuilding(y):
        out = y @ weight
    parent.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_tensor_with_a_note_can_be_pickled():
    x = torch.randn(3, 8, requires_grad=True)
    y = rebuild.rebuildable(x.exp(), torch.exp, x, above=0)
    assert y._liger_rebuilt is not None
    for copied in (pickle.loads(pickle.dumps(y.detach())), pickle.loads(pickle.dumps(with_note_of(y)))):
        assert torch.equal(copied, y)


def with_note_of(y):
    """A leaf with the same attribute, because only leaves can be pickled."""
    leaf = y.detach()
    leaf._liger_rebuilt = y._liger_rebuilt
    return leaf


def test_a_tensor_that_is_changed_in_place_after_its_note():
    """The changed tensor is kept, instead of being rebuilt as it was."""
    x, linear = torch.randn(4, 8, requires_grad=True), torch.nn.Linear(8, 3, bias=False)
    y = rebuild.rebuildable(2 * x, lambda x: 2 * x, x, above=0)
    y.mul_(3)
    with rebuild.rebuilding(y, linear):
        out = linear(y)
    out.sum().backward()
    torch.testing.assert_close(linear.weight.grad, (6 * x.detach()).sum(0).expand(3, 8))
