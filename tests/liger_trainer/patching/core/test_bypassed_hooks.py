"""Others' hooks on modules that a patched model does not call, or calls its own way, see what stock shows them.

Every case compares loss and gradients with the unpatched model under the same hooks, set before or after patching, and
checks the report.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import assert_same_step, collate, gradients, ragged_rows, step, tiny_model
from torch import nn

from liger_trainer import apply_liger, remove_liger
from liger_trainer.head.calls import install_fused_head
from liger_trainer.patching.core.hooks import as_of_a_user, hook_on

HEAD = "fused_linear_cross_entropy"


def halve(module, args, output):
    return output * 0.5


def shift_input(module, args):
    return (args[0] + 0.1, *args[1:])


def halve_gradient(module, grad_input, grad_output):
    return tuple(None if g is None else g * 0.5 for g in grad_input)


def replace_forward(module):
    own = module.forward
    module.forward = lambda x: own(x) * 0.5


HOOKS = {
    "forward": lambda module: module.register_forward_hook(halve),
    "forward-pre": lambda module: module.register_forward_pre_hook(shift_input),
    "backward": lambda module: module.register_full_backward_hook(halve_gradient),
    "replaced-forward": replace_forward,
}


def patched_and_stock(make, hook, when, **options):
    """(report, results of the patched model, results of stock) with `hook(model)` before or after patching."""
    stock, model = make(), make()
    hook(stock)
    if when == "before":
        hook(model)
    report = apply_liger(model)
    if when == "after":
        assert report[HEAD].skipped == {}
        step(model)
        hook(model)
    return report, step(model, **options), step(stock)


def llama():
    return tiny_model("llama").train()


def llama_with_lora_on_the_head():
    config = LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    return get_peft_model(tiny_model("llama"), config).train()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
def test_on_the_lm_head(kind, when):
    report, got, want = patched_and_stock(llama, lambda model: HOOKS[kind](model.lm_head), when)
    assert_same_step(got, want)
    assert report[HEAD].swapped == {} and "would not see logits" in report[HEAD].skipped["lm_head"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", ["", ".base_layer", ".lora_A.default", ".lora_B.default", ".lora_dropout.default"])
def test_on_a_part_of_a_lora_on_the_lm_head(part, when):
    def hook(model):
        HOOKS["forward"](model.get_submodule(f"base_model.model.lm_head{part}"))

    report, got, want = patched_and_stock(llama_with_lora_on_the_head, hook, when)
    assert_same_step(got, want)
    assert len(report[HEAD].skipped) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_counts_is_called_once_and_sees_logits(when):
    seen = []

    def hook(model):
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))

    _, got, want = patched_and_stock(llama, hook, when)
    assert_same_step(got, want)
    assert len(seen) == 2 and seen[0] == seen[1] and seen[0][-1] == 131  # ours and stock's


def test_under_the_contract_of_trl():
    """The per-token log-probabilities follow the logits that the hook returns."""
    model, batch = llama(), collate(ragged_rows(4))
    install_fused_head(model)
    model.lm_head.register_forward_hook(halve)
    got = model(**batch, fused_lm_head=True).log_probs
    labels = batch.pop("labels")
    log_p = model(**batch).logits[:, :-1].log_softmax(-1)
    mask = labels[:, 1:] != -100
    want = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * mask
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_head_is_fused_again_when_the_hook_has_gone():
    model = llama()
    apply_liger(model)
    handle = model.lm_head.register_forward_hook(halve)
    assert step(model)[0] != step(llama())[0]
    handle.remove()
    assert model(**collate(ragged_rows(4))).logits is None
    assert_same_step(step(model), step(llama()))


def test_a_hook_on_all_modules():
    """Under `register_module_forward_hook`, every module that stock calls is called, and none twice."""
    counts = []

    def count(module, args, output):
        counts[-1][type(module).__name__] = counts[-1].get(type(module).__name__, 0) + 1

    patched = llama()
    apply_liger(patched)
    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        for model in (llama(), patched):
            counts.append({})
            result = step(model)
    finally:
        handle.remove()
    assert counts[0] == counts[1] and counts[0]["SiLUActivation"] == 2
    assert_same_step(result, step(llama()))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
def test_on_the_activation_of_an_mlp(kind, when):
    report, got, want = patched_and_stock(llama, lambda m: HOOKS[kind](m.model.layers[1].mlp.act_fn), when)
    assert_same_step(got, want)
    assert "act_fn" in report["swiglu"].skipped["model.layers.1.mlp"]
    assert list(report["swiglu"].swapped) == ["model.layers.0.mlp"]


def test_an_activation_that_has_been_exchanged():
    def exchange(model):
        model.model.layers[1].mlp.act_fn = nn.ReLU()

    report, got, want = patched_and_stock(llama, exchange, "after")
    assert_same_step(got, want)
    assert "act_fn is a ReLU now" in report["swiglu"].skipped["model.layers.1.mlp"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_on_the_activation_of_experts(when):
    def hook(model):
        HOOKS["forward"](model.model.layers[0].mlp.experts.act_fn)

    report, got, want = patched_and_stock(lambda: tiny_model("qwen3_moe").train(), hook, when)
    assert_same_step(got, want)
    assert "act_fn" in report["experts"].skipped["model.layers.0.mlp.experts"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_on_what_makes_the_angles(when):
    """Ours reads one number of cos for each pair. After this hook the two numbers of a pair differ."""

    def turn(module, args, output):
        cos, sin = output
        return cos * torch.linspace(0.5, 1.0, cos.shape[-1]), sin

    report, got, want = patched_and_stock(llama, lambda m: m.model.rotary_emb.register_forward_hook(turn), when)
    assert_same_step(got, want)
    assert len(report["rope"].skipped) == 2 and report["rope"].swapped == {}


def test_a_copy_steps_aside_by_itself():
    """A copy of a patched model has its own hooks, and the report stays with the original."""
    import copy

    model = llama()
    report = apply_liger(model)
    twin, stock = copy.deepcopy(model), llama()
    for m in (twin, stock):
        m.model.layers[0].mlp.act_fn.register_forward_hook(halve)
    assert_same_step(step(twin), step(stock))
    assert report.skipped == {}
    assert_same_step(step(model), step(llama()))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.act_fn", "model.rotary_emb"])
def test_a_hook_that_goes_between_forward_and_recomputation(name, reentrant):
    """The recomputation of a checkpoint takes the same path as the forward pass."""
    results = []
    for patched in (False, True):
        model = llama()
        model.set_attn_implementation("sdpa")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        if patched:
            apply_liger(model)
        handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: None)
        loss = model(**collate(ragged_rows(4))).loss
        handle.remove()
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert_same_step(results[1], results[0])


def around(module):
    """A wrapper around a forward, as profilers and accelerate put there."""
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)


@pytest.mark.parametrize("undo", [remove_liger, apply_liger])
@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp", "model.layers.0.self_attn", "model.norm"])
def test_a_wrapped_patched_forward_runs_the_module_s_own_code(name, undo):
    """Our method is still inside the wrapper, and leaves the call to the module's own code."""
    model = llama()
    apply_liger(model)
    around(model.get_submodule(name))
    undo(model)
    handle = model.model.layers[0].mlp.act_fn.register_forward_hook(halve)
    stock = llama()
    stock.model.layers[0].mlp.act_fn.register_forward_hook(halve)
    assert_same_step(step(model), step(stock))
    handle.remove()
    assert_same_step(step(model), step(llama()))


def test_replacing_a_class_s_forward_takes_effect(monkeypatch):
    """A user replaces it after patching, to have another activation or other angles everywhere."""
    model = llama()
    report = apply_liger(model)
    act, rotary = type(model.model.layers[0].mlp.act_fn), type(model.model.rotary_emb)
    own = rotary.forward

    def turned(self, *args, **kwargs):
        cos, sin = own(self, *args, **kwargs)
        return cos * torch.linspace(0.5, 1.0, cos.shape[-1]), sin

    monkeypatch.setattr(act, "forward", lambda self, x: x.relu())
    monkeypatch.setattr(rotary, "forward", turned)
    assert_same_step(step(model), step(llama()))
    assert len(report["swiglu"].skipped) == len(report["rope"].skipped) == 2


def test_the_model_called_from_inside_its_own_call():
    """A hook gets the logits it asks for, with their own graph."""
    results = []
    for patched in (False, True):
        model, kept = llama(), []
        if patched:
            apply_liger(model)
        ids = torch.tensor([[5, 6, 7]])

        def ask(module, args, output, model=model, kept=kept, ids=ids):
            if not kept:
                kept.append(None)
                with torch.no_grad():
                    kept[0] = model(input_ids=ids).logits

        model.model.norm.register_forward_hook(ask)
        loss = model(**collate(ragged_rows(4))).loss
        assert isinstance(kept[0], torch.Tensor) and not kept[0].requires_grad
        (loss + kept[0].mean()).backward()
        results.append((loss.detach(), gradients(model)))
    assert_same_step(results[1], results[0])


def test_another_thread_gets_logits():
    """It asks while one thread is inside a call that returns no logits."""
    model, seen = llama(), []
    apply_liger(model)

    def elsewhere(module, args, output):
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(model.lm_head, torch.ones(1, 2, 32)).result())

    handle = model.model.norm.register_forward_hook(elsewhere)
    assert model(**collate(ragged_rows(4))).logits is None
    handle.remove()
    assert isinstance(seen[0], torch.Tensor)


def test_a_hook_of_this_package_counts_once_it_is_marked():
    def look(*_):
        """Do nothing."""

    linear = torch.nn.Linear(2, 2)
    handle = linear.register_forward_hook(look)
    assert hook_on(linear, allowed=(__name__,)) is None
    handle.remove()
    linear.register_forward_hook(as_of_a_user(look))
    assert hook_on(linear, allowed=(__name__,)).startswith("a forward hook")
