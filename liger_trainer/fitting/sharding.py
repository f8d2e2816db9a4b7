"""Shares out weights, gradients and optimizer states over several GPUs, and counts what that takes on each of them."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.fitting.hollow import Weight
from liger_trainer.fitting.simulated_memory import SimulatedMemory


@dataclass(frozen=True)
class Sharding:
    """The way in which a model is shared out.

    Attributes:
        kind (`str`): `"none"`; `"ddp"`: gradients are summed in buckets of as many bytes; `"fsdp2"`: each GPU has a
            share of everything, and gathers a layer when it is computed.
    """

    kind: str = "none"
    gpus: int = 1
    compute: torch.dtype | None = None  # in which FSDP2 gathers weights and sums gradients
    master: torch.dtype | None = None  # to which accelerate widens the trained weights under FSDP2
    reshard: bool = True  # whether a layer is freed between its forward and its backward pass

    def share(self, weight: Weight) -> int:
        """Return how many numbers of a weight are on one GPU."""
        numbers = weight.fake.numel()
        if self.kind != "fsdp2":
            return numbers
        rows = weight.fake.shape[0] if weight.fake.ndim else 1
        return math.ceil(rows / self.gpus) * (numbers // max(rows, 1))

    def stored_dtype(self, weight: Weight) -> torch.dtype:
        return self.master if self.master is not None and weight.trained else weight.dtype

    def stored(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of the weights on one GPU."""
        return sum(self.share(w) * self.stored_dtype(w).itemsize for w in weights)


class Units:
    """Counts what FSDP2 holds besides shares while a micro-batch runs, and this GPU's shares of the gradients.

    Gathered are the layer that is computed, the next one, and the embedding or the head. While the gradients of a layer
    are computed, all gradients of the layer before are still there.
    """

    def __init__(
        self, sharding: Sharding, model: nn.Module, layers: list[nn.Module], weights: list[Weight],
        memory: SimulatedMemory,
    ):  # fmt: skip
        self.sharding, self.memory = sharding, memory
        self._shares: dict[int, int] = {}  # bytes of the gradients of this GPU
        inside = {id(p): k for k, layer in enumerate(layers) for p in layer.parameters()}
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        first = {id(p) for p in embedding.parameters()} if embedding is not None else set()
        gathered, trained = Counter[int](), Counter[int]()
        for weight in weights:
            unit = inside.get(id(weight.fake), -1 if id(weight.fake) in first else -2)  # -2: the head and the last norm
            gathered[unit] += weight.bytes(weight.fake.dtype)
            if weight.trained:
                trained[unit] += weight.bytes(weight.fake.dtype)
                weight.fake.register_post_accumulate_grad_hook(functools.partial(self._arrived, weight))
        of_layers = [size for unit, size in gathered.items() if unit >= 0] or [0]
        self._held = 2 * max(of_layers) if sharding.reshard else sum(of_layers)
        self._held += max(gathered[-1], gathered[-2])
        self._held += 2 * max((size for unit, size in trained.items() if unit >= 0), default=0)

    def begin(self) -> None:
        """To be called before a micro-batch."""
        self.memory.add(self._held)

    def end(self) -> None:
        """To be called after a micro-batch."""
        self.memory.add(-self._held)

    def _arrived(self, weight: Weight, parameter: torch.Tensor) -> None:
        parameter.grad = None
        if id(parameter) not in self._shares:
            self._shares[id(parameter)] = self.sharding.stored([weight])
            self.memory.add(self._shares[id(parameter)])

    def forget_gradients(self) -> None:
        """Free this GPU's shares of the gradients."""
        self.memory.add(-sum(self._shares.values()))
        self._shares = {}
