"""Find gated MLPs `down(act(gate(x)) * up(x))` by the widths of their projections, and swap them.

The result may be multiplied by a number, and a dropout may follow.

For the proof, the projections are replaced by recorders that return random tensors, so that the weights do not matter.
It shows that x goes to the first projections and act(gate) * up to the last one unchanged, and that the output of that
one is the result. Our forward calls the projections as modules and in the same order, so adapters keep working.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from liger_trainer.lora.layers import current_tensors
from liger_trainer.lora.peft_state import Tensors
from liger_trainer.memory.rebuild import (
    REBUILD_ABOVE_BYTES,
    call_rebuilding,
    only_caller_reads,
    other_hooks_active,
    rebuilding,
)
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.guards import Guards, guards_of
from liger_trainer.patching.core.pattern import PatchPattern, Proof
from liger_trainer.patching.gates import (
    GATES,
    SCALES,
    Gate,
    candidates,
    guessed_operation,
    numbers,
    scale_names,
    with_limits,
)
from liger_triton import lora_mlp
from liger_triton.halves import halves
from liger_triton.lora_mlp import goes_in_slices

TOKENS = (2, 3)


@dataclass(frozen=True)
class MLP:
    """The function of a gated MLP, and the names of the children that compute it.

    Attributes:
        gate (`Gate`): The function between the projections.
        inner (`tuple`): The projections before the gate, in the order of their calls: two, or one if they are fused.
        down (`str`): The projection after the gate.
        gate_first (`bool`): Whether the gate is the first of the two, or the first half of the fused one.
        dropout (`str` or `None`): The attribute that is the probability of a dropout of the result.
        factor (`str` or `None`): The attribute that the result is multiplied by.
    """

    gate: Gate
    inner: tuple[str, ...]
    down: str
    gate_first: bool
    dropout: str | None = None
    factor: str | None = None

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
    """Return (input width, output width) of a linear layer or of a `Conv1D` of transformers, else None."""
    for name_in, name_out in (("in_features", "out_features"), ("nx", "nf")):
        width_in = getattr(module, name_in, None)
        width_out = getattr(module, name_out, None)
        if isinstance(width_in, int) and isinstance(width_out, int):
            return width_in, width_out
    return None


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def projections_of(module: nn.Module) -> tuple[list[str], str] | None:
    """Return (projections before the gate, the one after it) by name, or None if the widths do not fit an MLP."""
    if any(p is not None for p in module._parameters.values()):
        return None
    linear = {}
    for name, child in module._modules.items():
        widths = _widths(child)
        if widths is not None:
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


def is_candidate(module: nn.Module) -> bool:
    """Return whether `module` has projections as wide as a gated MLP's and a forward without `*args` and `**kwargs`."""
    return projections_of(module) is not None and probe.inputs_of(type(module).forward) is not None


class _Recorder(nn.Module):
    """Stands in for a projection: notes its input in `calls`, and returns `value`, or the input where that is None."""

    weight = None  # T5 and its kin cast the input of `wo` to the dtype of this, if it is a tensor

    def __init__(self, name: str, value: torch.Tensor | None, calls: list[tuple[str, torch.Tensor]]):
        super().__init__()
        self.name = name
        self.value = value
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.name, x))
        return x if self.value is None else self.value.reshape(*x.shape[:-1], -1)


class _Cases:
    """Runs of an MLP's own code on random inputs, its projections recorded, to compare our forwards with."""

    def __init__(self, module: nn.Module, inner: list[str], down: str):
        self.module = module
        self.inner = inner
        self.down = down
        self.cases = list(itertools.product((True, False), SCALES, (torch.float32, torch.bfloat16)))
        self.wanted = [self.run(type(module).forward, *case) for case in self.cases]

    def run(
        self, forward: Callable, training: bool, scale: float, dtype: torch.dtype
    ) -> tuple[list[str], list[torch.Tensor]]:
        """Run `forward` on random inputs.

        Returns the order of the calls of projections, and a list of tensors: x, the inputs of the projections, the
        result, and the gradients of the outputs before the gate. The input of the last projection tells a factor before
        it from one after it.
        """
        source = probe.generator()
        calls: list[tuple[str, torch.Tensor]] = []
        widths = {name: _widths(self.module._modules[name]) or (0, 0) for name in (*self.inner, self.down)}
        x = probe.randn((*TOKENS, widths[self.inner[0]][0]), source, dtype)
        values = {}
        for name in self.inner:
            random = probe.randn((*TOKENS, widths[name][1]), source) * scale
            values[name] = with_limits(random, self.module, source).to(dtype)
        leaves = [value.requires_grad_() for value in values.values()]
        children = {name: _Recorder(name, values.get(name), calls) for name in widths}
        copy = probe.clone(self.module, source, children=children)
        probe.set_training(copy, training)
        torch.default_generator.manual_seed(probe.SEED)  # of a dropout; the state is forked, see `probe.isolated`
        out = forward(copy, x)
        dy = probe.randn((*TOKENS, widths[self.down][0]), source, dtype)
        grads = torch.autograd.grad(out, leaves, dy, materialize_grads=True)
        return [name for name, _ in calls], [x, *(given for _, given in calls), out, *grads]

    def agree(self, forward: Callable) -> bool:
        """Return whether `forward` makes the calls that the MLP's own makes, with its values and gradients."""
        for case, (order, wanted) in zip(self.cases, self.wanted, strict=True):
            got_order, got = self.run(forward, *case)
            rtol = probe.FP32_RTOL if case[-1] == torch.float32 else 0.02
            if got_order != order or not all(
                probe.allclose_to_max(g, w, rtol) for g, w in zip(got, wanted, strict=True)
            ):
                return False
        return True


def pattern(rebuild_above: int) -> PatchPattern:
    """Make the pattern of gated MLPs. The backward computes a product of more than `rebuild_above` bytes again."""
    return PatchPattern(
        is_candidate, functools.partial(prove, rebuild_above=rebuild_above), guessed_operation, guards=guards
    )


def prove(module: nn.Module, rebuild_above: int = REBUILD_ABOVE_BYTES) -> tuple[Proof | None, str | None]:
    """Return (what this MLP computes, None), or (None, why it cannot be swapped)."""
    projections, inputs = projections_of(module), probe.inputs_of(type(module).forward)
    assert projections is not None and inputs is not None, "the module is a candidate"
    inner, down = projections
    if any(p.default is not None for p in list(inspect.signature(type(module).forward).parameters.values())[2:]):
        return None, f"its forward takes {len(inputs)} inputs ({', '.join(inputs)}), a plain MLP takes one"
    extra = [n for n, c in module._modules.items() if n not in (*inner, down) and _has_parameters(c)]
    if extra:
        return None, f"it has more than its projections: {', '.join(extra)}"
    weights = [getattr(module._modules[name], "weight", None) for name in (*inner, down)]
    dtypes = {str(w.dtype).removeprefix("torch.") for w in weights if w is not None and w.is_floating_point()}
    if "weight" in type(module).forward.__code__.co_names and len(dtypes) > 1:
        return None, f"it casts between its projections, and their weights are {' and '.join(sorted(dtypes))}"
    cases = _Cases(module, inner, down)
    order = cases.wanted[0][0]
    if sorted(order) != sorted((*inner, down)) or order[-1] != down:
        return None, f"it calls its projections in the order {', '.join(order)}; expected each once, {down} last"
    unchanged = True
    for _, (x, *rest) in cases.wanted:
        for given in rest[: len(inner)]:
            unchanged = unchanged and torch.equal(x, given.view_as(x))
    dropout = next(iter(numbers(module, "drop")), None)
    factors = [None, *scale_names(module)]
    for gate, gate_first, factor in itertools.product(candidates(module), (True, False), factors if unchanged else ()):
        if factor is not None and factor == gate.scale:
            continue
        mlp = MLP(gate, tuple(order[:-1]), down, gate_first, dropout, factor)
        forward = build(mlp, rebuild_above)
        if cases.agree(forward):
            return Proof(gate.operation, mlp, forward), None
    return None, "it is not down(act(gate) * up) with silu or gelu, nor one of the known clamps and scales of that"


def keeps_nothing() -> bool:
    """Return whether autograd keeps nothing here, as in a checkpointed layer, which is called again backward. Those of
    `auto` are measured as if they kept all."""
    return not torch.is_grad_enabled() or other_hooks_active()


@functools.cache
def build(mlp: MLP, rebuild_above: int = REBUILD_ABOVE_BYTES) -> Callable:
    """Return the `forward` to bind to a gated MLP.

    A larger product than `rebuild_above` bytes is computed again backward.
    """
    first = mlp.inner[0]
    second = mlp.inner[-1]
    is_fused = first == second
    gate_first = mlp.gate_first
    names = (first, second, mlp.down) if gate_first else (second, first, mlp.down)
    activation = mlp.gate.activation if mlp.gate.is_plain and not is_fused else None  # of `lora_mlp`
    plain_gate = GATES[mlp.gate.activation] if mlp.gate.is_plain else None

    def tensors_of_projections(self, x: torch.Tensor) -> list[Tensors] | None:
        """Return the tensors of gate, up and down if one function computes all three now, else None.

        It does with a LoRA on one of them. It also does if the backward pass would compute all of them again, and x has
        so many rows that the function takes them in slices.
        """
        if torch.compiler.is_compiling():
            return None
        modules = self._modules
        adapted = False
        for name in names:
            adapted = adapted or "base_layer" in modules[name]._modules
        if not adapted:
            _, width = _widths(modules[names[0]]) or (0, 0)
            if not (goes_in_slices(x, width) and keeps_nothing()):
                return None
        found: list[Tensors] = []
        for name in names:
            tensors = current_tensors(modules[name], x, found[0][0].shape[0] if name == mlp.down else None)
            if tensors is None:
                return None
            found.append(tensors)
        return found if not adapted or any(adapter is not None for _, _, adapter in found) else None

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Compute down(act(gate) * up), calling the projections as modules."""
        first_projection = getattr(self, first)
        with rebuilding(x, self):
            a = first_projection(x)
            b = None if is_fused else getattr(self, second)(x)
        # The gradients of gate and up may be written over them only if no hook or graph reads them later.
        reuse = only_caller_reads(first_projection, a)
        if b is None:
            a, b = halves(a)
        else:
            reuse = reuse and only_caller_reads(getattr(self, second), b)
        if a.dtype != b.dtype:  # an adapter on one of the two may return fp32, which their product would be as well
            dtype = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(dtype), b.to(dtype)
        a, b = (a, b) if gate_first else (b, a)
        gate = plain_gate or mlp.gate.function(self)  # clamps and scales are attributes, which may change
        return call_rebuilding(getattr(self, mlp.down), gate, a, b, reuse, above=rebuild_above)

    def forward(self, *args: Any, **named: Any) -> Any:
        if len(args) + len(named) != 1 and any(given is not None for given in (*args[1:], *named.values())):
            return type(self).forward(self, *args, **named)
        x = args[0] if args else next(iter(named.values()))
        found = None if activation is None else tensors_of_projections(self, x)
        if found is not None and activation is not None:
            with rebuilding(x, self):
                y = lora_mlp(x, *found, activation=activation)
        else:
            y = gated(self, x)
        if mlp.factor is not None:
            y = y * getattr(self, mlp.factor)
        if mlp.dropout is not None:
            y = F.dropout(y, getattr(self, mlp.dropout), self.training)
        return y

    return forward


def guards(module: nn.Module) -> Guards:
    """Make the guards of a candidate. Our forward calls only its projections."""
    projections = projections_of(module)
    assert projections is not None, "the module is a candidate"
    return guards_of(module, called=(*projections[0], projections[1]))
