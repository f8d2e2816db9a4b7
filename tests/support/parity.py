"""Run a step of a model, and compare two steps: the loss, and every gradient by its name."""

import torch
from tiny_models import VOCAB, collate, ragged_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, autocast=None, seed=1, backwards=1, **options):
    """Loss and gradients of a batch of ragged rows by name, from one seed; `options` are of the call."""
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = model(**collate(ragged_rows(4)), **options).loss
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return {"loss": loss.detach()} | gradients(model)


def assert_same(got, want, rtol=1e-5, atol=1e-7):
    """Compare two results of `step`: names, dtypes, and each tensor by its norm."""
    assert list(got) == list(want)
    for name, w in want.items():
        assert got[name].dtype == w.dtype
        assert (got[name].double() - w.double()).norm() <= rtol * w.double().norm() + atol, name


def assert_same_gradients(got, want, rtol=1e-5, floor=1e-3):
    """Errors are relative to each gradient's norm, or to `floor` times the largest norm."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    largest = max(grad.norm() for grad in want.values())
    for name, grad in want.items():
        error, size = (got[name] - grad).norm(), grad.norm()
        assert error <= rtol * max(size, floor * largest), f"{name}: error {error:.1e} of {size:.1e}"


def assert_same_step(got, want, rtol=1e-5):
    """Compare two pairs of a loss and gradients."""
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=0)
    assert_same_gradients(got[1], want[1], rtol)


class KeepGradients(TrainerCallback):
    """Keeps the gradients that the optimizer gets in each step, under the names that weights have without DDP."""

    def __init__(self, whole=lambda grad: grad):
        self.whole = whole  # makes one tensor of shards
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        self.steps.append({name: self.whole(grad).clone() for name, grad in named.items() if grad is not None})

    @property
    def grads(self):
        """The gradients of the first step. An optimizer enlarges errors in later steps."""
        return self.steps[0]


def logged_values(trainer, name):
    """The values of `name` in the logs of a trainer."""
    return [log[name] for log in trainer.state.log_history if name in log]


def without_times(log):
    return {name: value for name, value in log.items() if "time" not in name and "_per_second" not in name}


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest floating-point tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.numel = max(self.numel, x.numel())
        return result


class LogitRows(TorchDispatchMode):
    """The most rows of a vocabulary, or of any other dimension of its size, that one tensor of floats had."""

    def __init__(self, vocab=VOCAB):
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            logits = isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-1] == self.vocab
            if logits and x.untyped_storage().data_ptr() not in known:  # a view, such as a transposed head, is not new
                self.rows = max(self.rows, x.numel() // self.vocab)
        return result


# Per model: modules expected to be swapped, per operation. Nothing is left alone.
SWAPPED = {
    "llama": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "qwen3": {"rms_norm": 9, "rope": 2, "swiglu": 2},
    "qwen3_moe": {"rms_norm": 9, "rope": 2, "experts": 2},
    "gemma2": {"rms_norm": 9, "rope": 2, "geglu": 2},
    "gemma3_text": {"rms_norm": 13, "rope": 2, "geglu": 2},
    "gemma4_text": {"rms_norm": 18, "rope": 2, "geglu": 2},
    "cohere2": {"layer_norm": 3, "rope": 2, "swiglu": 2},
    "granite": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "glm4": {"rms_norm": 9, "rope": 2, "swiglu": 2},
    "deepseek_v3": {"rms_norm": 9, "rope": 2, "swiglu": 2, "experts": 1},
    "gpt_oss": {"rms_norm": 5, "rope": 2, "experts": 2},
    "qwen3_next": {"rms_norm": 8, "rope": 1, "swiglu": 2, "experts": 2},
    "bamba": {"rms_norm": 6, "rope": 1, "swiglu": 2},
    "nemotron": {"layer_norm": 5, "rope": 2},
    "seed_oss": {"rms_norm": 5, "rope": 2, "swiglu": 2},
    "phi": {"layer_norm": 3, "rope": 2},
    "qwen2_5_vl": {"rms_norm": 8, "rope": 3, "swiglu": 3},
}
NO_HEAD = {"fused_linear_cross_entropy": False}


def token_ids(rows=2, length=24, seed=3):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_and_grads(model, ids=None):
    """Loss and gradients by name, gradients cleared afterwards; a dropout draws the same numbers each time."""
    torch.manual_seed(8)
    ids = token_ids() if ids is None else ids
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


# The decay of the gated delta rule. Its gradient is what is left of sums that cancel. In stock's qwen3_next it changes
# by 0.6e-5 to 2.7e-5 where all weights move by half of their last bit; other weights' gradients by 0.7e-5 at most.
CANCELLING = ("linear_attn.A_log", "linear_attn.dt_bias")


def largest_difference(got, want):
    """The largest relative difference of the loss or of any gradient in two results of `loss_and_grads`.

    Relative to the largest element of that gradient, or to 1e-3 of the largest of all: k biases have noise around zero.
    A fifth of the difference counts for `CANCELLING`: there, processors differ by more than 1e-5.
    """
    assert got[1].keys() == want[1].keys()
    floor = 1e-3 * max(g.abs().max() for g in want[1].values())
    worst = ((got[0] - want[0]).abs() / want[0].abs()).item()
    for name, gradient in want[1].items():
        difference = (got[1][name] - gradient).abs().max() / gradient.abs().max().clamp(min=floor)
        worst = max(worst, difference.item() / (5 if name.endswith(CANCELLING) else 1))
    return worst
