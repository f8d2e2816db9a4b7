"""RMSNorms that take a gate: norm(x) * act(gate) as in Qwen3-Next, or norm(x * act(gate)) over groups as in Mamba 2.

They are proven like the norms without a gate, on random rows and gates. Where the gate is optional, what they compute
with it says nothing about what they do without it: a call without a gate is ours only if that is proven too.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from liger_trainer.instance.binding import is_aside
from liger_trainer.instance.hooks import LeftOut, has_hooks
from liger_trainer.patching import probe
from liger_trainer.patching.kind import Kind
from liger_trainer.patching.norms import Cases, autocast_of, eps_of, group_names, looks_like_a_norm
from liger_trainer.patching.rebuild import REBUILD_ABOVE_BYTES, rebuildable
from liger_triton import gated_rms_norm

# (gate_first, activation, cast), ordered by how many families of models have them, most first
VARIANTS = tuple(itertools.product((False, True), ("silu", "sigmoid"), ("llama", "gemma")))


@dataclass(frozen=True)
class GatedNorm:
    """One way to compute a norm with a gate.

    Attributes:
        gate_first (`bool`), activation, cast (`str`): Arguments of `liger_triton.gated_rms_norm`.
        weight (`str`): The name of the module's parameter.
        eps (`str` or `float`): The name of the module's attribute, or a number.
        group (`str` or `None`): The attribute that says how many columns are normed together; None for all.
        gate (`str`): The name of the second input of the forward.
        optional (`bool`): Whether the norm alone was proven for calls without a gate.
        left_out (`tuple`): Empty, since such a norm has no children.
    """

    gate_first: bool
    activation: str
    cast: str
    weight: str
    eps: str | float
    group: str | None
    gate: str
    optional: bool
    operation: ClassVar[str] = "rms_norm"
    left_out: ClassVar[LeftOut] = ()

    def __str__(self) -> str:
        act = f"{self.activation}({self.gate})"
        text = f"cast={self.cast}, {act} before the norm" if self.gate_first else f"cast={self.cast}, times {act}"
        return text + (f", groups of {self.group}" if self.group else "")


def nominated(module: nn.Module) -> bool:
    """Whether `module` looks like a norm and its forward takes two inputs."""
    return looks_like_a_norm(module) and len(probe.inputs_of(type(module).forward) or ()) == 2


def guessed_operation(module: nn.Module) -> str:
    """The operation under which a norm with a gate is reported that could not be proven."""
    return GatedNorm.operation


def prove(module: nn.Module) -> tuple[GatedNorm | None, str | None]:
    """(what this norm computes, None), or (None, why it is none of ours)."""
    forward = type(module).forward
    inputs = probe.inputs_of(forward)
    assert inputs is not None, "the module is not nominated"
    names = [name for name, p in module._parameters.items() if p is not None]
    if len(names) != 1 or "bias" in names[0] or autocast_of(module, GatedNorm.operation):
        return None, f"its forward takes 2 inputs ({', '.join(inputs)}), and it has not just a weight beside them"
    cases = Cases(module, gates=1)
    alone = _cases_without_gate(module) if probe.rest_is_optional(forward) else None
    groups = (*group_names(module), None)
    for variant, group, eps in itertools.product(VARIANTS, groups, eps_of(module)):
        norm = GatedNorm(*variant, names[0], eps, group, inputs[1], optional=True)
        if cases.agree(build(norm)):
            return replace(norm, optional=alone is not None and alone.agree(build(norm))), None
    return None, (
        f"its forward takes 2 inputs ({', '.join(inputs)}), and does not compute an RMSNorm and a product with silu or "
        "sigmoid of the second"
    )


def _cases_without_gate(module: nn.Module) -> Cases | None:
    """The norm's results without a gate; None where it needs one although it has a default."""
    try:
        return Cases(module)
    except (AttributeError, TypeError):
        return None


@functools.cache
def build(norm: GatedNorm, rebuild_above: int = REBUILD_ABOVE_BYTES) -> Callable:
    """The `forward` to bind to a norm with a gate.

    An output of more than `rebuild_above` bytes is not kept for the backward pass, which computes it again.
    """

    def gate_of(args: tuple, named: dict[str, Any]) -> tuple[torch.Tensor | None, bool]:
        """(the gate, whether the call is one that was proven)."""
        gate = args[1] if len(args) == 2 else named.get(norm.gate)
        expected = len(args) in (1, 2) and set(named) <= {norm.gate} and len(args) + len(named) <= 2
        if gate is None:
            return None, expected and norm.optional
        return gate, expected and gate.shape == args[0].shape

    def forward(self, *args: Any, **named: Any) -> Any:
        gate, usual = gate_of(args, named)
        if is_aside(self) or not usual:
            return type(self).forward(self, *args, **named)
        eps = getattr(self, norm.eps) if isinstance(norm.eps, str) else norm.eps
        group = None if norm.group is None else getattr(self, norm.group)

        def make(x: torch.Tensor, z: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
            return gated_rms_norm(
                x, z, w, eps, activation=norm.activation, gate_first=norm.gate_first, group_size=group, cast=norm.cast
            )  # fmt: skip

        parents = args[0], gate, getattr(self, norm.weight)
        y = make(*parents)
        return y if has_hooks(self) else rebuildable(y, make, *parents, above=rebuild_above)

    return probe.named(forward, "forward")


KIND = Kind(nominated, prove, build, guessed_operation)
