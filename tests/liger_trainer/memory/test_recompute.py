"""`memory/recompute.py` compared with PyTorch's own function, and the cases in which PyTorch's runs."""

import copy
import functools
import gc
import pickle
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.memory import recompute
from liger_trainer.memory.switches import Switch

OF_TORCH = functools.partial(checkpoint_of_torch, use_reentrant=False)


def ours(function, *args):
    return recompute.checkpoint(SimpleNamespace(checkpointed=OF_TORCH), function, args)


class Layer(nn.Module):
    """Keeps its own results, weights and inputs, draws numbers, and ends with a product that nothing keeps."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.dropout = nn.Dropout(dropout)
        self.runs = self.ends = 0

    def forward(self, x):
        self.runs += 1
        x = self.dropout(torch.sigmoid(self.up(x)).softmax(-1))
        y = self.down(x.exp())
        self.ends += 1
        return y


def layer(dropout=0.0):
    torch.manual_seed(0)
    return Layer(dropout)


def step(checkpoint, module, autocast=False, times=1):
    """Loss, gradients and the generator's state after backward passes through two calls of `module`."""
    torch.manual_seed(1)
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = checkpoint(module, checkpoint(module, x) + x)
    loss = y.float().square().sum()
    torch.rand(1)
    for k in range(times):
        loss.backward(retain_graph=k + 1 < times)
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_numbers_equal_pytorch_s_function(dropout, autocast, times):
    mine, theirs = layer(dropout), layer(dropout)
    got, want = (step(f, m, autocast, times) for f, m in ((ours, mine), (OF_TORCH, theirs)))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert mine.runs == theirs.runs == 2 + 2 * times
    assert mine.ends == theirs.ends == 2  # a second run ends before the last product


def test_of_a_model_with_dropout():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.2,
        attn_implementation="sdpa",
    )
    results = []
    for checkpoint in (ours, OF_TORCH):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        model.gradient_checkpointing_enable()
        for module in model.model.layers:
            module._gradient_checkpointing_func = checkpoint
        ids = torch.randint(3, 60, (2, 9))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Chain(nn.Module):
    """Keeps `length` tensors."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def forward(self, x):
        for _ in range(self.length):
            x = x.exp()
        return x


def python_calls(length):
    """The number of Python calls that `recompute.py` makes for forward and backward of a `Chain`."""
    module, x = Chain(length), torch.zeros(3, requires_grad=True)
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename == recompute.__file__

    sys.setprofile(count)
    try:
        ours(module, x).sum().backward()
    finally:
        sys.setprofile(None)
    return calls


def test_a_kept_tensor_costs_the_host_one_call_when_it_is_kept_made_again_and_read():
    assert python_calls(12) - python_calls(4) == 3 * 8


def test_gradients_of_some_inputs_and_then_of_others():
    module, x = layer(), torch.randn(3, 8, requires_grad=True)
    loss = ours(module, x).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    second = torch.autograd.grad(loss, [x, *module.parameters()])
    assert torch.equal(first, second[0])
    want = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    assert all(map(torch.equal, second, want))


def test_what_is_kept_can_be_looked_at_outside_of_a_backward_pass():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    x = torch.randn(3, 8, requires_grad=True)
    y = ours(module, x)
    assert torch.equal(y.grad_fn._saved_result, y)
    y.sum().backward()
    assert x.grad is not None


def test_nothing_is_left_over():
    module, x = layer(), torch.randn(3, 8, requires_grad=True)
    given = x * 1
    loss = ours(module, given).sum()
    alive = weakref.ref(given)
    del given
    assert alive() is not None
    loss.backward()
    assert alive() is None  # even though `loss` still exists
    loss = ours(module, x * 1).sum()  # without a backward pass
    notes = [found for found in gc.get_objects() if isinstance(found, recompute._CheckpointedCall)]
    assert notes
    del loss, notes
    assert not any(isinstance(found, recompute._CheckpointedCall) for found in gc.get_objects())


class Changing(nn.Module):
    def __init__(self, second):
        super().__init__()
        self.second, self.runs = second, 0

    def forward(self, x):
        self.runs += 1
        return x.exp().sin() if self.runs == 1 else self.second(x)


@pytest.mark.parametrize(
    "second, message",
    [
        (lambda x: x[:2].exp().sin(), r"keeps .*\[2, 8\].* where it kept .*\[3, 8\].* in the forward pass"),
        (lambda x: x.exp(), "keeps 1 tensors fewer"),
    ],
)
def test_a_layer_that_computes_something_else_is_an_error(second, message):
    x = torch.randn(3, 8, requires_grad=True)
    loss = ours(Changing(second), x).sum()
    with pytest.raises(CheckpointError, match=message):
        loss.backward()


def test_an_input_that_was_changed_is_an_error():
    module, x = layer(), torch.randn(3, 8, requires_grad=True)
    given = x * 1
    loss = ours(module, given).sum()
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_error_in_the_second_run_leaves_the_generator_as_it_was():
    def fails(x):
        raise ValueError("no more")

    class Drawing(Changing):
        def forward(self, x):
            return super().forward(torch.nn.functional.dropout(x, 0.5))

    x = torch.randn(3, 8, requires_grad=True)
    loss = ours(Drawing(fails), x).sum()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="no more"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        assert ours(layer(), torch.randn(3, 8)).grad_fn is None


@pytest.mark.parametrize(
    "around",
    [lambda: torch.autograd.graph.save_on_cpu(), lambda: torch.device("cpu")],
    ids=["hooks of others", "a mode"],
)
def test_only_plain_checkpointing_is_replaced(around, monkeypatch):
    called = []
    monkeypatch.setattr(recompute, "_CheckpointedCall", lambda *args: called.append(args))
    module, x = layer(), torch.randn(3, 8, requires_grad=True)
    with around():
        loss = ours(module, x).sum()
    loss.backward()
    assert module.runs == 2 and not called


def test_a_checkpoint_inside_another():
    module, x = layer(), torch.randn(3, 8, requires_grad=True)
    want = torch.autograd.grad(module(module(x)).sum(), [x, *module.parameters()])

    def both(x):
        return ours(module, module(x))

    got = torch.autograd.grad(ours(both, x).sum(), [x, *module.parameters()])
    assert all(map(torch.allclose, got, want))


# In a trainer


class Seen(TrainerCallback):
    """Records what calls the layers while a trainer trains."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.functions = [module._gradient_checkpointing_func for module in model.model.layers]
        self.copies = [copy.deepcopy(f) for f in self.functions] + pickle.loads(pickle.dumps(self.functions))


def trained(tmp_path, monkeypatch, init=False, **options):
    calls, made = [], recompute._CheckpointedCall
    monkeypatch.setattr(recompute, "_CheckpointedCall", lambda *args: calls.append(args) or made(*args))
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 2
    args = LigerTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=True,
        **options,
    )
    seen = Seen()
    model = {"model_init": lambda: LlamaForCausalLM(config)} if init else {"model": LlamaForCausalLM(config)}
    trainer = LigerTrainer(**model, args=args, train_dataset=rows, callbacks=[seen])
    trainer.train()
    return trainer.model, seen, calls


@pytest.mark.parametrize("init", [False, True], ids=["a model", "model_init"])
def test_a_trainer_checkpoints_by_it_while_it_trains(init, tmp_path, monkeypatch):
    model, seen, calls = trained(tmp_path, monkeypatch, init)
    assert len(calls) == 2 and all(isinstance(f, Switch) for f in seen.functions)
    assert not any(isinstance(f, Switch) for f in seen.copies)
    assert all(module._gradient_checkpointing_func.func is checkpoint_of_torch for module in model.model.layers)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False, "determinism_check": "none"}},
        {"use_liger": False},
    ],
)
def test_other_ways_of_checkpointing_stay(options, tmp_path, monkeypatch):
    _, _, calls = trained(tmp_path, monkeypatch, **options)
    assert calls == []
