"""RMSNorms that take a gate: norm(x) * act(gate) as in Qwen3-Next, or norm(x * act(gate)) over groups as in Mamba 2.

They are proven like the norms without a gate, on random rows and gates. A call without a gate runs the norm's own code.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from liger_trainer.instance import probe
from liger_trainer.instance.hooks import has_hooks
from liger_trainer.instance.kind import Kind
from liger_trainer.memory.rebuild import REBUILD_ABOVE_BYTES, rebuildable
from liger_trainer.patching.norms import Cases, autocast_of, eps_of, groups_of, looks_like_a_norm
from liger_triton import gated_rms_norm

# (gate_first, activation, cast), ordered by how many families of models have them, most first
VARIANTS = tuple(itertools.product((False, True), ("silu", "sigmoid"), ("llama", "gemma")))


@dataclass(frozen=True)
class GatedNorm:
    """One way to compute a norm with a gate.

    Attributes:
        gate_first (`bool`), activation, cast (`str`): Arguments of `liger_triton.gated_rms_norm`.
        weight (`str`): The name of the module's parameter.
        group (`int` or `None`): How many columns are normed together; None for all.
        gate (`str`): The name of the second input of the forward.
    """

    gate_first: bool
    activation: str
    cast: str
    weight: str
    eps: float
    group: int | None
    gate: str
    operation: ClassVar[str] = "rms_norm"

    def __str__(self) -> str:
        act = f"{self.activation}({self.gate})"
        text = f"cast={self.cast}, {act} before the norm" if self.gate_first else f"cast={self.cast}, times {act}"
        return text + (f", groups of {self.group}" if self.group else "")


def nominated(module: nn.Module) -> bool:
    """Return whether `module` looks like a norm and its forward takes two inputs."""
    return looks_like_a_norm(module) and len(probe.inputs_of(type(module).forward) or ()) == 2


def prove(module: nn.Module) -> tuple[GatedNorm | None, str | None]:
    """(what this norm computes, None), or (None, why it is none of ours)."""
    forward = type(module).forward
    inputs = probe.inputs_of(forward)
    assert inputs is not None, "the module is not nominated"
    names = [name for name, p in module._parameters.items() if p is not None]
    if len(names) != 1 or "bias" in names[0] or autocast_of(module, GatedNorm.operation):
        return None, f"its forward takes 2 inputs ({', '.join(inputs)}), and it has more than a weight"
    cases = Cases(module, gates=1)
    groups = (*groups_of(module), None)
    for variant, group, eps in itertools.product(VARIANTS, groups, eps_of(module)):
        norm = GatedNorm(*variant, names[0], eps, group, inputs[1])
        if cases.agree(build(norm)):
            return norm, None
    return None, (
        f"its forward takes 2 inputs ({', '.join(inputs)}), and does not compute an RMSNorm and a product with silu or "
        "sigmoid of the second"
    )


@functools.cache
def build(norm: GatedNorm, rebuild_above: int = REBUILD_ABOVE_BYTES) -> Callable:
    """The `forward` to bind to a norm with a gate. A larger output than `rebuild_above` is computed again backward."""

    def make(x: torch.Tensor, z: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(
            x, z, w, norm.eps, activation=norm.activation, gate_first=norm.gate_first, group_size=norm.group,
            cast=norm.cast,
        )  # fmt: skip

    def forward(self, *args: Any, **named: Any) -> Any:
        gate = args[1] if len(args) == 2 else named.get(norm.gate) if len(args) == 1 else None
        if gate is None or len(args) + len(named) != 2 or gate.shape != args[0].shape:
            return type(self).forward(self, *args, **named)
        parents = args[0], gate, getattr(self, norm.weight)
        y = make(*parents)
        return y if has_hooks(self) else rebuildable(y, make, *parents, above=rebuild_above)

    return forward


KIND = Kind(nominated, prove, build, lambda module: GatedNorm.operation, rebuilds=True)
