"""q, k and v with a LoRA on bases of eight bits share what they compute if they get one input; in any other case each
computes for itself."""

import copy
import threading
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer import apply_liger
from liger_trainer.fp8.quantize_base import quantize_base
from liger_trainer.instance.binding import Binding
from liger_trainer.lora import groups as lora_groups

NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """What an attention does with its input; `order` and `inputs` say which layer is called when, and with what."""

    def __init__(self):
        super().__init__()
        for name, width in zip(NAMES, (32, 16, 16), strict=True):
            setattr(self, name, nn.Linear(16, width))
        self.o_proj = nn.Linear(16, 16)

    def forward(self, x, order=NAMES, between=lambda name, x: x):
        found = {name: getattr(self, name)(between(name, x)) for name in order}
        return sum((k + 1) * found[name].square().mean() for k, name in enumerate(NAMES) if name in found)


def attention(patched=True, dropout=0.0, eight_bits=True):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    config.lora_dropout = dropout
    model = get_peft_model(nn.Sequential(Attention()), config).train()
    if eight_bits:
        quantize_base(model)
    if patched:
        assert len(apply_liger(model)["lora"].swapped) == 4
    return model.base_model.model[0]


@pytest.fixture
def groups(monkeypatch):
    """How many layers each group computed together has."""
    sizes = []

    class Counted(lora_groups.LoRAGroup):
        def __init__(self, x, layers):
            sizes.append(len(layers))
            super().__init__(x, layers)

    monkeypatch.setattr(lora_groups, "LoRAGroup", Counted)
    return sizes


def step(module, run=None, **options):
    """The loss and all gradients, that of the input among them."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, 16, requires_grad=True)
    module.zero_grad()
    loss = run(module, x * 1) if run else module(x * 1, **options)
    loss.backward()
    return [loss.detach(), x.grad, *((n, p.grad) for n, p in module.named_parameters())]


def assert_same(got, want):
    """But for rounding: the gradients of the group are rounded to eight bits together."""
    for g, w in zip(got, want, strict=True):
        if isinstance(w, tuple):
            assert (g[1] is None) == (w[1] is None), w[0]  # None and zeros are not the same to an optimizer
            g, w = g[1], w[1]
        if w is not None:
            assert (g - w).norm() <= 0.05 * w.norm() + 1e-7


def begun(module):
    """What is computed already for layers that are not called yet."""
    found = Binding.of(module.q_proj).group.begun
    return None if found is None or found() is None else found().outputs


@pytest.mark.parametrize(
    "order, sizes",
    [
        (NAMES, [3]), (("q_proj", "k_proj"), [3]), (("q_proj",), [3]), (("k_proj", "v_proj"), [2]), (("v_proj",), []),
        (("v_proj", "k_proj", "q_proj"), [2, 3]),
    ],
)  # fmt: skip
def test_which_layers_are_called(order, sizes, groups):
    """A layer that is not called gets no gradient, as in stock."""
    assert_same(step(attention(), order=order), step(attention(False), order=order))
    assert groups == sizes


def test_bases_of_16_bits_share_nothing(groups):
    """It would gain less than 2 %."""
    assert_same(step(attention(eight_bits=False)), step(attention(False, eight_bits=False)))
    assert not groups and all(b.group is None for b in map(Binding.of, attention(eight_bits=False).children()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant, groups):
    def run(module, x):
        return checkpoint(module, x, use_reentrant=reentrant)

    assert_same(step(attention(), run), step(attention(False), run))
    assert groups == ([3] if reentrant else [3, 3])


def test_the_gradient_of_the_input_is_one_sum(groups):
    """One node of autograd has the gradients of all three, and a second backward pass has them too."""
    module = attention()
    x = torch.randn(3, 5, 16, requires_grad=True)
    loss = module(x)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)
    assert groups == [3] and not begun(module)


def changed(name, x):
    """k gets another tensor, as in cross-attention."""
    return x if name == "q_proj" else x + 1


def changed_in_place(name, x):
    if name == "k_proj":
        with torch.no_grad():
            x[0] = 1
    return x


def test_another_input(groups):
    assert_same(step(attention(), between=changed), step(attention(False), between=changed))
    assert groups == [3, 2, 1] or groups == [3, 2]


def test_an_input_that_is_changed_in_place():
    """k sees the change, and the backward pass raises as in stock, since q needs what was there before."""
    for patched in (True, False):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(attention(patched), between=changed_in_place)


def test_changed_values_are_seen_without_a_backward_pass(groups):
    x = torch.randn(3, 5, 16)
    losses = [attention(patched)(x.clone(), between=changed_in_place) for patched in (True, False)]
    torch.testing.assert_close(*losses)
    assert groups == [3, 2]


def to_other_memory(module, name):
    getattr(module, name).data = getattr(module, name).data * 2


def to_another_parameter(module, name):
    setattr(module, name, nn.Parameter(getattr(module, name).detach() * 2))


def to_trained_or_frozen(module, name):
    getattr(module, name).requires_grad_(not getattr(module, name).requires_grad)


@pytest.mark.parametrize("change", [to_other_memory, to_another_parameter, to_trained_or_frozen])
@pytest.mark.parametrize(
    "part", ["lora_A.default.weight", "lora_B.default.weight", "base_layer.scale", "base_layer.bias"]
)
def test_a_tensor_that_changes_between_the_calls(part, change):
    owner, _, name = part.rpartition(".")
    assert_same(
        *(step(attention(p), between_q_and_k(lambda k: change(k.get_submodule(owner), name))) for p in (True, False))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.scale_layer(0.5),
        lambda layer: layer.lora_A.update({"default": copy.deepcopy(layer.lora_A["default"])}),
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.lora_dropout.update({"default": nn.Dropout(1.0)}),
    ],
    ids=["scaling", "adapter", "disabled", "dropout"],
)
def test_a_layer_that_changes_between_the_calls(change):
    assert_same(*(step(attention(patched), between_q_and_k(change)) for patched in (True, False)))


def between_q_and_k(change):
    def run(module, x):
        q = module.q_proj(x)
        change(module.k_proj)
        return sum(y.square().mean() for y in (q, module.k_proj(x), module.v_proj(x)))

    return run


@pytest.mark.parametrize("mode", ["autocast", "no_grad", "inference"])
def test_a_mode_that_changes_between_the_calls(mode):
    def run(module, x):
        q = module.q_proj(x)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"),
            torch.inference_mode(mode == "inference"),
            torch.set_grad_enabled(mode not in ("no_grad", "inference")),
        ):
            k = module.k_proj(x).float()
        v = module.v_proj(x)
        return q.square().mean() + (k.square().mean() if mode != "inference" else 0) + v.square().mean()

    assert_same(step(attention(), run), step(attention(False), run))


def test_layers_that_share_an_adapter(groups):
    def run(module, x):
        module.k_proj.lora_A["default"] = module.q_proj.lora_A["default"]
        return module(x)

    assert_same(step(attention(), run), step(attention(False), run))
    assert groups == [3]


def test_an_input_that_begins_to_train_between_the_calls():
    def run(module, x):
        x = x.detach()
        q = module.q_proj(x)
        loss = q.square().mean() + module.k_proj(x.requires_grad_()).square().mean()
        grads.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
        return loss

    grads = []
    assert_same(*(step(attention(patched), run)[2:] for patched in (True, False)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("where", NAMES)
def test_a_hook_that_changes_the_input_behind_autograd(where, groups):
    def hook(module, args, output):
        args[0].data.mul_(2)

    losses = []
    for patched in (True, False):
        module = attention(patched)
        getattr(module, where).register_forward_hook(hook)
        losses.append(module(torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))))
    torch.testing.assert_close(*losses)
    assert not groups


def test_dropout_and_evaluation_share_nothing(groups):
    assert_same(step(attention(dropout=0.5)), step(attention(False, dropout=0.5)))
    module = attention().eval()
    with torch.no_grad():
        torch.testing.assert_close(module(torch.ones(2, 16)), attention(False).eval()(torch.ones(2, 16)))
    assert not groups


def test_nothing_is_left_behind():
    module = attention()
    x = torch.randn(3, 5, 16, requires_grad=True) * 1
    alive = weakref.ref(x)
    loss = module(x)
    assert not begun(module)
    del x
    loss.backward()
    del loss
    assert alive() is None


def test_a_graph_whose_tensors_are_kept_elsewhere_keeps_none(groups):
    """As in the forward pass of a checkpoint."""
    module = attention()
    x = torch.randn(3, 5, 16, requires_grad=True) * 1
    alive = weakref.ref(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda t: t):
        outputs = [getattr(module, name)(x) for name in NAMES]
    del x
    assert alive() is None and len(outputs) == 3 and groups == [3]


def test_what_is_begun_goes_with_the_graph():
    """Not all layers of an attention are called, or one of them fails: no input is kept for a call that never comes."""
    module = attention()
    x = torch.randn(3, 5, 16, requires_grad=True) * 1
    alive = weakref.ref(x)
    q = module.q_proj(x)
    assert begun(module)
    del x, q
    assert alive() is None and not begun(module)


def test_after_an_exception(groups):
    """The next call begins anew, with the same input too."""

    def fail(name, x):
        if name == "k_proj":
            raise KeyError
        return x

    module = attention()
    x = torch.randn(3, 5, 16, requires_grad=True)
    with pytest.raises(KeyError):
        module(x, between=fail)
    torch.testing.assert_close(module(x), attention(False)(x))
    assert groups == [3, 3] and not begun(module)


def test_copies_have_groups_of_their_own(groups):
    module = attention()
    loss = module(torch.randn(3, 16, requires_grad=True), order=("q_proj",))
    twin = copy.deepcopy(module)
    group = Binding.of(twin.q_proj).group
    assert group is Binding.of(twin.v_proj).group is not Binding.of(module.q_proj).group
    assert group.layers == [twin.q_proj, twin.k_proj, twin.v_proj]
    assert_same(step(twin), step(attention(False)))
    assert groups == [3, 3] and loss.requires_grad


def test_threads_do_not_share():
    module, want = attention(), step(attention(False))
    x = torch.randn(3, 16, requires_grad=True)
    q = module.q_proj(x)
    outputs = begun(module)
    assert outputs
    thread = threading.Thread(target=lambda: module(x, order=("k_proj", "v_proj")))
    thread.start()
    thread.join()
    assert q.requires_grad and begun(module) is not outputs
    assert_same(step(module), want)


def test_a_layer_that_is_called_after_the_backward_pass_of_another(groups):
    def run(module, x):
        x = x.detach()
        module.q_proj(x).square().mean().backward()
        return module.k_proj(x).square().mean()

    got, want = (step(attention(patched), run) for patched in (True, False))
    assert_same([got[0], *got[2:]], [want[0], *want[2:]])  # x itself is a constant here
    assert groups == [3, 2]


def test_an_input_of_inference_mode(groups):
    """It has no version that would tell whether somebody has changed it."""
    results = []
    for patched in (True, False):
        module = attention(patched).requires_grad_(False)
        with torch.inference_mode():
            x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
        results.append(module.q_proj(x))
    torch.testing.assert_close(*results)
    assert not groups


def test_backward_passes_of_single_layers(groups):
    """They have one in common, as a layer of its own would: PyTorch's error says what the first of two needs."""

    def run(module, x, retain):
        x = x.detach()
        q, k = module.q_proj(x), module.k_proj(x)
        q.square().mean().backward(retain_graph=retain)
        return k.square().mean()

    got, want = (step(attention(patched), lambda m, x: run(m, x, True)) for patched in (True, False))
    assert_same([got[0], *got[2:]], [want[0], *want[2:]])
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        step(attention(), lambda m, x: run(m, x, False))
