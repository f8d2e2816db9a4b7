"""A step of a model, or of a trainer, and the comparison of two of them: the loss, and every gradient by its name."""

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
    """Of two results of `step`: the same names and dtypes, and each tensor by its norm."""
    assert list(got) == list(want)
    for name, w in want.items():
        assert got[name].dtype == w.dtype
        assert (got[name].double() - w.double()).norm() <= rtol * w.double().norm() + atol, name


def assert_same_gradients(got, want, rtol=1e-5):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    largest = max(grad.norm() for grad in want.values())
    for name, grad in want.items():
        error, size = (got[name] - grad).norm(), grad.norm()
        assert error <= rtol * max(size, 1e-3 * largest), f"{name}: error {error:.1e} of {size:.1e}"


class KeepGradients(TrainerCallback):
    """What the optimizer is given, step by step, by the names that weights have without DDP around the model."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        kept = gradients(model)
        self.steps.append({name.removeprefix("module."): grad for name, grad in kept.items()})

    @property
    def grads(self):
        """Those of the first step: an optimizer enlarges errors in those that follow."""
        return self.steps[0]


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
