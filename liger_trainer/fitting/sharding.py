"""Shares out weights, gradients and optimizer states over several GPUs, and counts what that takes on each of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.fitting.hollow import Weight
from liger_trainer.fitting.simulated_memory import SimulatedMemory

_EMBEDDING, _TAIL, _COMING = "embedding", "head and last norm", "the next layer"


@dataclass(frozen=True)
class Sharding:
    """How a model is shared out.

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
    """FSDP2's groups of weights while a step runs: each layer, the embedding, and the head with the last norm.

    A layer is gathered for its passes, while the next is on its way. The gradients of a group wait for each other. Then
    they are copied together and summed over the GPUs, and the share of this GPU stays.
    """

    def __init__(
        self, sharding: Sharding, model: nn.Module, layers: list[nn.Module], weights: list[Weight],
        memory: SimulatedMemory,
    ):  # fmt: skip
        self.sharding, self.memory = sharding, memory
        self._gathered: dict[Any, int] = {}
        self._shares: dict[int, int] = {}  # bytes of the gradients of this GPU
        self._sending = 0
        inside: dict[int, Any] = {id(p): k for k, layer in enumerate(layers) for p in layer.parameters()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
        if embedding is not None and getattr(head, "weight", None) is not embedding.weight:
            inside |= {id(p): _EMBEDDING for p in embedding.parameters()}
        groups: dict[Any, list[Weight]] = {}
        for weight in weights:
            groups.setdefault(inside.get(id(weight.fake), _TAIL), []).append(weight)
        sizes = {key: sum(w.bytes(w.fake.dtype) for w in group) for key, group in groups.items()}
        for key, group in groups.items():
            self._watch(key, [weight for weight in group if weight.trained])
        self._outside = {key: sizes.get(key, 0) for key in (_EMBEDDING, _TAIL)}
        self._outside[_COMING] = max((sizes.get(k, 0) for k in range(len(layers))), default=0)
        for k, layer in enumerate(layers):
            size = sizes.get(k, 0)
            layer.register_forward_pre_hook(lambda *_, k=k, size=size: self._before(k, size))
            layer.register_forward_hook(lambda module, args, out, k=k, size=size: self._after(out, k, size))

    @property
    def gathered(self) -> int:
        """The bytes of the groups that are gathered now."""
        return sum(self._gathered.values())

    def begin(self) -> None:
        """Gather the embedding, the head and the first layer. To be called before a micro-batch."""
        for key, size in self._outside.items():
            self._gather(key, size)

    def end(self) -> None:
        """Free everything that is gathered. To be called after a micro-batch."""
        self.memory.add(-self._sending - self.gathered)
        self._gathered, self._sending = {}, 0

    def _gather(self, key: Any, size: int) -> None:
        if key not in self._gathered:
            self._gathered[key] = size
            self.memory.add(size)

    def _free(self, key: Any) -> None:
        self.memory.add(-self._gathered.pop(key, 0))

    def _before(self, k: int, size: int) -> None:
        self._gather(k, size)
        if k == 0 and self.sharding.reshard and torch._C._current_graph_task_id() == -1:
            self._free(_EMBEDDING)

    def _after(self, out: Any, k: int, size: int) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        in_backward = torch._C._current_graph_task_id() != -1
        if self.sharding.reshard and not in_backward:
            self._free(k)
        if hidden.requires_grad and not in_backward:
            hidden.register_hook(lambda gradient: self._backward(k, size))

    def _backward(self, k: int, size: int) -> None:
        self._free(k + 1)
        self._gather(k, size)
        if k == 0:
            self._free(_COMING)
            self._gather(_EMBEDDING, self._outside[_EMBEDDING])

    def _watch(self, key: Any, group: list[Weight]) -> None:
        waiting: dict[int, torch.Tensor] = {}

        def arrived(weight: Weight) -> None:
            parameter = weight.fake
            waiting[id(parameter)] = parameter.grad
            parameter.grad = None
            if len(waiting) < len(group):
                return
            size = sum(gradient.nbytes for gradient in waiting.values())
            self.memory.add(size - self._sending)
            self._sending = size
            waiting.clear()
            self._free(key)
            for member in group:
                if id(member.fake) not in self._shares:
                    self._shares[id(member.fake)] = self.sharding.stored([member])
                    self.memory.add(self._shares[id(member.fake)])

        for weight in group:
            weight.fake.register_post_accumulate_grad_hook(lambda _, weight=weight: arrived(weight))

    def forget_gradients(self) -> None:
        """Free this GPU's shares of the gradients."""
        self.memory.add(-sum(self._shares.values()))
        self._shares = {}
