"""Counts the memory of sharded weights, gradients and optimizer states on each of several GPUs."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.fitting.meta_model import Weight
from liger_trainer.fitting.simulated_memory import SimulatedMemory


@dataclass(frozen=True)
class Sharding:
    """How a model is distributed over GPUs.

    Attributes:
        kind (`str`): `"none"`; `"ddp"`: gradients are also held in buckets of the same size; `"fsdp2"`: each GPU holds
            a shard of everything, and all-gathers a layer when it runs.
    """

    kind: str = "none"
    gpus: int = 1
    compute: torch.dtype | None = None  # dtype of FSDP2's all-gather and reduce-scatter
    master: torch.dtype | None = None  # dtype of the trained weights under FSDP2, if accelerate upcasts them
    reshard: bool = True  # whether a layer is freed between its forward and its backward

    def share(self, weight: Weight) -> int:
        """Return the number of elements of `weight` on one GPU."""
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
    """Counts what FSDP2 holds besides shards while a micro-batch runs, and this GPU's shards of the gradients.

    The running layer, the next layer, and the embedding or the head are gathered at the same time. While the gradients
    of a layer are computed, the full gradients of the layer before are still held.
    """

    def __init__(
        self,
        sharding: Sharding,
        model: nn.Module,
        layers: list[nn.Module],
        weights: list[Weight],
        memory: SimulatedMemory,
    ):
        self.sharding = sharding
        self.memory = memory
        self._shares: dict[int, int] = {}  # bytes of this GPU's gradients
        layer_of: dict[int, int] = {}
        for number, layer in enumerate(layers):
            layer_of.update(dict.fromkeys(map(id, layer.parameters()), number))
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        in_embedding = set[int]() if embedding is None else set(map(id, embedding.parameters()))
        gathered = Counter[int]()  # bytes by unit: the number of a layer, or one of the two below
        trained = Counter[int]()
        embedding_unit = -1
        head_unit = -2  # the head and the last norm
        for weight in weights:
            outside = embedding_unit if id(weight.fake) in in_embedding else head_unit
            unit = layer_of.get(id(weight.fake), outside)
            gathered[unit] += weight.bytes(weight.fake.dtype)
            if weight.trained:
                trained[unit] += weight.bytes(weight.fake.dtype)
                weight.fake.register_post_accumulate_grad_hook(functools.partial(self._arrived, weight))
        layer_bytes = [size for unit, size in gathered.items() if unit >= 0] or [0]
        self._held = 2 * max(layer_bytes) if sharding.reshard else sum(layer_bytes)
        self._held += max(gathered[embedding_unit], gathered[head_unit])
        self._held += 2 * max((size for unit, size in trained.items() if unit >= 0), default=0)

    def begin(self) -> None:
        """Add the gathered layers before a micro-batch."""
        self.memory.add(self._held)

    def end(self) -> None:
        """Remove the gathered layers after a micro-batch."""
        self.memory.add(-self._held)

    def _arrived(self, weight: Weight, parameter: torch.Tensor) -> None:
        parameter.grad = None
        if id(parameter) not in self._shares:
            self._shares[id(parameter)] = self.sharding.stored([weight])
            self.memory.add(self._shares[id(parameter)])

    def forget_gradients(self) -> None:
        """Free this GPU's shards of the gradients."""
        self.memory.add(-sum(self._shares.values()))
        self._shares = {}
