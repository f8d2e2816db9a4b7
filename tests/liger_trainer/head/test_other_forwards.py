"""Forwards that use logits as no model of transformers does: each trains a step as if unpatched, or raises."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

from liger_trainer.head.calls import install_fused_head
from liger_trainer.head.deferred import is_deferred, materialize

VOCAB, WIDTH = 31, 16


def next_token_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1))


class Tiny(nn.Module):
    """A language model in which `rest` makes the output from the head's input and the labels."""

    def __init__(self, rest):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.rest, self.kept = rest, []

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels=None):
        outputs = self.rest(self, torch.tanh(self.mix(self.embedding(input_ids))), labels)
        return outputs


def tiny(rest, fused):
    torch.manual_seed(0)
    model = Tiny(rest)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    if fused:
        assert install_fused_head(model) is None
    return model


def ids():
    return torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def trained(rest, fused, modes=()):
    """Loss and gradients of one step, and what the model has kept."""
    model = tiny(rest, fused)
    outputs = model(input_ids=ids(), labels=ids())
    loss = outputs
    if isinstance(outputs, dict):
        loss = outputs["loss"]
    elif isinstance(outputs, tuple):
        loss = outputs[0]
    loss = getattr(loss, "loss", loss)
    loss.backward()
    grads = {name: None if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.detach(), grads, model, outputs


def assert_same_step(rest, rtol=1e-5):
    want, got = trained(rest, False), trained(rest, True)
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=0, check_dtype=True)
    for name, grad in want[1].items():
        assert (got[1][name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(got[1][name], grad, rtol=rtol, atol=1e-6, msg=name)
    return want, got


# Switches of gradients and autocast, around the head or around the use of its result


def head_without_grad(m, h, labels):
    with torch.no_grad():
        logits = m.lm_head(h)
    return next_token_loss(m.factor * logits, labels) + h.square().mean()


def head_without_grad_scaled_by_a_number(m, h, labels):
    with torch.no_grad():
        logits = m.lm_head(h)
    return next_token_loss(2.0 * logits, labels) + h.square().mean()


def metric_without_grad(m, h, labels):
    logits = m.lm_head(h)
    with torch.no_grad():
        m.kept.append((logits.argmax(-1) == labels).sum())
    return next_token_loss(logits, labels)


def loss_without_grad(m, h, labels):
    logits = m.lm_head(h)
    with torch.no_grad():
        m.kept.append(next_token_loss(logits, labels))
        assert not m.kept[-1].requires_grad
    return next_token_loss(logits, labels)


def scaled_without_grad(m, h, labels):
    logits = m.lm_head(h)
    with torch.no_grad():
        constant = logits / 2.0
    return next_token_loss(logits, labels) + next_token_loss(constant, labels)


def head_with_grad_inside_no_grad(m, h, labels):
    with torch.no_grad():
        loss = next_token_loss(m.lm_head(h), labels)
    return loss * h.mean() + next_token_loss(m.lm_head(h), labels)


def head_in_a_reentrant_checkpoint(m, h, labels):
    return next_token_loss(checkpoint(m.lm_head, h, use_reentrant=True), labels)


def head_in_a_checkpoint(m, h, labels):
    return next_token_loss(checkpoint(m.lm_head, h, use_reentrant=False), labels)


def loss_in_a_checkpoint(m, h, labels):
    return checkpoint(lambda h: next_token_loss(m.lm_head(h), labels), h, use_reentrant=False)


def loss_in_a_reentrant_checkpoint(m, h, labels):
    return checkpoint(lambda h: next_token_loss(m.lm_head(h), labels), h, use_reentrant=True)


def autocast_around_all(m, h, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.lm_head(h)
        m.kept.append(logits.dtype)
        return next_token_loss(logits, labels)


def autocast_around_the_head(m, h, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.lm_head(h)
    m.kept.append(logits.dtype)
    return next_token_loss(logits, labels)


def autocast_around_the_loss(m, h, labels):
    logits = m.lm_head(h)
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(logits, labels)


def autocast_around_the_head_and_real_logits(m, h, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.lm_head(h)
    return F.nll_loss(logits.float().log_softmax(-1)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def head_under_inference_mode(m, h, labels):
    with torch.inference_mode():
        m.kept.append(m.lm_head(h).argmax(-1))
    return next_token_loss(m.lm_head(h), labels)


# Writes into a tensor of the model's own


def write_to_out(m, h, labels):
    logits = m.lm_head(h)
    with torch.no_grad():
        buffer = torch.empty(2, 7, VOCAB)
        torch.mul(logits, 2.0, out=buffer)
        m.kept.append(buffer)
        m.kept.append(torch.mul(input=logits, other=3.0))
        m.kept.append(torch.div(input=logits, other=3.0, rounding_mode="floor"))
    return next_token_loss(torch.mul(input=logits, other=2.0), labels)


def write_into_real_logits(m, h, labels):
    logits = m.lm_head(h)
    transposed = logits.transpose(0, 1)
    transposed[..., 3] = -9.0
    return next_token_loss(transposed.transpose(0, 1), labels) + next_token_loss(logits, labels)


def hooks_on_the_logits(m, h, labels):
    logits = m.lm_head(h)
    doubled = logits * 2.0
    logits.register_hook(lambda grad: 3.0 * grad)
    return next_token_loss(doubled, labels) + next_token_loss(logits, labels)


def gradient_is_kept(m, h, labels):
    logits = m.lm_head(h)
    halved = logits / 2.0
    logits.retain_grad()
    m.kept.append(logits)
    return next_token_loss(halved, labels)


# Ways to pass logits on


def functions_by_keyword_and_in_lists(m, h, labels):
    logits = m.lm_head(h)
    both = torch.cat([logits, torch.stack((logits, 2 * logits)).mean(0)])
    tanh = torch.tanh(input=torch.reshape(input=logits, shape=(2, 7, VOCAB)))
    flat = torch.flatten(input=logits, start_dim=0, end_dim=1)
    return next_token_loss(both, labels.repeat(2, 1)) + tanh.square().mean() + flat.mean()


def einsum_of_both(m, h, labels):
    return torch.einsum("bsv,bsv->", m.lm_head(h), m.lm_head(h).softmax(dim=-1)) + next_token_loss(m.lm_head(h), labels)


def two_calls_of_the_head(m, h, labels):
    return next_token_loss(m.lm_head(h), labels) + 0.3 * next_token_loss(m.lm_head(h.flip(1)), labels)


def python_of_a_tensor(m, h, labels):
    logits = m.lm_head(h)
    small = logits.detach()
    m.kept += [bool(small[0, 0, 0] > 0), float(small[0, 0, 1]), small.numpy().sum(), abs(logits).sum(), len(logits)]
    m.kept += [logits.sum().item(), torch.is_tensor(logits.clone()), logits.element_size(), 1.0 - logits[0, 0, 0]]
    m.kept += [1.0 / (logits[0, 0, 0] + 5), logits[0, 0] @ torch.ones(VOCAB), next(iter(logits)).sum(), 2.0 in small]
    return next_token_loss(logits, labels)


def input_written_after_the_head(m, h, labels):
    with torch.no_grad():
        frozen = h.clone()
    logits = m.lm_head(frozen)
    del frozen
    return next_token_loss(logits, labels) + h.mean()


FORWARDS = [
    head_without_grad,
    head_without_grad_scaled_by_a_number,
    metric_without_grad,
    loss_without_grad,
    scaled_without_grad,
    head_with_grad_inside_no_grad,
    head_in_a_reentrant_checkpoint,
    head_in_a_checkpoint,
    loss_in_a_checkpoint,
    loss_in_a_reentrant_checkpoint,
    head_under_inference_mode,
    write_to_out,
    write_into_real_logits,
    hooks_on_the_logits,
    gradient_is_kept,
    functions_by_keyword_and_in_lists,
    einsum_of_both,
    two_calls_of_the_head,
    python_of_a_tensor,
    input_written_after_the_head,
]
IN_BF16 = [
    autocast_around_all,
    autocast_around_the_head,
    autocast_around_the_loss,
    autocast_around_the_head_and_real_logits,
]


@pytest.mark.parametrize("rest", FORWARDS, ids=lambda f: f.__name__)
def test_a_step_equals_stock(rest):
    want, got = assert_same_step(rest)
    for x, ref in zip(got[2].kept, want[2].kept, strict=True):
        if rest is gradient_is_kept:
            x, ref = x.grad, ref.grad
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(ref), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rest", IN_BF16, ids=lambda f: f.__name__)
def test_autocast_of_the_head_s_call_applies(rest):
    """Our bf16 rounds in other places, so the limit is one rounding.

    Without the autocast there would be no rounding.
    """
    want, got = trained(rest, False), trained(rest, True)
    assert got[0].dtype == want[0].dtype and got[2].kept == want[2].kept
    exact = rest is autocast_around_the_loss
    rtol = 1e-6 if exact else 1e-2
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=0)
    for name, grad in want[1].items():
        if grad is not None:
            torch.testing.assert_close(got[1][name], grad, rtol=rtol, atol=1e-6 if exact else 1e-2 * grad.abs().max())


# Return values of a forward


Pair = namedtuple("Pair", "loss logits")


@dataclass
class WithLogits(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    mtp: tuple | None = None


@dataclass(frozen=True)
class Plain:
    loss: torch.Tensor
    logits: torch.Tensor


def with_key_and_attribute(loss, logits):
    outputs = CausalLMOutput(loss=loss, logits=logits)
    outputs["term"], outputs.note = loss.detach(), "kept"
    return outputs


RETURNED = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits, "term": loss.detach()},
    "ordered-dict": lambda loss, logits: OrderedDict(term=1, logits=logits, loss=loss),
    "key-and-attribute": with_key_and_attribute,
    "own-class": lambda loss, logits: WithLogits(loss=loss, logits=logits, mtp=(logits * 2, logits)),
    "model-output": lambda loss, logits: ModelOutput(loss=loss, logits=logits),
    "dataclass": Plain,
    "bare-loss": lambda loss, logits: loss,
    "bare-logits": lambda loss, logits: logits,
    "tuple": lambda loss, logits: (loss, logits, (logits,)),
    "named-tuple": lambda loss, logits: Pair(loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "namespace": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    "none": lambda loss, logits: None,
}


def parts(outputs):
    """The parts of an output, by name."""
    if isinstance(outputs, dict):
        return getattr(outputs, "__dict__", {}) | dict(outputs)
    if isinstance(outputs, (tuple, list)):
        return dict(enumerate(outputs))
    return vars(outputs) if hasattr(outputs, "loss") else {"itself": outputs}


@pytest.mark.parametrize("name", RETURNED)
def test_outputs_are_returned_without_deferred_logits(name):
    """A `ModelOutput` loses the logits of the loss. Logits passed on in other ways are there and are right."""

    def rest(m, h, labels):
        logits = m.lm_head(h)
        outputs = RETURNED[name](next_token_loss(logits, labels), logits)
        m.kept.append(outputs)
        return outputs

    stock, model = tiny(rest, False), tiny(rest, True)
    want, got = (m(input_ids=ids(), labels=ids()) for m in (stock, model))
    assert type(got) is type(want)
    want, got = parts(want), parts(got)
    if name in ("own-class", "key-and-attribute", "model-output"):
        assert got.get("logits") is None
        got["logits"] = materialize(parts(model.kept[0])["logits"])  # the model has kept them
    assert got.keys() == want.keys()
    for key, ref in want.items():
        for x, y in zip(*(v if isinstance(v, tuple) else (v,) for v in (got[key], ref)), strict=True):
            if isinstance(y, torch.Tensor):
                torch.testing.assert_close(x.detach(), y.detach())
                assert isinstance(x, torch.Tensor) or name in ("own-class", "namespace", "dataclass", "tuple")
            else:
                assert x == y


def kept_in_the_model(m, h, labels):
    logits = m.lm_head(h)
    m.kept += [logits, logits / 2.0, {"shifted": logits[:, :-1]}]
    return next_token_loss(logits, labels)


def test_kept_logits_have_the_values_of_their_call():
    """The weights have changed by the time they are read."""
    want, got = trained(kept_in_the_model, False), trained(kept_in_the_model, True)
    for model in (want[2], got[2]):
        with torch.no_grad():
            model.lm_head.weight.zero_()
    for x, ref in zip(got[2].kept[:2], want[2].kept[:2], strict=True):
        torch.testing.assert_close(x + 0.0, ref)
        for copied in (copy.copy(x), pickle.loads(pickle.dumps(x.detach()))):
            assert type(copied) is torch.Tensor and torch.equal(copied, ref)
    torch.testing.assert_close(got[2].kept[2]["shifted"] + 0.0, want[2].kept[2]["shifted"])


def test_nothing_of_a_call_outlives_it():
    """This holds without garbage collection, because hidden states are among the largest tensors of a step."""
    inputs = []

    def rest(m, h, labels):
        logits = 2.0 * m.lm_head(h)
        inputs.append(weakref.ref(h))
        return CausalLMOutput(loss=None if labels is None else next_token_loss(logits.float(), labels), logits=logits)

    model = tiny(rest, True)
    gc.disable()
    try:
        model(input_ids=ids(), labels=ids()).loss.backward()
        assert inputs[0]() is None
        with torch.no_grad():
            model(input_ids=ids(), labels=ids(), fused_lm_head=True)
        assert inputs[1]() is None
    finally:
        gc.enable()


def input_written_into(m, h, labels):
    logits = m.lm_head(h)
    h.mul_(2.0)
    return next_token_loss(logits, labels)


def in_a_function_of_autograd(m, h, labels):
    return next_token_loss(Doubled.apply(m.lm_head(h)), labels)


def in_a_reentrant_checkpoint(m, h, labels):
    return checkpoint(lambda logits: next_token_loss(logits, labels), m.lm_head(h), use_reentrant=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(
    "rest, message",
    [
        (input_written_into, "changed in place between the call of the head and the loss"),
        (in_a_function_of_autograd, "An autograd function was given logits"),
        (in_a_reentrant_checkpoint, "An autograd function was given logits"),
    ],
)
def test_uses_that_would_lose_gradients_are_errors(rest, message):
    """Stock trains, or raises its own error. Our error says what to do, and that works."""
    with pytest.raises(RuntimeError, match=message + ".*Call the model with skip_logits=False, or set liger_config"):
        trained(rest, True)
    if rest is not input_written_into:
        model = tiny(rest, True)
        want = trained(rest, False)[0]
        assert torch.equal(model(input_ids=ids(), labels=ids(), skip_logits=False).detach(), want)


def assign(logits):
    logits[..., :5] = -9.0


def scale(logits):
    logits *= 2.0


def divide(logits):
    logits /= 3.0


def add(logits):
    logits += torch.arange(VOCAB)


def fill_a_slice(logits):
    logits[..., :5].fill_(-9.0)


def assign_into_a_view(logits):
    logits.view(-1, VOCAB)[:, :5] = -9.0


def assign_into_a_copy(logits):
    logits[:, :-1].contiguous()[..., 3] = -9.0


def assign_into_what_was_read(logits):
    logits.argmax(-1)
    logits[..., 3] = -9.0


def write_by_keyword(logits):
    torch.relu_(input=logits)


def write_into_an_argument_of_a_function(logits):
    F.threshold(logits, -1.0, -2.0, inplace=True)


def write_results_into(logits):
    torch.mul(torch.ones(2, 7, VOCAB), 2.0, out=logits)


def write_into_a_list(logits):
    torch._foreach_mul_([logits], 2.0)


def write_past_autograd(logits):
    logits.data.fill_(-9.0)


WRITES = {
    assign: "__setitem__",
    scale: "__imul__",
    divide: "__itruediv__",
    add: "__iadd__",
    fill_a_slice: "fill_",
    assign_into_a_view: "__setitem__",
    assign_into_a_copy: "__setitem__",
    assign_into_what_was_read: "__setitem__",
    write_by_keyword: "relu_",
    write_into_an_argument_of_a_function: "_threshold",
    write_results_into: "mul",
    write_into_a_list: "_foreach_mul_",
    write_past_autograd: "data",
}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_into_deferred_logits_is_an_error(write):
    """The error names the write. Tensors made from the logits earlier could not follow it."""

    def rest(m, h, labels):
        logits = m.lm_head(h)
        halved = logits / 2.0
        write(logits)
        return next_token_loss(halved, labels)

    message = f"`{WRITES[write]}` writes into logits that the fused LM head has not computed. Call the model with "
    with pytest.raises(RuntimeError, match=message + "skip_logits=False"):
        trained(rest, True)


@pytest.mark.parametrize("write", [assign, scale, divide, add, fill_a_slice, assign_into_a_view])
def test_a_write_is_right_with_real_logits(write):
    """The way out that the error names works."""

    def rest(m, h, labels):
        logits = 1.0 * m.lm_head(h)
        shifted = logits[:, :-1]
        write(logits)
        return F.cross_entropy(shifted.flatten(0, 1), labels[:, 1:].flatten())

    want = tiny(rest, False)(input_ids=ids(), labels=ids())
    got = tiny(rest, True)(input_ids=ids(), labels=ids(), skip_logits=False)
    assert torch.equal(got, want)


def written_after_a_view(m, h, labels):
    logits = m.lm_head(h)
    shifted = logits[:, :-1]
    logits.transpose(0, 1)[..., :5] = -9.0
    return F.cross_entropy(shifted.flatten(0, 1), labels[:, 1:].flatten())


def written_after_a_product(m, h, labels):
    logits = m.lm_head(h)
    halved = logits / 2.0
    logits.transpose(0, 1)[..., :5] = -9.0
    return next_token_loss(halved, labels)


def written_through_a_view_of_a_view(m, h, labels):
    logits = m.lm_head(h)
    halved = logits / 2.0
    logits[:, :-1].transpose(0, 1)[..., :5] = -9.0
    return next_token_loss(halved, labels)


def written_without_gradients(m, h, labels):
    logits = m.lm_head(h)
    halved = logits / 2.0
    logits.detach().fill_(-9.0)
    return next_token_loss(halved, labels)


@pytest.mark.parametrize(
    "rest",
    [written_after_a_view, written_after_a_product, written_through_a_view_of_a_view, written_without_gradients],
)
def test_a_write_into_real_logits_invalidates_earlier_results(rest):
    """PyTorch writes without asking. The next use of a deferred tensor notices."""
    message = "were written into, in place, after others had been made from them. Call the model with skip_logits=False"
    with pytest.raises(RuntimeError, match=message):
        trained(rest, True)


def test_attributes_of_real_logits_cannot_be_set():
    """They would stay on the deferred tensor. It has no `__dict__` that DeepSpeed and torch.compile could read."""

    def rest(m, h, labels):
        logits = m.lm_head(h)
        assert is_deferred(logits) and vars(logits) == {}
        logits.data = torch.zeros(2, 7, VOCAB)

    with pytest.raises(AttributeError, match="data of logits .* cannot be set. Call the model with skip_logits=False"):
        trained(rest, True)


# Heads that are not linear layers of plain numbers


class Halved(torch.Tensor):
    """A weight in its own format, like a quantised one: a product with it uses half its numbers."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                args = (args[0], 0.5 * args[1], *args[2:])
            return func(*args, **(kwargs or {}))


class HalvedParameter(Halved, nn.Parameter):
    pass


class Twice(nn.Module):
    def forward(self, weight):
        return 2.0 * weight


def halved(model):
    model.lm_head.weight = HalvedParameter(model.lm_head.weight.detach())


def halved_bias(model):
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    del model.lm_head._parameters["bias"]
    model.lm_head.bias = Halved(torch.randn(VOCAB))


def parametrized(model):
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Twice())


def spectral(model):
    nn.utils.parametrizations.spectral_norm(model.lm_head)


def spectral_by_a_hook(model):
    nn.utils.spectral_norm(model.lm_head)


def weight_norm(model):
    nn.utils.weight_norm(model.lm_head)


@pytest.mark.parametrize("change", [halved, halved_bias, parametrized, spectral, spectral_by_a_hook, weight_norm])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_only_a_plain_linear_head_is_fused(change, when):
    """Runs three steps, because a norm that is recomputed on each read advances in each of them."""

    def rest(m, h, labels):
        return next_token_loss(m.lm_head(h), labels)

    losses = []
    for fused in (False, True):
        model = tiny(rest, fused and when == "after")
        torch.manual_seed(3)
        change(model)
        if fused and when == "before":
            assert install_fused_head(model) is not None
        losses.append([model(input_ids=ids(), labels=ids()).item() for _ in range(3)])
    assert losses[1] == losses[0]


def test_a_replaced_linear_forward_computes_the_logits(monkeypatch):
    def rest(m, h, labels):
        return next_token_loss(m.lm_head(h), labels)

    stock, model = tiny(rest, False), tiny(rest, True)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, 0.5 * self.weight, self.bias))
    assert model(input_ids=ids(), labels=ids()).item() == stock(input_ids=ids(), labels=ids()).item()


def test_a_weight_with_more_rows_than_the_head_says():
    def rest(m, h, labels):
        return next_token_loss(m.lm_head(h), labels)

    losses = []
    for fused in (False, True):
        model = tiny(rest, fused)
        torch.manual_seed(3)
        model.lm_head.weight = nn.Parameter(torch.cat([model.lm_head.weight.detach(), torch.randn(9, WIDTH)]))
        losses.append(model(input_ids=ids(), labels=ids()).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


# Hooks on the whole model


def causal(m, h, labels):
    logits = m.lm_head(h)
    return CausalLMOutput(loss=None if labels is None else next_token_loss(logits, labels), logits=logits)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def by_a_hook(model, seen):
    model.register_forward_hook(lambda module, args, outputs: seen.append(outputs.logits))


def by_a_hook_for_all_modules(model, seen):
    def hook(module, args, outputs):
        if module is model:
            seen.append(outputs.logits)

    return nn.modules.module.register_module_forward_hook(hook)


def by_a_wrapper_of_the_forward(model, seen):
    forward = model.forward

    def wrapper(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        seen.append(outputs.logits)
        return outputs

    model.forward = wrapper


@pytest.mark.parametrize("watch", [by_a_hook, by_a_hook_for_all_modules, by_a_wrapper_of_the_forward])
def test_observers_of_the_outputs_see_logits(watch, caplog):
    seen = []
    for fused in (False, True):
        model = tiny(causal, fused)
        handle = watch(model, seen)
        try:
            model(input_ids=ids(), labels=ids()).loss.backward()
        finally:
            if handle is not None:
                handle.remove()
    want, got = seen
    assert torch.equal(got, want) and got.requires_grad


def test_a_hook_that_changes_the_loss():
    """A hook on the model may read the outputs or return others. It runs where stock runs it."""
    losses = []
    for fused in (False, True):
        model = tiny(causal, fused)
        model.register_forward_hook(
            lambda m, args, outputs: CausalLMOutput(loss=outputs.loss + outputs.logits.square().mean())
        )
        losses.append(model(input_ids=ids(), labels=ids()).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
