"""A user's hooks that change values give the same loss and gradients on a patched model as on a stock one.

The hooks also see the same values, call by call.
"""

import functools

import pytest
import torch
from side_by_side import (
    EVERY_SETTING,
    FIRST,
    SETTINGS,
    as_at_real_size,
    assert_same_step,
    first_or_slow,
    model_of,
    outcome,
    patched,
    step,
)
from tiny_models import tiny_model
from torch import nn

from liger_trainer import apply_liger


@pytest.fixture(autouse=True)
def real_size(monkeypatch):
    as_at_real_size(monkeypatch)


MODULES = {
    "layer": lambda model: model.model.layers[0],
    "norm": lambda model: model.model.layers[1].input_layernorm,
    "second_norm": lambda model: model.model.layers[0].post_attention_layernorm,
    "last_norm": lambda model: model.model.norm,
    "attention": lambda model: model.model.layers[0].self_attn,
    "q_proj": lambda model: model.model.layers[0].self_attn.q_proj,
    "v_proj": lambda model: model.model.layers[1].self_attn.v_proj,
    "mlp": lambda model: model.model.layers[0].mlp,
    "gate_proj": lambda model: model.model.layers[0].mlp.gate_proj,
    "up_proj": lambda model: model.model.layers[1].mlp.up_proj,
    "down_proj": lambda model: model.model.layers[0].mlp.down_proj,
    "embed_tokens": lambda model: model.model.embed_tokens,
    "lm_head": lambda model: model.lm_head,
}
FLOATS = (torch.float32, torch.bfloat16)


def first(values):
    """The first float tensor among a module's arguments or results, or else the first tensor."""
    values = values if isinstance(values, tuple) else (values,)
    return next((x for x in values if isinstance(x, torch.Tensor) and x.dtype in FLOATS), values[0])


def with_first(values, changed):
    """`values` with `changed` in place of its first tensor."""
    if not isinstance(values, tuple):
        return changed
    place = next(i for i, x in enumerate(values) if x is first(values))
    return (*values[:place], changed, *values[place + 1 :])


def noting(seen, x):
    """Record what a hook is shown: the shape and the sum of squares."""
    seen.append((tuple(x.shape), x.detach().double().square().sum().item()))


def output_scaled(module, seen):
    def hook(module, args, output):
        noting(seen, first(output))
        return with_first(output, first(output) * 1.5)

    module.register_forward_hook(hook)


def output_scaled_in_place(module, seen):
    def hook(module, args, output):
        noting(seen, first(output))
        first(output).mul_(1.5)

    module.register_forward_hook(hook)


def input_scaled(module, seen):
    def hook(module, args, kwargs):
        if args:
            noting(seen, first(args))
            return with_first(args, first(args) * 1.5), kwargs
        noting(seen, kwargs["hidden_states"])
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.5}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def input_scaled_in_place(module, seen):
    def hook(module, args, kwargs):
        x = first(args) if args else kwargs["hidden_states"]
        noting(seen, x)
        x.mul_(1.5)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def gradient_of_output_scaled(module, seen):
    """A hook of the tensor scales it."""

    def scale(grad):
        noting(seen, grad)
        return grad * 1.5

    def hook(module, args, output):
        if first(output).requires_grad:
            first(output).register_hook(scale)

    module.register_forward_hook(hook)


def gradient_of_input_scaled(module, seen):
    """A full backward hook of the module scales it."""

    def hook(module, grad_input, grad_output):
        noting(seen, first(grad_output))
        return tuple(None if grad is None else grad * 1.5 for grad in grad_input)

    module.register_full_backward_hook(hook)


def gradient_scaled_before(module, seen):
    """A full backward pre-hook of the module scales it."""

    def hook(module, grad_output):
        noting(seen, first(grad_output))
        return tuple(None if grad is None else grad * 1.5 for grad in grad_output)

    module.register_full_backward_pre_hook(hook)


def outputs_kept(module, seen):
    """They are kept until after the backward pass, as by a tool that inspects activations."""
    kept = []

    def hook(module, args, output):
        kept.append((first(output), first(output).detach().clone()))

    module.register_forward_hook(hook)
    return lambda: [noting(seen, x) for pair in kept for x in pair]


def inputs_kept(module, seen):
    kept = []

    def hook(module, args, kwargs):
        x = first(args) if args else kwargs["hidden_states"]
        kept.append((x, x.detach().clone()))

    module.register_forward_pre_hook(hook, with_kwargs=True)
    return lambda: [noting(seen, x) for pair in kept for x in pair]


HOOKS = {
    hook.__name__: hook
    for hook in (
        output_scaled,
        output_scaled_in_place,
        input_scaled,
        input_scaled_in_place,
        gradient_of_output_scaled,
        gradient_of_input_scaled,
        gradient_scaled_before,
        outputs_kept,
        inputs_kept,
    )
}
# Ids have no gradient and no scale.
# Every other case is slow: each module has half of the hooks, and each hook half of the modules.
CASES = [
    pytest.param(module, hook, marks=pytest.mark.slow if (row + column) % 2 else ())
    for row, module in enumerate(MODULES)
    for column, hook in enumerate(HOOKS)
    if module != "embed_tokens" or not hook.startswith("input")
]


def run(model, finish):
    result = step(model)
    if finish is not None:
        finish()
    return result


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "order, setting",
    [
        first_or_slow(order, setting, first=(order, setting) == ("patch-then-hook", FIRST))
        for order in ("patch-then-hook", "hook-then-patch")
        for setting in SETTINGS
    ],
)
@pytest.mark.parametrize("module, hook", CASES)
def test_a_hook(module, hook, order, setting):
    """Either both raise, or loss, gradients and the values shown to the hook agree.

    Or only stock raises, because the input of a projection changed after another projection had kept it. Ours computes
    that input again, and has the gradients that stock gets if the same change is made to a copy.
    """
    results, shown = [], []
    for is_ours in (False, True):
        seen, model = [], model_of(setting)
        if is_ours and order == "patch-then-hook":
            patched(model)
        finish = HOOKS[hook](MODULES[module](model), seen)
        if is_ours and order == "hook-then-patch":
            patched(model)
        results.append(outcome(run, model, finish))
        shown.append(seen)
    want, got = results
    if want is RuntimeError and got is not RuntimeError and hook == "input_scaled_in_place":
        model = model_of(setting)
        input_scaled(MODULES[module](model), [])
        assert_same_step(got, step(model), setting[2])
        return
    assert_same_step(got, want, setting[2])
    if not isinstance(want, type):
        assert len(shown[0]) > 0
        assert [shape for shape, _ in shown[1]] == [shape for shape, _ in shown[0]]
        rtol = 1e-4 if setting[2] == "fp32" else 0.1
        torch.testing.assert_close([size for _, size in shown[1]], [size for _, size in shown[0]], rtol=rtol, atol=0)


@pytest.mark.parametrize("setting", EVERY_SETTING)
def test_a_hook_of_all_modules(setting):
    """A hook by `register_module_forward_hook` sees, and changes, every call of every module."""
    results, shown = [], []
    for is_ours in (False, True):
        model, seen = model_of(setting), []
        names = {module: name for name, module in model.named_modules()}
        if is_ours:
            patched(model)

        def hook(module, args, output, names=names, seen=seen):
            if isinstance(output, torch.Tensor) and output.dtype in FLOATS:
                seen.append((names[module], tuple(output.shape)))
                return output * 1.02

        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            results.append(outcome(step, model))
        finally:
            handle.remove()
        shown.append(seen)
    want, got = results
    assert_same_step(got, want, setting[2])
    assert shown[1] == shown[0]


@pytest.mark.parametrize("library", ["deepspeed.runtime.zero.parameter_offload", "mine", "mine around deepspeed."])
def test_a_hook_that_torch_compile_leaves_out_is_known_by_its_own_home(library):
    """DeepSpeed gathers weights by such hooks, and looks for some in a module's results. A user's hook sees what stock
    shows it."""
    mine = library.startswith("mine")
    space = {"__name__": library.removeprefix("mine around ")}
    exec("def hook(module, args, output): seen.append(output), vars(output)", space)
    space["seen"] = []
    model = tiny_model("llama").train()
    hook = theirs = torch.compiler.disable(space["hook"])
    if "around" in library:
        hook = functools.wraps(theirs)(lambda *seen: theirs(*seen))
    model.lm_head.register_forward_hook(hook)
    ids = torch.arange(3, 12)[None]
    apply_liger(model)
    logits = model(input_ids=ids, labels=ids).logits
    assert (logits is None) != mine
    if mine:
        assert space["seen"][0].shape == logits.shape
