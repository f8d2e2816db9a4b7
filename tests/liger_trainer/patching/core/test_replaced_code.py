"""Code and attributes replaced after patching, and user code that does more than compute.

A proof covers the code that ran and the numbers that it read. Each case compares a step with the unpatched model under
the same change, and checks the report.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from side_by_side import REBUILT, assert_same_step, batch, step
from tiny_models import gradients, tiny_model
from torch import nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from liger_trainer import apply_liger
from liger_trainer.patching.core.guards import linear_is_torchs

HEAD = "fused_linear_cross_entropy"
LLAMA, GEMMA = modeling_llama, modeling_gemma2


def with_lora(model, dropout=0.0):
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return get_peft_model(model, config).train()


def twice(function):
    """Double the result of `function`, under its name, as a decorator leaves it."""

    @functools.wraps(function)
    def doubled(*args, **kwargs):
        result = function(*args, **kwargs)
        return tuple(2 * x for x in result) if isinstance(result, tuple) else 2 * result

    return doubled


def replaced(owner, name):
    return lambda monkeypatch, model: monkeypatch.setattr(owner, name, twice(getattr(owner, name)))


def with_dropout(monkeypatch, model):
    """A dropout probability that starts at zero, as in a schedule."""
    torch.manual_seed(8)
    for module in model.modules():
        if hasattr(module, "residual_dropout"):
            module.residual_dropout = 0.5


def other_epsilon(monkeypatch, model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def other_activation_inside(monkeypatch, model):
    for layer in model.model.layers:
        layer.mlp.act_fn.act = torch.relu


class DoubledNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def of_another_class(monkeypatch, model):
    model.model.norm.__class__ = DoubledNorm


def with_a_method_of_its_own(monkeypatch, model):
    model.model.norm._norm = twice(model.model.norm._norm)


class OtherAngles(LLAMA.LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return cos * torch.linspace(0.5, 1.0, cos.shape[-1]), sin


def other_angles(monkeypatch, model):
    model.model.rotary_emb = OtherAngles(model.config)


CHANGES = {
    "norm": (replaced(LLAMA.LlamaRMSNorm, "forward"), "llama", ["rms_norm"]),
    "method of a norm": (replaced(GEMMA.Gemma2RMSNorm, "_norm"), "gemma2", ["rms_norm"]),
    "method of one norm": (with_a_method_of_its_own, "gemma2", ["rms_norm"]),
    "layer norm": (replaced(nn.LayerNorm, "forward"), "phi", ["layer_norm"]),
    "F.layer_norm": (replaced(F, "layer_norm"), "phi", ["layer_norm"]),
    "MLP": (replaced(LLAMA.LlamaMLP, "forward"), "llama", ["swiglu"]),
    "F.silu": (replaced(F, "silu"), "llama", ["swiglu"]),
    "inside the activation": (other_activation_inside, "gemma2", ["geglu"]),
    "dropout": (with_dropout, "seed_oss", ["swiglu"]),
    "epsilon": (other_epsilon, "llama", ["rms_norm"]),
    "class of a norm": (of_another_class, "llama", ["rms_norm"]),
    "attention": (replaced(LLAMA.LlamaAttention, "forward"), "llama", ["rope"]),
    "eager attention": (replaced(LLAMA, "eager_attention_forward"), "llama", ["rope"]),
    "rotary function": (replaced(LLAMA, "apply_rotary_pos_emb"), "llama", ["rope"]),
    "inside the rotary function": (replaced(LLAMA, "rotate_half"), "llama", ["rope"]),
    "what makes the angles": (other_angles, "llama", ["rope"]),
    "linear": (replaced(nn.Linear, "forward"), "llama", [HEAD]),
    "F.linear": (replaced(F, "linear"), "llama", [HEAD]),
    "linear under LoRA": (replaced(nn.Linear, "forward"), "llama lora", [HEAD, "lora"]),
    "F.linear under LoRA": (replaced(F, "linear"), "llama lora", [HEAD, "lora"]),
    "dropout under LoRA": (replaced(nn.Dropout, "forward"), "llama lora dropout", ["lora"]),
}


@pytest.mark.parametrize("change, kind, kept", CHANGES.values(), ids=CHANGES)
def test_code_that_is_replaced_after_patching(change, kind, kept, monkeypatch):
    """The module's own code, as it is now, runs from then on, and the report names it."""
    monkeypatch.setattr("liger_trainer.lora.layers.LEAST_WORK", 0)
    models = []
    for _ in range(2):
        model = tiny_model(kind.split()[0])
        model.set_attn_implementation("eager")
        model = with_lora(model, 0.3 * ("dropout" in kind)) if "lora" in kind else model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        models.append(model)
    stock, model = models
    report = apply_liger(model, REBUILT)
    assert report.skipped == {}
    step(model)
    model.zero_grad()
    for one in (stock, model):
        with monkeypatch.context() as patch:
            change(patch, one)
            torch.manual_seed(8)
            result = step(one)
        models.append(result)
    assert_same_step(models[3], models[2], "fp32")
    assert {name for name, operation in report.operations.items() if operation.skipped} == set(kept)


def test_the_linear_function_of_deepspeed_computes_the_same(monkeypatch):
    """ZeRO-3 leaves it in place of `F.linear` for the whole process. A function around it counts as the user's."""
    want = step(tiny_model("llama").train())
    space = {"__name__": "deepspeed.runtime.zero.linear", "own": F.linear}
    exec("def zero3_linear_wrap(input, weight, bias=None): return own(input, weight, bias)", space)
    theirs = space["zero3_linear_wrap"]
    around = functools.wraps(theirs)(lambda input, weight, bias=None: 2 * theirs(input, weight, bias))
    for mine in (around, functools.partial(theirs)):
        monkeypatch.setattr(F, "linear", mine)
        assert not linear_is_torchs()
    monkeypatch.setattr(F, "linear", theirs)
    model = tiny_model("llama").train()
    report = apply_liger(model)
    assert report[HEAD].swapped and not report[HEAD].skipped
    assert_same_step(step(model), want, "fp32")
    assert report[HEAD].swapped


# User code that exists when the model is patched

STRENGTH = {0: 1.0}
IS_ON = False


class Llama(modeling_llama.LlamaRMSNorm):
    """A base class for the norms here. It sets what they need on the class, because instances are converted."""

    steering = None
    calls = 0
    penalty = 0.0


class SteeredNorm(Llama):
    def forward(self, hidden_states):
        y = super().forward(hidden_states)
        return y if self.steering is None else y + self.steering


class PenalisedNorm(Llama):
    def forward(self, hidden_states):
        self.penalty = hidden_states.square().mean()
        return super().forward(hidden_states)


class CountingNorm(Llama):
    def forward(self, hidden_states):
        self.calls += 1
        return super().forward(hidden_states)


class ByDictNorm(Llama):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * STRENGTH[0]


class ByGlobalNorm(Llama):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * (2 if IS_ON else 1)


class ByBufferNorm(Llama):
    def forward(self, hidden_states):
        self.seen.add_(1)
        return super().forward(hidden_states)


class ByPropertyNorm(Llama):
    @property
    def factor(self):
        return STRENGTH[0]

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.factor


class ByHookNorm(Llama):
    def forward(self, hidden_states):
        hidden_states.register_hook(lambda grad: grad * STRENGTH[0])
        return super().forward(hidden_states)


class ByAttributeNorm(Llama):
    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value * STRENGTH[0] if name == "weight" else value


class DecoratedNorm(Llama):
    forward = twice(modeling_llama.LlamaRMSNorm.forward)


class Activation(nn.Module):
    def forward(self, x):
        return F.silu(x) * STRENGTH[0]


class Angles(modeling_llama.LlamaDecoderLayer):
    """Turns one half of a head by other angles than the other half, once it is told to."""

    def forward(self, hidden_states, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        cos = cos * torch.linspace(1 / STRENGTH[0], 1.0, cos.shape[-1])
        return super().forward(hidden_states, position_embeddings=(cos, sin), **kwargs)


def norm_of(cls):
    def convert(model):
        model.model.norm.__class__ = cls
        if cls is ByBufferNorm:
            model.model.norm.register_buffer("seen", torch.zeros(()))

    return convert


def activation(model):
    model.model.layers[0].mlp.act_fn = Activation()


def angles(model):
    model.model.layers[1].__class__ = Angles


def test_a_bias_that_was_not_there():
    norm = nn.LayerNorm(16, bias=False)
    model = nn.ModuleList([norm])
    report = apply_liger(model, {HEAD: False})
    assert report["layer_norm"].swapped
    norm.bias = nn.Parameter(torch.ones(16))
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,), norm.weight, norm.bias))
    assert report["layer_norm"].skipped == {"0": "it has a bias now"}


@pytest.mark.parametrize(
    "convert",
    [*map(norm_of, Llama.__subclasses__()), activation, angles],
    ids=[*(cls.__name__ for cls in Llama.__subclasses__()), "activation", "angles"],
)
def test_user_code_that_does_more_than_compute(convert, monkeypatch):
    """It is switched on after patching: it steers, counts, or adds a loss term, as in the stock model."""
    models = [tiny_model("llama").train() for _ in range(2)]
    for model in models:
        convert(model)
    report = apply_liger(models[1], REBUILT)
    results = []
    for model in models:
        results.append([step(model)])
        with monkeypatch.context() as patch:
            patch.setitem(STRENGTH, 0, 3.0)
            patch.setitem(globals(), "IS_ON", True)
            model.model.norm.steering = torch.linspace(0, 1, 32)
            model.zero_grad()
            loss = model(**batch()).loss + getattr(model.model.norm, "penalty", 0.0)
            loss.backward()
        results[-1] += [(loss.detach(), gradients(model))]
        results[-1] += [getattr(model.model.norm, name, 0) for name in ("calls", "seen")]
    for got, want in zip(results[1][:2], results[0][:2], strict=True):
        assert_same_step(got, want, "fp32")
    assert results[1][2:] == results[0][2:]
    # the buffer makes it another norm than ours
    assert report.skipped or convert.__closure__[0].cell_contents is ByBufferNorm


def test_the_report_says_that_code_is_not_known():
    model = tiny_model("llama").train()
    norm_of(PenalisedNorm)(model)
    reason = apply_liger(model)["rms_norm"].skipped["model.norm"]
    assert reason == f"PenalisedNorm.forward of {__name__} is not code of transformers, PyTorch or PEFT"
