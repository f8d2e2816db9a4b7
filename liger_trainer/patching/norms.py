"""RMSNorm and LayerNorm: nominated by name and shape, swapped where one row of `VARIANTS` computes the same.

The variants differ in what bf16 shows exactly: where fp32 is rounded (25 to 36 % of the elements change), whether 1 is
added to the weight, and what an fp32 weight does to a bf16 input.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn

from liger_trainer.instance.binding import is_aside
from liger_trainer.instance.hooks import has_hooks
from liger_trainer.patching import probe
from liger_trainer.patching.kind import Kind
from liger_trainer.patching.rebuild import ABOVE, rebuildable
from liger_triton import layer_norm, rms_norm

# (operation, offset, cast) in the order of how many model families have them
VARIANTS = (
    ("rms_norm", 0.0, "llama"),
    ("rms_norm", 1.0, "gemma"),
    ("rms_norm", 0.0, "gemma"),
    ("layer_norm", 0.0, ""),
    ("rms_norm", 1.0, "llama"),
)
LITERAL_EPS = (1e-5, 1e-6)  # of norms that keep it in their code (olmo)
MAX_CHANGED = 0.02  # bf16 elements that another order of summation may flip; a wrong cast flips a quarter of them
NOT_OURS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d, nn.RMSNorm)


@dataclass(frozen=True)
class Norm:
    """One way to compute a norm: `weight`, `bias` and `eps` are attributes of the module (`eps` may be a number)."""

    operation: str
    offset: float
    cast: str
    weight: str | None
    bias: str | None
    eps: str | float
    wide_autocast: bool  # autocast runs `F.layer_norm` in fp32 on accelerators, and returns fp32
    left_out = ()  # children that our forward does not call: a norm has none

    def __str__(self):
        parts = [f"cast={self.cast}"] if self.cast else []
        parts += [f"offset={self.offset:g}"] if self.offset else []
        parts += [] if self.weight else ["no weight"]
        parts += ["bias"] if self.bias else []
        return ", ".join(parts) or "weight only"


def nominated(module: nn.Module) -> bool:
    """A leaf whose class is called a norm, with at most a weight and a bias of one dimension."""
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, NOT_OURS)
        and not module._modules
        and not any(b is not None for b in module._buffers.values())
        and all(len(probe.full_shape(p)) == 1 for p in module._parameters.values() if p is not None)
        and len({probe.full_shape(p) for p in module._parameters.values() if p is not None}) <= 1
        and sum(p is not None for p in module._parameters.values()) <= 2
    )


def guessed_operation(module: nn.Module) -> str:
    """Under which operation a norm without proof is reported."""
    return "layer_norm" if isinstance(module, nn.LayerNorm) else "rms_norm"


def prove(module: nn.Module) -> tuple[Norm | None, str | None]:
    """(the variant that this norm is, None), or (None, why none)."""
    inputs = probe.inputs_of(type(module).forward)
    if inputs is None or len(inputs) != 1:
        what = "an open list of inputs" if inputs is None else f"{len(inputs)} inputs ({', '.join(inputs)})"
        return None, f"its forward takes {what}, a plain norm takes one"
    names = [name for name, p in module._parameters.items() if p is not None]
    weight = next((n for n in names if "bias" not in n), None)
    bias = next((n for n in names if "bias" in n), None)
    if len(names) > (weight is not None) + (bias is not None):
        return None, f"its parameters are {names}; expected a weight, or a weight and a bias"
    eps_names = [n for n, v in module.__dict__.items() if isinstance(v, float) and 0 < v < 0.1]
    cases = _Cases(module)
    for operation, offset, cast in VARIANTS:
        if (bias and operation == "rms_norm") or (offset and weight is None):
            continue
        wide = operation == "layer_norm" and type(module).forward is nn.LayerNorm.forward
        for eps in (*eps_names, *LITERAL_EPS):
            norm = Norm(operation, offset, cast, weight, bias, eps, wide)
            if cases.agree(build(norm)):
                return norm, None
    return None, "it computes none of the known norms (RMSNorm with llama or gemma cast, LayerNorm)"


@functools.cache
def build(norm: Norm, rebuild_above: int = ABOVE):
    """The `forward` of a norm, whose output is not kept for the backward pass above so many bytes."""
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    literal = isinstance(eps, float)

    def formula(self):
        """x, weight, bias -> y, with the eps that the module has now."""
        e = eps if literal else getattr(self, eps)
        if norm.operation == "rms_norm":
            return lambda x, w, b: rms_norm(x, w, e, offset=norm.offset, cast=norm.cast)
        return lambda x, w, b: layer_norm(x, w, b, e)

    def forward(self, x):
        if is_aside(self):
            return type(self).forward(self, x)
        if norm.wide_autocast and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
            x = x.float()
        make = formula(self)
        parameters = [None if name is None else getattr(self, name) for name in (weight, bias)]
        y = make(x, *parameters)
        if has_hooks(self):  # one of them may change y, through `y.data` even unseen by autograd
            return y
        return rebuildable(y, make, x, *parameters, above=rebuild_above)

    return probe.named(forward, "forward")


class _Cases:
    """A norm's own results on random rows, computed once; `agree` compares a candidate with all of them."""

    def __init__(self, module):
        source = probe.generator()
        wide = probe.clone(module, source)
        narrow = probe.clone(module, source)
        probe.set_dtype(narrow, torch.bfloat16)
        shapes = [probe.full_shape(p)[0] for p in module._parameters.values() if p is not None]
        normalized = getattr(module, "normalized_shape", None)
        n = shapes[0] if shapes else normalized[-1] if isinstance(normalized, tuple) and normalized else 64
        rows = max(8, 8192 // n)
        scale = torch.tensor([1.0, 30.0, 1e-3, 3e-3]).repeat(rows // 4 + 1)[:rows, None]  # small: where eps shows
        x = probe.randn((rows, n), source) * scale
        self.dy = probe.randn((1, rows, n), source)
        self.cases = [(wide, x[None], True), (wide, x[None], False), (narrow, x.bfloat16()[None, None], True)]
        forward = type(module).forward
        self.wanted = [self._run(forward, *case) for case in self.cases]
        mixed = (wide, x.bfloat16()[None, None], True)  # fp32 weight, bf16 rows: some norms do not take that
        try:
            self.wanted.append(self._run(forward, *mixed))
            self.cases.append(mixed)
        except RuntimeError:
            return

    def _run(self, forward, module, x, training):
        probe.set_training(module, training)
        if x.dtype != torch.float32:
            return [forward(module, x.clone()).detach()]
        x = x.clone().requires_grad_()
        y = forward(module, x)
        leaves = [x, *(p for p in module._parameters.values() if p is not None)]
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]

    def agree(self, forward) -> bool:
        for case, want in zip(self.cases, self.wanted, strict=True):
            got = self._run(forward, *case)
            if len(want) == 1:  # 16 bit: every rounding in its place
                if probe.changed_share(got[0], want[0]) > MAX_CHANGED or not probe.same(got[0], want[0], 0.02, True):
                    return False
            elif not all(probe.same(g, w, probe.FP32_RTOL, by_row=g.ndim > 1) for g, w in zip(got, want, strict=True)):
                return False
        return True


KIND = Kind(nominated, prove, build, guessed_operation)
