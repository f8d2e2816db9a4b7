"""Gated MLPs `down(act(gate(x)) * up(x))`, nominated by the widths of their projections.

The result may be multiplied by a number, and a dropout may follow.

For the proof, the projections are replaced by recorders that return random tensors, so that the weights do not matter.
It shows that x goes to the first projections unchanged, that act(gate) * up goes to the last one unchanged, and that
the output of the last one is the result. With anything in between that is not known here the results differ, and the
module keeps its own code. Our forward calls the projections as modules and in the same order, so adapters in them
and around them keep working.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from liger_trainer.instance.binding import is_aside
from liger_trainer.instance.hooks import LeftOut, step_aside, why_children_must_run
from liger_trainer.patching import probe
from liger_trainer.patching.gates import (
    SCALES,
    Gate,
    candidates,
    children_except,
    guessed_operation,
    numbers,
    scale_names,
)
from liger_trainer.patching.kind import Kind
from liger_trainer.patching.lora import tensors_now
from liger_trainer.patching.lora_parts import Tensors
from liger_trainer.patching.rebuild import REBUILD_ABOVE_BYTES, call_rebuilding, nobody_else_reads, rebuilding
from liger_triton import lora_mlp
from liger_triton.halves import halves

TOKENS = (2, 3)
ACTIVATIONS = {Gate("swiglu", ""): "silu", Gate("geglu", "tanh"): "gelu_tanh", Gate("geglu", "none"): "gelu"}


@dataclass(frozen=True)
class MLP:
    """What a gated MLP computes, and the names of the children that do it.

    Attributes:
        gate (`Gate`): The function between the projections.
        inner (`tuple`): The projections before the gate, in the order of their calls: two, or one if they are fused.
        down (`str`): The projection after the gate.
        gate_first (`bool`): Whether the gate is the first of the two, or the first half of the fused one.
        left_out (`tuple`): The other children, such as the activation, which our forward does not call.
        dropout (`str` or `None`): The attribute that is the probability of a dropout of the result.
        factor (`str` or `None`): The attribute by which the result is multiplied.
    """

    gate: Gate
    inner: tuple[str, ...]
    down: str
    gate_first: bool
    left_out: LeftOut
    dropout: str | None = None
    factor: str | None = None

    @property
    def operation(self) -> str:
        return self.gate.operation

    def __str__(self) -> str:
        names = [*self.inner, self.down]
        text = str(self.gate)
        if len(self.inner) == 1:
            text += f", fused {'[gate|up]' if self.gate_first else '[up|gate]'}: {', '.join(names)}"
        else:
            text += f": {', '.join(names if self.gate_first else [names[1], names[0], names[2]])}"
        text += f", times {self.factor}" if self.factor else ""
        return text + (f", dropout by {self.dropout}" if self.dropout else "")


def _widths(module: nn.Module | None) -> tuple[int, int] | None:
    """(width of the input, width of the output) of a linear layer or of a `Conv1D` of transformers, else None."""
    if module is None:
        return None
    for names in (("in_features", "out_features"), ("nx", "nf")):
        width_in, width_out = (getattr(module, name, None) for name in names)
        if isinstance(width_in, int) and isinstance(width_out, int):
            return width_in, width_out
    return None


def _widths_of(module: nn.Module, name: str) -> tuple[int, int]:
    """The widths of the child `name`, which is a projection."""
    widths = _widths(module._modules[name])
    assert widths is not None, f"{name} is no projection"
    return widths


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def projections_of(module: nn.Module) -> tuple[list[str], str] | None:
    """(names of the projections before the gate, name of the one after it), or None if the widths do not fit an MLP."""
    if any(p is not None for p in module._parameters.values()):
        return None
    linear: dict[str, tuple[int, int]] = {}
    for name, child in module._modules.items():
        if (widths := _widths(child)) is not None:
            linear[name] = widths
    others = [name for name, child in module._modules.items() if name not in linear and _has_parameters(child)]
    if len(linear) == 3:
        for down, (wide, narrow) in linear.items():
            inner = [name for name in linear if name != down]
            looks_gated = all(linear[name] == (narrow, wide) for name in inner)
            if looks_gated and (wide != narrow or down == list(linear)[-1]):
                return inner, down
    if len(linear) == 2 and not others:
        (fused, (width_in, double)), (down, (wide, width_out)) = linear.items()
        if double == 2 * wide and width_in == width_out:
            return [fused], down
    return None


def nominated(module: nn.Module) -> bool:
    """Whether `module` has projections of the widths of a gated MLP, and a forward without `*args` and `**kwargs`."""
    return projections_of(module) is not None and probe.inputs_of(type(module).forward) is not None


class _Recorder(nn.Module):
    """Stands in for a projection: notes its input in `calls`, and returns `value`, or the input where that is None."""

    weight = None  # T5 and its kin cast the input of `wo` to the dtype of this, if it is a tensor

    def __init__(
        self,
        name: str,
        width_in: int,
        width_out: int,
        value: torch.Tensor | None,
        calls: list[tuple[str, torch.Tensor]],
    ):
        super().__init__()
        self.in_features, self.out_features = width_in, width_out
        self.name, self.value, self.calls = name, value, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.name, x))
        return x if self.value is None else self.value.reshape(*x.shape[:-1], -1)


def prove(module: nn.Module) -> tuple[MLP | None, str | None]:
    """(what this MLP computes, None), or (None, why it is none of ours)."""
    projections, inputs = projections_of(module), probe.inputs_of(type(module).forward)
    assert projections is not None and inputs is not None, "the module is not nominated"
    inner, down = projections
    if len(inputs) != 1 and not probe.rest_is_optional(type(module).forward):
        return None, f"its forward takes {len(inputs)} inputs ({', '.join(inputs)}), a plain MLP takes one"
    extra = [n for n, c in module._modules.items() if n not in (*inner, down) and _has_parameters(c)]
    if extra:
        return None, f"it has more than its projections: {', '.join(extra)}"
    weights = [getattr(module._modules[name], "weight", None) for name in (*inner, down)]
    dtypes = {str(w.dtype).removeprefix("torch.") for w in weights if w is not None and w.is_floating_point()}
    if "weight" in type(module).forward.__code__.co_names and len(dtypes) > 1:
        return None, f"it casts between its projections, whose weights are {' and '.join(sorted(dtypes))}"
    x, values = _input_and_values(module, inner, 1.0)
    calls, _ = _recorded_calls(module, inner, down, type(module).forward, x, values, True)
    order = [name for name, _ in calls]
    if sorted(order) != sorted((*inner, down)) or order[-1] != down:
        return None, f"it calls its projections in the order {', '.join(order)}; expected each once, {down} last"
    left_out = children_except(module, order)
    dropout = next(iter(numbers(module, "drop")), None)
    factors = [None, *scale_names(module)]
    for gate, gate_first, factor in itertools.product(candidates(module), (True, False), factors):
        if factor is not None and factor == gate.scale:
            continue
        mlp = MLP(gate, tuple(order[:-1]), down, gate_first, left_out, dropout, factor)
        if _agrees(module, mlp):
            return mlp, None
    return None, "it is not down(act(gate) * up) with silu or gelu, nor one of the known clamps and scales of that"


def _input_and_values(module: nn.Module, inner: Sequence[str], scale: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A random x, and what the projections before the gate shall return. Equal shapes and scales give equal numbers."""
    source = probe.generator()
    widths = [_widths_of(module, name) for name in inner]
    x = probe.randn((*TOKENS, widths[0][0]), source)
    return x, [probe.randn((*TOKENS, out), source) * scale for _, out in widths]


def _recorded_calls(
    module: nn.Module,
    inner: Sequence[str],
    down: str,
    forward: Callable,
    x: torch.Tensor,
    values: list[torch.Tensor],
    training: bool,
) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """Run `forward` on a clone whose projections are recorders. Returns (the calls of the projections, the result)."""
    calls: list[tuple[str, torch.Tensor]] = []
    children = {}
    for name, value in (*zip(inner, values, strict=True), (down, None)):
        children[name] = _Recorder(name, *_widths_of(module, name), value, calls)
    copy = probe.clone(module, probe.generator(), children=children)
    probe.set_training(copy, training)
    torch.default_generator.manual_seed(probe.SEED)  # of a dropout; the state is forked, see `probe.isolated`
    return calls, forward(copy, x)


def _agrees(module: nn.Module, mlp: MLP) -> bool:
    """Whether our forward for `mlp` makes the calls that the module's own makes, with its values and gradients."""
    ours = build(mlp)
    for training in (True, False):
        for scale in SCALES:
            x, values = _input_and_values(module, mlp.inner, scale)
            dy = probe.randn((*TOKENS, _widths_of(module, mlp.down)[0]), probe.generator())
            for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.02)):
                results = []
                for forward in (ours, type(module).forward):
                    leaves = [v.to(dtype).requires_grad_() for v in values]
                    given = x.to(dtype)
                    calls, out = _recorded_calls(module, mlp.inner, mlp.down, forward, given, leaves, training)
                    if not all(torch.equal(seen.reshape(-1), given.reshape(-1)) for _, seen in calls[:-1]):
                        return False  # something has changed x in front of a projection
                    if (
                        not isinstance(out, torch.Tensor)
                        or out.shape != dy.shape
                        or [name for name, _ in calls] != [*mlp.inner, mlp.down]
                    ):
                        return False
                    grads = torch.autograd.grad(out, leaves, dy.to(dtype), allow_unused=True)
                    # What `down` is given is compared too, since the recorder returns it: a factor or a dropout before
                    # `down` would look like one after it.
                    results.append([out, calls[-1][1], *(torch.zeros(()) if g is None else g for g in grads)])
                if not all(probe.same(got, want, rtol) for got, want in zip(*results, strict=True)):
                    return False
    return True


@functools.cache
def build(mlp: MLP, rebuild_above: int = REBUILD_ABOVE_BYTES) -> Callable:
    """The `forward` to bind to a gated MLP.

    A gated product of more than `rebuild_above` bytes is not kept for the backward pass, which computes it again.
    """
    first, second, gate_first = mlp.inner[0], mlp.inner[-1], mlp.gate_first
    names = (first, second, mlp.down) if gate_first else (second, first, mlp.down)
    activation = None if first == second else ACTIVATIONS.get(mlp.gate)  # of `lora_mlp`

    def projections_with_lora(self, x: torch.Tensor) -> list[Tensors] | None:
        """The tensors of gate, up and down where one of them has a LoRA and our function computes all three now."""
        projections = [self._modules[name] for name in names]
        if torch.compiler.is_compiling() or not any("base_layer" in module._modules for module in projections):
            return None
        found: list[Tensors] = []
        for name, module in zip(names, projections, strict=True):
            tensors = tensors_now(module, x, found[0][0].shape[0] if name == mlp.down else None)
            if tensors is None:
                return None
            found.append(tensors)
        return found if any(adapter is not None for _, _, adapter in found) else None

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The two results before the gate, in the order of their calls, and whether they may be written over."""
        projections = [getattr(self, name) for name in mlp.inner]
        with rebuilding(x, self):
            outputs = [projection(x) for projection in projections]
        reuse = all(map(nobody_else_reads, projections, outputs))
        return (*halves(outputs[0]), reuse) if first == second else (*outputs, reuse)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """down(act(gate) * up), whose projections are called as modules."""
        a, b, reuse = projected(self, x)
        if a.dtype != b.dtype:  # an adapter on one of the two may return fp32, which their product would be as well
            dtype = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(dtype), b.to(dtype)
        a, b = (a, b) if gate_first else (b, a)
        return call_rebuilding(getattr(self, mlp.down), mlp.gate.function(self), a, b, reuse, above=rebuild_above)

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> Any:
        extra = (others or named) and any(given is not None for given in (*others, *named.values()))
        if is_aside(self) or extra:
            return type(self).forward(self, x, *others, **named)
        if (reason := why_children_must_run(self, mlp.left_out)) is not None:
            step_aside(self, reason)
            return type(self).forward(self, x)
        if activation is not None and (adapted := projections_with_lora(self, x)) is not None:
            with rebuilding(x, self):
                y = lora_mlp(x, *adapted, activation=activation)
        else:
            y = gated(self, x)
        if mlp.factor is not None:
            y = y * getattr(self, mlp.factor)
        if mlp.dropout is not None:
            y = F.dropout(y, getattr(self, mlp.dropout), self.training)
        return y

    return probe.named(forward, "forward")


KIND = Kind(nominated, prove, build, guessed_operation)
