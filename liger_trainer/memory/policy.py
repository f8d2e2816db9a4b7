"""The four things that can happen to the activations of a layer, and the function that does each.

| policy | on the GPU until the backward pass | in the backward pass |
|---|---|---|
| `KEEP` | all activations | |
| `KEEP_ATTENTION` | the layer's input and the results of its attention | recomputes the rest |
| `TO_HOST` | the layer's output | copies the activations back from pinned memory |
| `RECOMPUTE` | the layer's input | recomputes all |
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from liger_trainer.memory import selective, switches
from liger_trainer.memory.offload import Offload
from liger_trainer.memory.switches import Switch
from liger_trainer.patching.core.contracts import KeepsValues
from liger_trainer.patching.core.saved_tensors import Hooks


class LayerPolicy(Enum):
    """The four things that can happen to a layer's activations."""

    KEEP = "keep"
    KEEP_ATTENTION = "keep attention"
    TO_HOST = "to host"
    RECOMPUTE = "recompute"

    @property
    def recomputes(self) -> bool:
        """Return whether the backward pass runs the layer again."""
        return self in (LayerPolicy.KEEP_ATTENTION, LayerPolicy.RECOMPUTE)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer, for the function of its policy.

    Attributes:
        switch (`Switch`): The layer's switch.
        function (`Callable`): What the model wants called. May hold inputs by name, as a partial.
        args (`tuple`): The inputs.
        run (`Callable`): Calls `function`; in its place, also when the layer is recomputed.
        number (`int`): How many calls of layers came before in the micro-batch.
        offload (`Offload`, *optional*): Moves activations to the host. `TO_HOST` needs it.
    """

    switch: Switch
    function: Callable[..., Any]
    args: tuple[Any, ...]
    run: Callable[..., Any]
    number: int
    offload: Offload | None


def keep(call: LayerCall) -> Any:
    """Call the layer, and let autograd keep what it wants."""
    return call.run(*call.args)


def keep_attention(call: LayerCall) -> Any:
    """Call the layer checkpointed, with the results of its attention kept."""
    return selective.checkpoint(call.switch.checkpointed, call.run, call.args)


def move_to_host(call: LayerCall) -> Any:
    """Call the layer, and copy what autograd keeps to pinned memory."""
    assert call.offload is not None
    hidden = switches.hidden_of(call.function, call.args)
    # Masks and positions are the same for all layers: moved with one, they would leave the GPU for the others too
    shared = [x for x in switches.inputs_of(call.function, call.args) if x is not hidden]
    return call.offload.call(call.number, call.switch.module(), call.run, call.args, shared)


def recompute(call: LayerCall) -> Any:
    """Call the layer checkpointed, as the model would without a switch."""
    return call.switch.checkpointed(call.run, *call.args)


CALLS: dict[LayerPolicy, Callable[[LayerCall], Any]] = {
    LayerPolicy.KEEP: keep,
    LayerPolicy.KEEP_ATTENTION: keep_attention,
    LayerPolicy.TO_HOST: move_to_host,
    LayerPolicy.RECOMPUTE: recompute,
}


def allow_rebuilding(hooks: Hooks) -> saved_tensors_hooks:
    """Context manager: `rebuild.py` works under checkpointing's `hooks` as it does without them.

    A recomputed layer then holds what it would keep, so it is measured with the bytes of a layer that keeps all.
    """
    pack, unpack = hooks
    return saved_tensors_hooks(_Recomputed(pack), unpack)


class _Recomputed(KeepsValues):
    """The pack half of checkpointing's hooks: a recomputed layer gives the values that it gave before."""

    def __init__(self, pack: Callable[[torch.Tensor], Any]):
        self.pack = pack

    def __call__(self, x: torch.Tensor) -> Any:
        return self.pack(x)
