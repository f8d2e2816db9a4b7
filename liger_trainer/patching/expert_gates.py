"""The gates of blocks of experts: the method `_apply_gate` of `use_experts_implementation` in transformers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from liger_trainer.instance import probe
from liger_trainer.patching.gates import SCALES, Gate, candidates

PARTS: dict[str, Callable] = {  # how gate and up lie in one tensor
    "halves": lambda x: x.chunk(2, -1),
    "pairs": lambda x: (x[..., ::2], x[..., 1::2]),
}


@dataclass(frozen=True)
class ExpertGate:
    """The gate of a block of experts, whose `_apply_gate` gets one tensor with gate and up.

    Attributes:
        gate (`Gate`): What it computes from the two.
        parts (`str`): `"halves"`, the gate before up, or `"pairs"`, the gate in the even columns.
    """

    gate: Gate
    parts: str

    def apply(self, module: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        """What `_apply_gate` of `module` would return."""
        return self.gate.function(module)(*PARTS[self.parts](gate_up))


def nominated(module: nn.Module) -> bool:
    """Return whether `module` is a block of experts of transformers (`use_experts_implementation`) with a gate."""
    return callable(getattr(type(module), "_apply_gate", None)) and getattr(module, "has_gate", True)


def prove_gate(module: nn.Module) -> tuple[ExpertGate | None, str | None]:
    """(what the `_apply_gate(self, gate_up)` of these experts computes, None), or (None, why it is none of ours).

    Eager experts have the same code inside their forward, and do not call `_apply_gate`.
    """
    weight = module._parameters.get("gate_up_proj")
    if weight is None or len(probe.full_shape(weight)) != 3:
        return None, "it has no gate_up_proj of three dimensions"
    width = probe.full_shape(weight)[2 if getattr(module, "is_transposed", False) else 1]
    copy = probe.clone(module, probe.generator(), parameters=False)
    likely = [ExpertGate(gate, parts) for parts in PARTS for gate in candidates(module)]
    for training in (True, False):
        probe.set_training(copy, training)
        for scale in SCALES:
            for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.02)):
                source = probe.generator()
                x, dy = probe.randn((4, width), source, dtype) * scale, probe.randn((4, width // 2), source, dtype)
                want = _gate_and_grad(type(module)._apply_gate, copy, x, dy)
                likely = [
                    c for c in likely if all(map(probe.same, _gate_and_grad(c.apply, copy, x, dy), want, [rtol] * 2))
                ]
    if not likely:
        return None, (
            "its _apply_gate is not act(gate) * up with silu or gelu, plain or clamped, on two halves or on even and "
            "odd columns"
        )
    return likely[0], None


def _gate_and_grad(
    function: Callable, module: nn.Module, x: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `function`, an `_apply_gate`. Returns its result and the gradient of `x`."""
    x = x.clone().requires_grad_()
    y = function(module, x)
    return y, torch.autograd.grad(y, x, dy)[0] if y.shape == dy.shape else torch.zeros(())
