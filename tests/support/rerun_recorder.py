"""A recorder for CPUs: it runs recorded Python again on the same buffers.

It tests captured steps without a GPU, except what only a GPU has: streams, memory and random numbers in graphs.
"""

import contextlib
import functools
import itertools

import torch

from liger_trainer.trainers import cuda_graphs
from liger_trainer.varlen.graphs.step_graphs import StepGraphs


class Rerun:
    """The recording of one function. Its results stay in the tensors that the first run made."""

    def __init__(self, function):
        self.function, self.replays = function, 0

    def replay(self):
        self.replays += 1
        self.function()


class RerunRecorder:
    """Replaces `CudaGraphRecorder`. `free` is the number of bytes it reports as left."""

    def __init__(self, device=None):
        self.free = 1 << 40
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
