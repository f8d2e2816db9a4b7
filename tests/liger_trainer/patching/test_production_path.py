"""Events of real runs give the same loss and gradients on a patched model as on a stock one.

They are: two backward passes or none, an exception half-way, memory that outlives a step, adapters on the parameters of
experts, rows packed and not packed.
"""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from side_by_side import (
    CHECKPOINTING,
    EVERY_SETTING,
    as_at_real_size,
    assert_same_step,
    batch,
    model_of,
    outcome,
    patched,
    step,
)
from tiny_models import assert_same_gradients, gradients, ragged_rows, tiny_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_parity import run as run_sft
from trainer_parity import trained
from trl import SFTTrainer

from liger_trainer import LigerSFTTrainer


@pytest.fixture(autouse=True)
def real_size(monkeypatch):
    as_at_real_size(monkeypatch)


def two_backward_passes(model):
    """Two backward passes through one graph. The gradients add up."""
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach(), gradients(model)


def two_without_keeping(model):
    """Stock raises."""
    loss = model(**batch()).loss
    loss.backward()
    loss.backward()
    return loss.detach(), gradients(model)


def gradients_first(model):
    """`torch.autograd.grad`, as for a gradient penalty, and then a backward pass."""
    loss = model(**batch()).loss
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
    loss.backward()
    return loss.detach(), gradients(model)


def skipped(model):
    """A forward pass with a dropped loss, as after a NaN, then a step."""
    model(**batch(5))
    return step(model)


def skipped_and_held(model):
    """The loss without a backward pass stays alive during the step."""
    held = model(**batch(5)).loss
    result = step(model)
    assert held.isfinite()
    return result


def crossed(model):
    """Two forward passes, then their backward passes in the same order."""
    first, second = model(**batch(5)).loss, model(**batch()).loss
    first.backward()
    second.backward()
    return second.detach(), gradients(model)


def summed(model):
    """One backward pass for two batches."""
    loss = model(**batch(5)).loss + 0.3 * model(**batch()).loss
    loss.backward()
    return loss.detach(), gradients(model)


def evaluated_between(model):
    """Loss and logits without gradients, in evaluation mode, between a forward and its backward pass."""
    loss = model(**batch()).loss
    model.eval()
    with torch.no_grad():
        outputs = model(**batch(5))
    model.train()
    loss.backward()
    return loss.detach() + outputs.loss + outputs.logits.float().square().mean(), gradients(model)


def without_gradients_in_training_mode(model):
    """The loss of the same model under `no_grad`, then a step."""
    with torch.no_grad():
        before = model(**batch(5)).loss
    loss, grads = step(model)
    return before + loss, grads


def logits_asked_for(model):
    """A user's loss on the logits of a call without labels."""
    given = batch()
    labels = given.pop("labels")
    logits = model(**given).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.detach(), gradients(model)


def accumulated(model):
    step(model, 5)
    return step(model)


STEPS = {
    f.__name__: f
    for f in (
        two_without_keeping,
        skipped,
        skipped_and_held,
        crossed,
        summed,
        evaluated_between,
        without_gradients_in_training_mode,
        logits_asked_for,
        accumulated,
    )
}


@pytest.mark.diagonal
@pytest.mark.parametrize("setting", EVERY_SETTING)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name, setting):
    """Either both raise the same error, or loss and gradients agree."""
    want = outcome(STEPS[name], model_of(setting))
    assert_same_step(outcome(STEPS[name], patched(model_of(setting))), want, setting[2])


def with_lora(model):
    """A LoRA with dropout. Both models draw it from one seed."""
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.2, init_lora_weights=False)
    return get_peft_model(model, config)


# glm4: gate and up in one projection. cohere2: one norm feeds attention and MLP. gemma2: four norms a layer.
OTHERS = {name: (name, None) for name in ("qwen3_moe", "glm4", "cohere2", "gemma2", "deepseek_v3", "granite")}
OTHERS |= {"llama-lora": ("llama", with_lora), "gemma2-lora": ("gemma2", with_lora)}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_other_models(name, kind, checkpointing):
    setting, results = ("eager", checkpointing, "fp32"), []
    for prepare in (lambda model: model, patched):
        model = prepare(model_of(setting, *OTHERS[kind]))
        torch.manual_seed(2)
        results.append(outcome(STEPS[name], model))
    assert_same_step(results[1], results[0], "fp32")


@pytest.mark.parametrize("setting", EVERY_SETTING)
@pytest.mark.parametrize("run", [two_backward_passes, gradients_first])
def test_two_backward_passes_of_one_graph(run, setting):
    want = outcome(run, model_of(setting))
    for head in (False, True):
        assert_same_step(outcome(run, patched(model_of(setting), head=head)), want, setting[2])


class Interrupted(Exception):
    """The error raised half-way."""


def throw(*args):
    raise Interrupted


def throwing_in_the_forward(module):
    return module.register_forward_pre_hook(throw)


def throwing_after_the_forward(module):
    return module.register_forward_hook(throw)


def throwing_in_the_backward(module):
    return module.register_full_backward_pre_hook(throw)


PLACES = {
    "layer": lambda model: model.model.layers[1],
    "norm": lambda model: model.model.layers[1].input_layernorm,
    "down_proj": lambda model: model.model.layers[1].mlp.down_proj,
    "lm_head": lambda model: model.lm_head,
}


@pytest.mark.diagonal
@pytest.mark.parametrize("setting", EVERY_SETTING)
@pytest.mark.parametrize("interrupt", [throwing_in_the_forward, throwing_after_the_forward, throwing_in_the_backward])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_after_an_exception(place, interrupt, setting):
    """The failed step leaves no trace, in this model or for logits. A `KeyboardInterrupt` counts as an exception."""
    results = []
    for model in (model_of(setting), patched(model_of(setting))):
        handle = interrupt(PLACES[place](model))
        with pytest.raises(Interrupted):
            step(model)
        handle.remove()
        model.zero_grad()
        results.append((step(model), outcome(logits_asked_for, model)))
    for want, got in zip(*results, strict=True):
        assert_same_step(got, want, setting[2])


class Storages(TorchDispatchMode):
    """All memory that operations returned while this was active, except a model's."""

    def __init__(self, model):
        super().__init__()
        self.references = []
        self.own = {StorageWeakRef(x.untyped_storage()).cdata for x in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.references += [StorageWeakRef(x.untyped_storage()) for x in tensors]
        return result

    def alive(self):
        return len({reference.cdata for reference in self.references if not reference.expired()} - self.own)


def interrupted_forward(model):
    handle = throwing_in_the_forward(PLACES["norm"](model))
    with pytest.raises(Interrupted):
        model(**batch())
    handle.remove()


def interrupted_backward(model):
    handle = throwing_in_the_backward(PLACES["norm"](model))
    with pytest.raises(Interrupted):
        step(model)
    handle.remove()


def only_forward(model):
    model(**batch())


def gradient_of_a_part(model):
    """A backward pass that needs only one of the projections behind a norm."""
    layer = model.get_base_model().model.layers[0] if hasattr(model, "peft_config") else model.model.layers[0]
    torch.autograd.grad(model(**batch()).loss, [layer.self_attn.k_proj.weight])


@pytest.mark.diagonal
@pytest.mark.parametrize("setting", EVERY_SETTING)
@pytest.mark.parametrize(
    "run", [step, only_forward, interrupted_forward, interrupted_backward, crossed, gradient_of_a_part]
)
def test_no_activation_outlives_its_step(run, setting):
    """Without the garbage collector, which comes late, it holds no more memory than the stock model."""
    held = []
    for model in (model_of(setting), patched(model_of(setting))):
        outcome(run, model)
        model.zero_grad()
        gc.collect()
        gc.disable()
        try:
            with Storages(model) as storages:
                outcome(run, model)
            model.zero_grad()
            held.append(storages.alive())
        finally:
            gc.enable()
    want, got = held
    assert got <= want


EXPERTS = {
    "one": ["mlp.experts.down_proj"],
    "both": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def with_expert_lora(model, parameters):
    """A LoRA on the parameters of experts, which are not modules, and one on the attention."""
    torch.manual_seed(3)
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
    )
    assert sum("experts" in name and p.requires_grad for name, p in model.named_parameters()) == 4 * len(parameters)
    return model


@pytest.mark.diagonal
@pytest.mark.parametrize("patched_first", [False, True], ids=["lora-then-patch", "patch-then-lora"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("parameters", EXPERTS.values(), ids=EXPERTS)
def test_lora_on_parameters_of_experts(parameters, checkpointing, patched_first):
    setting = ("sdpa", checkpointing, "fp32")
    want = step(model_of(setting, "qwen3_moe", lambda model: with_expert_lora(model, parameters)))

    def wrap(model):
        return with_expert_lora(patched(model), parameters) if patched_first else model

    model = model_of(setting, "qwen3_moe", wrap)
    if not patched_first:
        model = patched(with_expert_lora(model, parameters).train())
    got = step(model)
    assert all(grad.norm() > 0 for name, grad in got[1].items() if "experts" in name)
    assert_same_step(got, want, "fp32")


@pytest.mark.parametrize(
    "model_type, checkpointing, attention",
    [
        ("llama", False, "sdpa"),
        ("llama", True, "eager"),
        ("gemma3_text", True, "sdpa"),
        ("gemma3_text", False, "eager"),
    ],
)
def test_rows_packed_and_not_packed(model_type, checkpointing, attention, tmp_path):
    """One step on the same rows, packed end to end (each sees only itself) and padded to the longest."""
    model = tiny_model(model_type)
    model.set_attn_implementation(attention)
    found = []
    for trainer_class in (SFTTrainer, LigerSFTTrainer):
        for options in ({"packing": True, "max_length": 48}, {"max_length": 64}):
            _, trainer = run_sft(
                trainer_class,
                model,
                tmp_path,
                (16, 1),
                rows=ragged_rows(),
                train=False,
                max_steps=1,
                gradient_checkpointing=checkpointing,
                optim="sgd",
                max_grad_norm=0.0,
                **options,
            )
            logs, grads = trained(trainer)
            found.append((torch.tensor(logs[0]["loss"]), grads[0], logs[0]["num_tokens"]))
    for loss, grads, tokens in found[1:]:
        assert tokens == found[0][2]
        torch.testing.assert_close(loss, found[0][0], rtol=1e-5, atol=0)
        assert_same_gradients(grads, found[0][1], 2e-5)
