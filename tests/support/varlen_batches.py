"""Models and batches with padding for the tests of `liger_trainer.varlen`, and a recorder that captures steps on a CPU.

`RerunRecorder` runs recorded Python again on the same buffers. It tests captured steps without a GPU, except what only
a GPU has: streams, memory and random numbers in graphs.
"""

import contextlib
import functools
import itertools
import warnings

import torch
from attentions import with_own_attention
from tiny_models import CANCELLING, VOCAB, assert_same_step, gradients, tiny_model
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

from liger_trainer import apply_liger
from liger_trainer.trainers import cuda_graphs
from liger_trainer.varlen.graphs.step_graphs import StepGraphs, use_graphs

ON = {"varlen_attention": True}
LENGTHS = (7, 1, 20, 13)


def model_of(name="llama", **config):
    model = tiny_model(name, **config)
    model.set_attn_implementation("sdpa")
    return model.train()


def drawn_model(name):
    """A tiny model of any type with its own attention; its weights are large enough for tokens to affect each other."""
    model, reason = with_own_attention(name)
    assert model is not None, reason
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # with initial weights, attention would be uniform
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, p.shape[-1] ** -0.5, generator=generator)
    return model.train()


def batch(lengths=LENGTHS, side="right", width=20, prompt=2):
    """Rows of random tokens, padding included. The labels of padding and of the first `prompt` of each row are -100."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (len(lengths), width), generator=generator)
    at = torch.arange(width).expand_as(ids)
    count = torch.tensor(lengths)[:, None]
    from_start = at if side == "right" else at - (width - count)
    real = (from_start >= 0) & (from_start < count)
    labels = ids.masked_fill(~real | (from_start < prompt), -100)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}


def checkpointed_as_in_torch_2_11(model):
    """Checkpoint `model` as torch 2.11 does it.

    Its `checkpoint` does not close its generator if a layer raises, so the hooks on saved tensors stay in place until
    the frames of the exception are gone. torch 2.13 closes it.
    """

    def checkpoint(function, *args, **kwargs):
        stages = _checkpoint_without_reentrant_generator(
            function, True, noop_context_fn, "default", False, True, *args, **kwargs
        )
        next(stages)
        result = function(*args, **kwargs)
        next(stages, None)
        return result

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = checkpoint
    return model


def captured_step(model, call, graphs=None):
    """Loss and gradients of one step, with its forward pass captured by `graphs` if given."""
    model.zero_grad()
    with use_graphs(graphs):
        loss = model(**call, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_with_states(got, want):
    """Compare like `assert_same_step`, with more room for the decay of a gated delta rule: its gradient cancels.

    Processors differ in how they round the chunks of such a rule: other gradients by up to 1.2e-5.
    """
    assert got[1].keys() == want[1].keys()
    decays = [name for name in want[1] if name.endswith(CANCELLING)]
    others = []
    for loss, grads in (got, want):
        others.append((loss, {name: grad for name, grad in grads.items() if name not in decays}))
    assert_same_step(*others, rtol=2e-5)
    for name in decays:
        torch.testing.assert_close(got[1][name], want[1][name], rtol=0, atol=5e-5 * want[1][name].norm().item())


def patched(model, config=ON):
    report = apply_liger(model, config)
    assert report["varlen_attention"].swapped, report
    return model


def rows_of(call):
    """The rows of a batch without padding, in the form that `DataCollatorWithFlattening` takes."""
    real = call["attention_mask"].bool()
    return [
        {"input_ids": ids[keep].tolist(), "labels": labels[keep].tolist()}
        for ids, labels, keep in zip(call["input_ids"], call["labels"], real, strict=True)
    ]


def waits_for_gpu(function):
    """A file and line for each time `function` waits for the GPU, in forward or backward."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{x.filename}:{x.lineno}" for x in found if "synchronizing CUDA operation" in str(x.message)]


class Rerun:
    """The recording of one function. Its results stay in the tensors that the first run made."""

    def __init__(self, function):
        self.function, self.replays = function, 0

    def replay(self):
        self.replays += 1
        self.function()


class RerunRecorder:
    """Replaces `CudaGraphRecorder`. `free` is the number of bytes it reports as left, `aside` the most to set aside."""

    def __init__(self, device=None):
        self.free = 1 << 40
        self.aside = 1 << 40
        self.recorded = 0
        self.failures = 0
        self.fails = None
        self.pools = 0
        self.seconds = itertools.cycle([1.0, 0.5])  # calls of the Python code, and of its replay

    @contextlib.contextmanager
    def warm_up(self):
        yield

    def record(self, function):
        self.recorded += 1
        if self.fails is not None:
            raise self.fails
        return Rerun(function)

    def begin_pool(self):
        self.pools += 1

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)

    def bytes_free(self):
        return self.free

    def make_room(self, size):
        return size <= self.free

    def may_set_aside(self, size):
        return size <= self.aside

    def after_failure(self):
        self.failures += 1

    def seconds_of(self, run):
        run()
        return next(self.seconds)


def capture_on_cpu(monkeypatch, recorder=RerunRecorder):
    """Have trainers on a CPU capture their steps with `RerunRecorder`. Return the recorders as they are made."""
    recorders = []

    def make_recorder(device):
        recorders.append(recorder())
        return recorders[-1]

    monkeypatch.setattr(cuda_graphs, "CAPTURES_ON", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "StepGraphs", functools.partial(StepGraphs, make_recorder))
    return recorders
