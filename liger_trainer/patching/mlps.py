"""Gated MLPs `down(act(gate(x)) * up(x))`, nominated by the widths of their projections.

For the proof the projections are replaced by recorders that hand out random tensors, so no weight matters: shown is
that x goes to the projections unchanged, and act(gate) * up, unchanged, to the last one, whose output is the result.
Dropout, clamps, scales or norms in between make a difference and keep the module's own code. The projections are still
called as modules, in the same order: adapters in and around them keep working.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from liger_trainer.instance.binding import is_aside
from liger_trainer.instance.hooks import seen_by_others, step_aside
from liger_trainer.patching import probe
from liger_trainer.patching.gates import GATES, SCALES, children_but, guessed_operation
from liger_trainer.patching.kind import Kind
from liger_trainer.patching.rebuild import ABOVE, call_rebuilding, nobody_else_reads, rebuilding
from liger_triton.halves import halves

TOKENS = (2, 3)


@dataclass(frozen=True)
class MLP:
    """One gated MLP. `inner`: the projections before the gate, in the order of their calls, one if they are fused.

    `gate_first`: the gate is the first of the two, or the first half of the fused one. `left_out`: name and class of
    the other children, such as the activation, which our forward does not call.
    """

    operation: str
    approximate: str
    inner: tuple[str, ...]
    down: str
    gate_first: bool
    left_out: tuple[tuple[str, type, Callable], ...]

    def __str__(self):
        act = "silu" if self.operation == "swiglu" else f"gelu, approximate={self.approximate!r}"
        names = [*self.inner, self.down]
        if len(self.inner) == 1:
            return f"{act}, fused {'[gate|up]' if self.gate_first else '[up|gate]'}: {', '.join(names)}"
        return f"{act}: {', '.join(names if self.gate_first else [names[1], names[0], names[2]])}"


def _widths(module) -> tuple[int, int] | None:
    if module is None:
        return None
    for names in (("in_features", "out_features"), ("nx", "nf")):
        widths = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(w, int) for w in widths):
            return widths
    return None


def _has_parameters(module) -> bool:
    return module is not None and any(True for _ in module.parameters())


def roles(module: nn.Module) -> tuple[list[str], str] | None:
    """(projections before the gate, projection after it) if the widths are those of a gated MLP, else None."""
    if any(p is not None for p in module._parameters.values()):
        return None
    linear = {name: _widths(child) for name, child in module._modules.items() if _widths(child)}
    weighted = [n for n, c in module._modules.items() if c is not None and n not in linear and _has_parameters(c)]
    if len(linear) == 3:
        for down, (wide, narrow) in linear.items():
            inner = [name for name in linear if name != down]
            looks_gated = all(linear[name] == (narrow, wide) for name in inner)
            if looks_gated and (wide != narrow or down == list(linear)[-1]):
                return inner, down
    if len(linear) == 2 and not weighted:
        (first, (h, double)), (down, (wide, out)) = linear.items()
        if double == 2 * wide and h == out:
            return [first], down
    return None


def nominated(module: nn.Module) -> bool:
    return roles(module) is not None and probe.inputs_of(type(module).forward) is not None


class _Recorder(nn.Module):
    """Stands for a projection: keeps its input and returns `value`, or the input itself where there is none."""

    def __init__(self, name, width_in, width_out, value, calls):
        super().__init__()
        self.in_features, self.out_features = width_in, width_out
        self.name, self.value, self.calls = name, value, calls

    def forward(self, x):
        self.calls.append((self.name, x))
        return x if self.value is None else self.value.reshape(*x.shape[:-1], -1)


def prove(module: nn.Module) -> tuple[MLP | None, str | None]:
    """(what this MLP computes, None), or (None, why it is not one of ours)."""
    inner, down = roles(module)
    inputs = probe.inputs_of(type(module).forward)
    if len(inputs) != 1:
        return None, f"its forward takes {len(inputs)} inputs ({', '.join(inputs)}), a plain MLP takes one"
    extra = [n for n, c in module._modules.items() if n not in (*inner, down) and _has_parameters(c)]
    if extra:
        return None, f"it has more than its projections: {', '.join(extra)}"
    calls, _ = _calls(module, inner, down, type(module).forward, *_values(module, inner, 1.0), True)
    order = [name for name, _ in calls]
    if sorted(order) != sorted((*inner, down)) or order[-1] != down:
        return None, f"it calls its projections in the order {', '.join(order)}; expected each once, {down} last"
    for operation, approximate in GATES:
        for gate_first in (True, False):
            left_out = children_but(module, order)
            mlp = MLP(operation, approximate, tuple(order[:-1]), down, gate_first, left_out)
            if _agrees(module, mlp):
                return mlp, None
    return None, "it is not down(act(gate) * up) with silu or gelu: a clamp, a scale, dropout or another activation"


def _values(module, inner, scale):
    """x and what the projections before the gate return, the same for equal shapes and scale."""
    source = probe.generator()
    widths = [_widths(module._modules[name]) for name in inner]
    x = probe.randn((*TOKENS, widths[0][0]), source)
    return x, [probe.randn((*TOKENS, out), source) * scale for _, out in widths]


def _calls(module, inner, down, forward, x, values, training):
    """(calls of the projections, result) of `forward` on a clone whose projections are recorders."""
    calls = []
    children = {}
    for name, value in (*zip(inner, values, strict=True), (down, None)):
        children[name] = _Recorder(name, *_widths(module._modules[name]), value, calls)
    copy = probe.clone(module, probe.generator(), children=children)
    probe.set_training(copy, training)
    return calls, forward(copy, x)


def _agrees(module, mlp) -> bool:
    ours = build(mlp)
    for training in (True, False):
        for scale in SCALES:
            x, values = _values(module, mlp.inner, scale)
            dy = probe.randn((*TOKENS, _widths(module._modules[mlp.down])[0]), probe.generator())
            for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.02)):
                results = []
                for forward in (ours, type(module).forward):
                    leaves = [v.to(dtype).requires_grad_() for v in values]
                    given = x.to(dtype)
                    calls, out = _calls(module, mlp.inner, mlp.down, forward, given, leaves, training)
                    if not all(torch.equal(seen.reshape(-1), given.reshape(-1)) for _, seen in calls[:-1]):
                        return False  # something before a projection
                    if (
                        not isinstance(out, torch.Tensor)
                        or out.shape != dy.shape
                        or [name for name, _ in calls] != [*mlp.inner, mlp.down]
                    ):
                        return False
                    grads = torch.autograd.grad(out, leaves, dy.to(dtype), allow_unused=True)
                    results.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
                if not all(probe.same(got, want, rtol) for got, want in zip(*results, strict=True)):
                    return False
    return True


@functools.cache
def build(mlp: MLP, rebuild_above: int = ABOVE):
    """The `forward` of a gated MLP; its gated product is not kept for the backward pass above so many bytes."""
    gate = GATES[mlp.operation, mlp.approximate]
    first, second, down, gate_first = mlp.inner[0], mlp.inner[-1], mlp.down, mlp.gate_first

    def projected(self, x):
        """What the projections before the gate return, in the order of their calls, and whether to write over it."""
        projections = [getattr(self, name) for name in mlp.inner]
        with rebuilding(x, self, *projections):
            outputs = [projection(x) for projection in projections]
        reuse = all(map(nobody_else_reads, projections, outputs))
        return (*halves(outputs[0]), reuse) if first == second else (*outputs, reuse)

    def forward(self, x):
        if is_aside(self):
            return type(self).forward(self, x)
        if (reason := seen_by_others(self, mlp.left_out)) is not None:
            step_aside(self, reason)
            return type(self).forward(self, x)
        a, b, reuse = projected(self, x)
        if a.dtype != b.dtype:  # an adapter on one of the two may return fp32: their product would too
            dtype = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(dtype), b.to(dtype)
        a, b = (a, b) if gate_first else (b, a)
        return call_rebuilding(getattr(self, down), gate, a, b, reuse, above=rebuild_above)

    return probe.named(forward, "forward")


KIND = Kind(nominated, prove, build, guessed_operation)
