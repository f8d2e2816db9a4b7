"""Find RMSNorm and LayerNorm by name and shape, and swap them where a row of `VARIANTS` computes the same.

Some RMSNorms take a gate: norm(x) * act(gate) as in Qwen3-Next, or norm(x * act(gate)) over groups as in Mamba 2.

The variants differ in where fp32 is rounded, in whether 1 is added to the weight, in what an fp32 weight does to a
bf16 input, and in whether a mean is over a row or over groups of its columns. Results in bf16 tell them apart: a
rounding in another place changes 25 to 36 % of the elements.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.memory.rebuild import REBUILD_ABOVE_BYTES, rebuildable
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.hooks import has_hooks
from liger_trainer.patching.core.pattern import PatchPattern, Proof
from liger_triton import gated_rms_norm, layer_norm, rms_norm

# (operation, offset, cast), ordered by how many families of models have them, most first
VARIANTS = (
    ("rms_norm", 0.0, "llama"),
    ("rms_norm", 1.0, "gemma"),
    ("rms_norm", 0.0, "gemma"),
    ("layer_norm", 0.0, ""),
    ("rms_norm", 1.0, "llama"),
    ("rms_norm", 0.0, "rstd"),
    ("rms_norm", 0.0, "t5"),
    ("layer_norm", 1.0, ""),
)
# The same of (gate_first, activation, cast)
GATED_VARIANTS = tuple(itertools.product((False, True), ("silu", "sigmoid"), ("llama", "gemma")))
HALF = (torch.float16, torch.bfloat16)
LITERAL_EPS = (1e-5, 1e-6)  # for norms that have a number in their code and no attribute, as in olmo
MAX_CHANGED = 0.02  # bf16 elements that another order of summation may flip; a wrong cast flips a quarter of them
NOT_OURS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d, nn.RMSNorm)


@dataclass(frozen=True)
class Norm:
    """One way to compute a norm.

    Attributes:
        operation (`str`): `"rms_norm"` or `"layer_norm"`.
        offset, cast: Arguments of `liger_triton.rms_norm`; "t5" is "llama" for a weight in 16 bit and "none" otherwise.
        weight, bias (`str` or `None`): Names of the module's parameters; None where it has no such parameter.
        autocast (`str`): What happens under autocast: `"wide"` for `F.layer_norm`, which runs in fp32 on accelerators
            with an fp32 result, `"own"` where the norm's code asks about autocast and so runs itself, else empty.
        group (`int` or `None`): How many columns are normed together; None for all.
        gate (`str` or `None`): The name of the second input of the forward, if it has one.
        activation (`str`), gate_first (`bool`): Arguments of `liger_triton.gated_rms_norm`.
    """

    operation: str
    offset: float
    cast: str
    weight: str | None
    bias: str | None
    eps: float
    autocast: str = ""
    group: int | None = None
    gate: str | None = None
    activation: str = ""
    gate_first: bool = False

    def __str__(self) -> str:
        parts = [f"cast={self.cast}"] if self.cast else []
        if self.gate is not None:
            gate = f"{self.activation}({self.gate})"
            parts.append(f"{gate} before the norm" if self.gate_first else f"times {gate}")
        parts += [f"offset={self.offset:g}"] if self.offset else []
        parts += [] if self.weight else ["no weight"]
        parts += ["bias"] if self.bias else []
        parts += [f"groups of {self.group}"] if self.group else []
        return ", ".join(parts) or "weight only"


def is_candidate(module: nn.Module) -> bool:
    """Return whether `module` has "norm" in its class's name, no children, at most a 1D weight and a 1D bias.

    Norms of images with their channels first are not candidates: the kernels norm the last dimension.
    """
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, NOT_OURS)
        and set(module._modules) <= {"parametrizations"}
        and not any(b is not None for b in module._buffers.values())
        and not any(type(value) is str and value == "channels_first" for value in module.__dict__.values())
        and all(len(probe.full_shape(p)) == 1 for p in module._parameters.values() if p is not None)
        and len({probe.full_shape(p) for p in module._parameters.values() if p is not None}) <= 1
        and sum(p is not None for p in module._parameters.values()) <= 2
    )


def guessed_operation(module: nn.Module) -> str:
    """Return the operation under which a norm is reported that could not be proven."""
    return "layer_norm" if isinstance(module, nn.LayerNorm) else "rms_norm"


def pattern(rebuild_above: int) -> PatchPattern:
    """Make the pattern of norms. An output of more than `rebuild_above` bytes is computed again in the backward."""
    return PatchPattern(is_candidate, functools.partial(prove, rebuild_above=rebuild_above), guessed_operation)


def prove(module: nn.Module, rebuild_above: int = REBUILD_ABOVE_BYTES) -> tuple[Proof | None, str | None]:
    """Return (what this norm computes, None), or (None, why it cannot be swapped)."""
    inputs = probe.inputs_of(type(module).forward)
    taken = "an open list of inputs" if inputs is None else f"{len(inputs)} inputs ({', '.join(inputs)})"
    if inputs is None or len(inputs) not in (1, 2):
        return None, f"its forward takes {taken}, a plain norm takes one"
    names = [name for name, p in module._parameters.items() if p is not None]
    weight = next((n for n in names if "bias" not in n), None)
    bias = next((n for n in names if "bias" in n), None)
    if len(names) > (weight is not None) + (bias is not None):
        return None, f"its parameters are {names}; expected a weight, or a weight and a bias"
    gated = len(inputs) == 2
    if gated and (bias or weight is None or autocast_of(module, "rms_norm")):
        return None, f"its forward takes {taken}, and it has more or less than a weight"
    norms = _gated(module, weight, inputs[1]) if gated else _plain(module, weight, bias)
    cases = Cases(module, gated)
    for norm in norms:
        forward = build(norm, rebuild_above)
        if cases.agree(forward):
            return Proof(norm.operation, norm, forward), None
    if gated:
        return None, f"its forward takes {taken}, and it is not an RMSNorm times silu or sigmoid of the second"
    return None, "it computes none of the known norms (RMSNorm with llama or gemma cast, LayerNorm)"


def _plain(module: nn.Module, weight: str | None, bias: str | None) -> Iterator[Norm]:
    """Return the norms without a gate that `module` may compute."""
    for operation, offset, cast in VARIANTS:
        if (bias and operation == "rms_norm") or (weight is None and (offset or cast == "t5")):
            continue
        groups = groups_of(module) if operation == "rms_norm" and weight and cast in ("llama", "gemma") else []
        autocast = autocast_of(module, operation)
        for group, eps in itertools.product((*groups, None), eps_of(module)):
            yield Norm(operation, offset, cast, weight, bias, eps, autocast, group)


def _gated(module: nn.Module, weight: str | None, gate: str) -> Iterator[Norm]:
    """Return the norms with a gate that `module` may compute."""
    found = itertools.product(GATED_VARIANTS, (*groups_of(module), None), eps_of(module))
    for (gate_first, activation, cast), group, eps in found:
        yield Norm("rms_norm", 0.0, cast, weight, None, eps, "", group, gate, activation, gate_first)


def eps_of(module: nn.Module) -> list[float]:
    """List what the eps of a norm may be: numbers of the module, then numbers that stand in code."""
    own = [v for v in module.__dict__.values() if isinstance(v, float) and 0 < v < 0.1]
    return list(dict.fromkeys((*own, *LITERAL_EPS)))


def groups_of(module: nn.Module) -> list[int]:
    """List how many columns of the weight may be normed together, by the attributes of the module."""
    width = max((probe.full_shape(p)[0] for p in module._parameters.values() if p is not None), default=0)
    return [
        value
        for name, value in module.__dict__.items()
        if "group" in name and type(value) is int and value > 0 and width % value == 0
    ]


def autocast_of(module: nn.Module, operation: str) -> str:
    """Return the `autocast` of a `Norm`.

    Code that calls the forward of `nn.LayerNorm`, through `super()`, is wide too.
    """
    code = type(module).forward.__code__
    if any("autocast" in name for name in code.co_names):
        return "own"
    layer_norm = type(module).forward is nn.LayerNorm.forward or (
        isinstance(module, nn.LayerNorm) and "__class__" in code.co_freevars
    )
    return "wide" if operation == "layer_norm" and layer_norm else ""


@functools.cache
def build(norm: Norm, rebuild_above: int = REBUILD_ABOVE_BYTES) -> Callable:
    """Return the `forward` to bind to a norm.

    An output of more than `rebuild_above` bytes is computed again backward.
    """
    return _forward(norm, rebuild_above) if norm.gate is None else _gated_forward(norm, rebuild_above)


def _gated_forward(norm: Norm, rebuild_above: int) -> Callable:
    weight, second = str(norm.weight), str(norm.gate)

    def make(x: torch.Tensor, z: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(
            x,
            z,
            w,
            norm.eps,
            activation=norm.activation,
            gate_first=norm.gate_first,
            group_size=norm.group,
            cast=norm.cast,
        )

    def forward(self, *args: Any, **named: Any) -> Any:
        gate = args[1] if len(args) == 2 else named.get(second) if len(args) == 1 else None
        if gate is None or len(args) + len(named) != 2 or gate.shape != args[0].shape:
            return type(self).forward(self, *args, **named)  # nothing was proven of calls without a gate
        parents = args[0], gate, getattr(self, weight)
        y = make(*parents)
        return y if has_hooks(self) else rebuildable(y, make, *parents, above=rebuild_above)

    return forward


def _forward(norm: Norm, rebuild_above: int) -> Callable:
    """Make the forward of a norm without a gate. What is the same in each of its calls is decided here."""
    make = _kernel_of(norm)
    takes_bias = norm.operation == "layer_norm"
    weight_name, bias_name = norm.weight, norm.bias
    t5 = norm.cast == "t5"
    unusual = norm.autocast == "own" or t5
    wide = norm.autocast == "wide"

    def runs_itself(self, x: torch.Tensor) -> bool:
        """Return whether the norm's own code is to run, because nothing was proven for such a call."""
        if norm.autocast == "own" and torch.is_autocast_enabled(x.device.type):
            return True
        dtype = getattr(self, weight_name).dtype if t5 and weight_name else None
        return dtype in HALF and x.dtype != dtype

    def forward(self, *args: torch.Tensor, **named: Any) -> Any:
        if named or len(args) != 1 or (unusual and runs_itself(self, args[0])):
            return type(self).forward(self, *args, **named)
        x = args[0]
        if wide and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
            x = x.float()
        weight = None if weight_name is None else getattr(self, weight_name)
        tensors: tuple[torch.Tensor | None, ...] = (x, weight)
        if takes_bias:
            tensors = (x, weight, None if bias_name is None else getattr(self, bias_name))
        y = make(*tensors)
        # Most results of small steps are small, so that is asked first. Traced code would have a guard for each size.
        if torch.compiler.is_compiling() or y.nbytes <= rebuild_above:
            return y
        if has_hooks(self):  # a hook may change y, even without autograd seeing it, through `y.data`
            return y
        return rebuildable(y, make, *tensors, above=rebuild_above)

    return forward


def _kernel_of(norm: Norm) -> Callable[..., torch.Tensor]:
    """Return the function of x and weight, for a LayerNorm also of bias, that computes a norm without a gate."""
    eps, offset, cast = norm.eps, norm.offset, norm.cast
    if norm.operation == "layer_norm":
        return functools.partial(layer_norm, eps=eps, offset=offset)
    if norm.group is not None:
        return lambda x, w: gated_rms_norm(x, None, w, eps, group_size=norm.group, offset=offset, cast=cast)
    if cast == "t5":

        def t5_norm(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
            rounding = "llama" if w is None or w.dtype in HALF else "none"
            return rms_norm(x, w, eps, offset=offset, cast=rounding)

        return t5_norm
    return functools.partial(rms_norm, eps=eps, offset=offset, cast=cast)


class Cases:
    """A norm's own results on random rows, computed once to be compared with each candidate's.

    A `gated` one has a second input of the same shape.
    """

    def __init__(self, module: nn.Module, gated: bool = False):
        source = probe.generator()
        wide = probe.clone(module, source)
        narrow = nn.Module.to(probe.clone(module, source), torch.bfloat16)  # its class may have a `to` of its own
        shapes = [probe.full_shape(p)[0] for p in module._parameters.values() if p is not None]
        normalized = getattr(module, "normalized_shape", None)
        n = shapes[0] if shapes else normalized[-1] if isinstance(normalized, tuple) and normalized else 64
        rows = max(8, 8192 // n) & ~1
        scale = torch.tensor([1.0, 30.0, 1e-3, 3e-3], dtype=torch.float32).repeat(rows // 4 + 1)[
            :rows, None
        ]  # in small rows eps shows
        x = probe.randn((rows, n), source) * scale
        self.dy = probe.randn((1, rows, n), source)
        x = [x, *([2 * probe.randn((rows, n), source)] if gated else [])]
        bf16 = [t.bfloat16()[None, None] for t in x]
        fp32 = [t[None] for t in x]
        self.cases = [(wide, fp32, True), (wide, fp32, False), (narrow, bf16, True)]
        forward = type(module).forward
        self.wanted = [self._run(forward, *case) for case in self.cases]
        mixed = (wide, bf16, True)  # an fp32 weight and bf16 rows, which some norms do not take
        try:
            self.wanted.append(self._run(forward, *mixed))
            self.cases.append(mixed)
        except RuntimeError:
            return

    def _run(self, forward: Callable, module: nn.Module, x: list[torch.Tensor], training: bool) -> list[torch.Tensor]:
        """Return the result of `forward`, and for fp32 rows also the gradients of its inputs and of the parameters."""
        probe.set_training(module, training)
        x = [t.clone().requires_grad_(t.dtype == torch.float32) for t in x]
        y = forward(module, *x)
        if x[0].dtype != torch.float32:
            return [y.detach()]
        leaves = [*x, *(p for p in module._parameters.values() if p is not None)]
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy, materialize_grads=True)]

    def agree(self, forward: Callable) -> bool:
        """Return whether `forward` gives the norm's own results in all cases."""
        for case, want in zip(self.cases, self.wanted, strict=True):
            got = self._run(forward, *case)
            if len(want) == 1:  # 16-bit rows: every rounding has to be in its place
                if probe.changed_share(got[0], want[0]) > MAX_CHANGED or not probe.allclose_to_max(
                    got[0], want[0], 0.02, True
                ):
                    return False
            elif not all(
                probe.allclose_to_max(g, w, probe.FP32_RTOL, by_row=g.ndim > 1) for g, w in zip(got, want, strict=True)
            ):
                return False
        return True
