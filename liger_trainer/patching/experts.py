"""Blocks of routed experts of transformers (`use_experts_implementation`), and PEFT's LoRA on their parameters.

A block is a module with `gate_up_proj` and `down_proj` of three dimensions, called with hidden states, ids of experts
and routing weights. It is proven whole, in the implementation that is set ("eager", "grouped_mm" or "batched_mm"), on a
copy with few small experts, and runs as `liger_triton.experts`. The router stays the model's own.

PEFT adapts such a parameter by `ParamWrapper`, one around the other, which builds W + B A of all experts in each
forward. Our forward of the outermost one computes the adapters inside the products. PEFT's own state says in every call
which adapters are active. Where it is anything but plain LoRAs on one or both parameters, PEFT's code runs.
"""

import functools
import inspect
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations import moe

from liger_trainer._logging import logger
from liger_trainer.lora.peft_state import active_adapters, is_linear
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding, is_bound, own_class
from liger_trainer.patching.core.contracts import PackedExperts
from liger_trainer.patching.core.guards import KNOWN, Guards, NotProven, code_guards_of, guards_of, lookups_of
from liger_trainer.patching.core.hooks import comes_from, has_hooks, replaced_forward
from liger_trainer.patching.core.pattern import PLAIN_TENSORS, PatchPattern, Proof, names_of, slot_of
from liger_trainer.patching.gates import SCALES, Gate, candidates, limits_of, with_limits
from liger_triton import ExpertLoRA, experts
from liger_triton.experts import most_rank

_IMPLEMENTATIONS = {  # by their names in the config, and what transformers has registered for them
    "eager": None,
    "grouped_mm": moe.grouped_mm_experts_forward,
    "batched_mm": moe.batched_mm_experts_forward,
}
_FLAGS = (
    "num_experts",
    "has_gate",
    "has_bias",
    "is_transposed",
    "is_concatenated",
    "has_post_expert_norm",
    "_is_expert_parallel",
    "_apply_gate",
)
_WEIGHTS = ("gate_up_proj", "down_proj")
_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
_METHODS = ("_activate_lora", "get_delta_factors", "get_delta_weight")  # of it
# of the small copy
_EXPERTS = 4
_WIDTH = 16
_INNER = 8
_TOKENS = 7
_RANK = 2


@dataclass(frozen=True)
class Experts:
    """The formula that a block of experts was proven to compute.

    Attributes:
        gate (`Gate`): The function of gate and up.
        interleaved (`bool`): Whether gate and up are the even and odd outputs of the first product. Else they are its
            halves.
        implementation (`str`): Whose numbers these are: `config._experts_implementation`.
        adapters (`tuple`): The names of adapters on its parameters.
    """

    gate: Gate
    interleaved: bool
    implementation: str
    adapters: tuple[str, ...] = ()

    def __str__(self) -> str:
        adapters = f" + {', '.join(self.adapters)}" if self.adapters else ""
        return f"{self.gate}{', interleaved' if self.interleaved else ''}, {self.implementation}{adapters}"

    def compute(
        self,
        block: nn.Module,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        loras: dict[str, ExpertLoRA],
    ) -> torch.Tensor:
        """Return the result of `block`, with the LoRAs on its parameters of these names."""
        tensors = [*_weights_of(block), *(block._parameters[name] for name in _biases_of(block))]
        dtype = tensors[0].dtype
        is_cast = torch.is_autocast_enabled(x.device.type) and dtype != torch.float64  # which autocast leaves
        if self.implementation == "eager" and is_cast:
            dtype = torch.get_autocast_dtype(x.device.type)
            tensors = [t if t is None else t.to(dtype) for t in tensors]
        return experts(
            x,
            ids,
            weights,
            *tensors,
            activation=self.gate.activation,
            up_offset=self.gate.up_offset,
            interleaved=self.interleaved,
            transposed=block.is_transposed and not _is_packed(block),
            gate_up_lora=loras.get("gate_up_proj"),
            down_lora=loras.get("down_proj"),
            **self.gate.numbers(block),
        )


def _is_packed(block: nn.Module) -> bool:
    """Return whether its weights are in few bits: `packed` gives them, and no parameters have their names."""
    return issubclass(own_class(block), PackedExperts)


def _weights_of(block: nn.Module) -> list[Any]:
    return [block.packed(name) if _is_packed(block) else block._parameters[name] for name in _WEIGHTS]


def _biases_of(block: nn.Module) -> list[str]:
    return [f"{name}_bias" for name in _WEIGHTS] if block.has_bias else []


def is_candidate(module: nn.Module) -> bool:
    """Return whether `module` is a block of experts of transformers with a gate."""
    cls = own_class(module)
    has_gate = callable(getattr(cls, "_apply_gate", None)) and getattr(module, "has_gate", True)
    return has_gate and callable(getattr(cls.forward, "__wrapped__", None))


def prove(module: nn.Module) -> tuple[Proof | None, str | None]:
    """Return (what this block computes, None), or (None, why it cannot be swapped)."""
    weight = module._parameters.get("gate_up_proj")
    if not _is_packed(module) and (weight is None or len(probe.full_shape(weight)) != 3):
        return None, "it has no gate_up_proj of three dimensions"
    implementation = _implementation(module)
    if not _is_transformers_own(implementation):
        return None, f"its experts_implementation is {implementation!r}, expected one of {', '.join(_IMPLEMENTATIONS)}"
    if getattr(module, "has_post_expert_norm", False):
        return None, "it has a norm behind each expert"
    gates = itertools.product((False, True), candidates(module))
    likely = [Experts(gate, interleaved, implementation) for interleaved, gate in gates]
    tolerances = ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.03))
    cases = list(itertools.product((True, False), SCALES, tolerances, (False,)))
    if limits_of(module):
        cases += itertools.product((True,), (1.0,), tolerances, (True,))
    for training, scale, (dtype, rtol), at_limits in cases:
        found = []
        for forward in (own_class(module).forward, *(functools.partial(one.compute, loras={}) for one in likely)):
            source = probe.generator()
            copy = small_copy(module, source, dtype)
            probe.set_training(copy, training)
            if at_limits:
                _pass_inputs_on(copy)
            found.append(_trained(forward, copy, source, dtype, scale, at_limits))
        want, *got = found
        alike = []
        for one, its in zip(likely, got, strict=True):
            if all(probe.allclose_to_max(g, w, rtol) for g, w in zip(its, want, strict=True)):
                alike.append(one)
        likely = alike
    if not likely:
        return None, (
            "it is not the weighted sum of down(act(gate) * up) of its experts with silu or gelu, plain or clamped, "
            "gate and up in two halves or in even and odd columns"
        )
    return Proof("experts", likely[0], build(likely[0])), None


def _trained(
    forward: Any,
    module: nn.Module,
    source: torch.Generator,
    dtype: torch.dtype,
    scale: float,
    at_limits: bool = False,
) -> list[torch.Tensor]:
    """Return the result of `forward` for random tokens, and the gradients of all that learns.

    One expert gets no token.
    """
    x = scale * probe.randn((_TOKENS, _WIDTH), source, dtype)
    if at_limits:
        x = with_limits(x, module, source)
    x.requires_grad_()
    ids = torch.stack([torch.randperm(_EXPERTS - 1, generator=source, device="cpu")[:2] for _ in range(_TOKENS)])
    weights = torch.rand((_TOKENS, 2), generator=source, dtype=torch.float32, device="cpu").to(dtype).requires_grad_()
    learned = [p for _, p in sorted(module.named_parameters()) if p.requires_grad]
    y = forward(module, x, ids, weights)
    dy = probe.randn((_TOKENS, _WIDTH), source, dtype)
    return [y, *torch.autograd.grad(y, [x, weights, *learned], dy, materialize_grads=True)]


def _pass_inputs_on(block: nn.Module) -> None:
    """Make the first product of a small copy return its input, so that limits come to the gate unchanged."""
    weight = block._parameters["gate_up_proj"]
    assert weight is not None, "a small copy has its weights"
    with torch.no_grad():
        weight.copy_(torch.eye(*weight.shape[1:], dtype=weight.dtype, device="cpu"))
        if block.has_bias:
            block._parameters["gate_up_proj_bias"].zero_()  # type: ignore[union-attr] # a small copy has it


def small_copy(module: nn.Module, source: torch.Generator, dtype: torch.dtype) -> nn.Module:
    """Make a block with the attributes of `module` and a few small 16-bit experts with random weights."""
    block = probe.clone(module, source, parameters=False)
    block.__class__ = module.unpacked_class if isinstance(module, PackedExperts) else type(block)
    for name, value in vars(module).items():
        for word, size in (("num_experts", _EXPERTS), ("hidden", _WIDTH), ("intermediate", _INNER)):
            if word in name and type(value) is int:
                block.__dict__[name] = size
    shapes: list[tuple[int, ...]] = [(2 * _INNER, _WIDTH), (_WIDTH, _INNER)]
    shapes = [shape[::-1] if module.is_transposed else shape for shape in shapes] + [(2 * _INNER,), (_WIDTH,)]
    for name, shape in zip([*_WEIGHTS, *_biases_of(block)], shapes, strict=False):
        scale = 1.0 if len(shape) == 1 else shape[0 if module.is_transposed else 1] ** -0.5
        block._parameters[name] = nn.Parameter(scale * probe.randn((_EXPERTS, *shape), source, dtype))
    return block


def _implementation(block: nn.Module) -> str:
    return getattr(getattr(block, "config", None), "_experts_implementation", None) or "eager"


def _is_transformers_own(implementation: str) -> bool:
    """Return whether it is one of the known implementations, and nothing else was registered by its name."""
    known = implementation in _IMPLEMENTATIONS
    return known and moe.ALL_EXPERTS_FUNCTIONS.get(implementation) is _IMPLEMENTATIONS[implementation]


def _why_another(block: nn.Module, proven: Experts) -> str | None:
    """Tell why a call of `block` computes by another implementation than was proven, or return None."""
    implementation = _implementation(block)
    if implementation != proven.implementation:
        return f"its experts_implementation is {implementation!r} now; it was {proven.implementation!r}"
    if not _is_transformers_own(implementation):
        return f"another function is registered as experts_implementation {implementation!r} now"
    return None


def _report_now(module: nn.Module, why: str | None) -> None:
    """Keep the report true of `module`, a block or a wrapper that runs its own code because of `why`.

    It is about calls that train: `generate` sets another implementation for itself, and the one that was set after it.
    """
    binding = Binding.of(module)
    if binding is None or binding.report_entry is None or torch.compiler.is_compiling():
        return
    is_told = binding.report_entry.variant is not None
    if is_told == (why is not None) or not (module.training and torch.is_grad_enabled()):
        return
    if why is None:
        binding.report_entry.mark_swapped()
    else:
        binding.report_fallback(why, "runs its own code instead of a fused kernel")


def _runs(block: nn.Module, proven: Experts, x: torch.Tensor) -> bool:
    """Return whether a call of `block` with `x` computes what was proven on plain weights.

    These have one dtype. On a GPU fp32 weights keep their own code, because its products of whole experts are faster.
    """
    named = [*_biases_of(block), *([] if _is_packed(block) else _WEIGHTS)]
    if any([block._parameters.get(name) is None for name in named]):
        return False
    tensors = [*block._parameters.values(), x]
    if any([type(t) not in PLAIN_TENSORS or t.device != x.device for t in tensors if t is not None]):
        return False
    biases = [block._parameters[name] for name in _biases_of(block)]
    dtypes = {t.dtype for t in (*_weights_of(block), *biases)}
    if len(dtypes) != 1:
        return False
    (computed,) = dtypes
    if proven.implementation == "eager" and torch.is_autocast_enabled(x.device.type) and computed != torch.float64:
        computed = torch.get_autocast_dtype(x.device.type)
    return x.ndim == 2 and not (x.is_cuda and computed == torch.float32)


def build(proven: Experts) -> Any:
    """Return the forward to bind to a block of experts."""

    def forward(self, hidden_states: torch.Tensor, *routed: Any, **named: Any) -> Any:
        ids, weights = _routed(self, routed, named)
        why = _why_another(self, proven)
        _report_now(self, why)
        if why is not None or ids is None or not _runs(self, proven, hidden_states):
            return type(self).forward(self, hidden_states, *routed, **named)
        return proven.compute(self, hidden_states, ids, weights, loras={})

    return forward


def _routed(block: nn.Module, args: tuple, named: dict[str, Any]) -> tuple[torch.Tensor | None, Any]:
    """Return (ids, weights) of a call, which the classes of transformers name differently.

    (None, None) of another call.
    """
    given = [*args, *named.values()]
    if len(given) != 2 or not all(isinstance(t, torch.Tensor) for t in given):
        return None, None
    if named and list(named) != _names_of_inputs(own_class(block))[1 + len(args) :]:
        return None, None
    ids, weights = given
    return (None, None) if ids.is_floating_point() or not weights.is_floating_point() else (ids, weights)


def _names_of_inputs(cls: type) -> list[str]:
    return probe.inputs_of(cls.forward) or []  # type: ignore[attr-defined]  # a module has one


def guards(module: nn.Module) -> Guards:
    """Return the guards of the gate, of the forward, and of what transformers' decorator has noted on the instance.

    They include what the current implementation reads, such as functions of transformers that multiply.
    """
    cls, of_gate = own_class(module), guards_of(module, method="_apply_gate")
    _check_home(cls)
    flags = [(None, name, module.__dict__.get(name, ...)) for name in _FLAGS]
    read = lookups_of(_IMPLEMENTATIONS[_implementation(module)] or inspect.unwrap(cls.forward))
    found = Guards(cls, [*of_gate.lookups, (cls, "forward", cls.forward), *flags, *read])
    found.missing, found.children = of_gate.missing, of_gate.children
    return found


def _check_home(cls: type) -> None:
    """Raise `NotProven` for a forward or a wrapper of the user's, because its code would not run."""
    if not comes_from(cls.forward, KNOWN):  # type: ignore[attr-defined]  # a module has one
        raise NotProven(f"the forward of {cls.__name__} is not code of transformers, PyTorch or PEFT")


def _why_not(module: nn.Module) -> str | None:
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over several devices"
    return slot_of(module, "_apply_gate")[1]


class BlockBinding(Binding):
    """The binding of a block. While PEFT's code has parametrized the block, for one call, its own code runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.module.to()
        if block is None or not is_parametrized(block):
            return super().__call__(*args, **kwargs)
        own = self.previous
        return type(block).forward(block, *args, **kwargs) if own is None else own(*args, **kwargs)


PATTERN = PatchPattern(
    is_candidate, prove, lambda module: "experts", why_not=_why_not, guards=guards, binding=BlockBinding
)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether `module` is PEFT's LoRA on a parameter of a block of experts."""
    return names_of(own_class(module)) == _WRAPPER and is_candidate(_chain(module)[-1])


def _chain(wrapper: nn.Module) -> list[nn.Module]:
    """Return a wrapper, those inside it, and the block of experts."""
    chain = [wrapper]
    while names_of(own_class(chain[-1])) == _WRAPPER:
        chain.append(chain[-1]._modules["base_layer"])
    return chain


def prove_wrapper(wrapper: nn.Module) -> tuple[Proof | None, str | None]:
    """Return (what this wrapper computes, None), or (None, why it cannot be swapped).

    Small wrappers of its class are put around a small block, by PEFT's own code, which decides the layout of ranks.
    """
    *wrappers, block = _chain(wrapper)
    found, reason = prove(block)
    if found is None:
        return None, reason
    names = [one.parameter_name for one in wrappers]
    if len(set(names)) != len(names) or not {*names} <= {*_WEIGHTS}:
        return None, f"its adapters are on {', '.join(names)}; expected gate_up_proj and down_proj, each once"
    import peft

    config = peft.LoraConfig(r=_RANK, lora_alpha=3, init_lora_weights=False)
    proven = replace(found.variant, adapters=tuple(wrapper._modules["lora_A"]._modules))
    for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.03)):
        results = []
        for forward in (functools.partial(_with_adapters, proven), own_class(wrapper).forward):
            source = probe.generator()
            small = small_copy(block, source, dtype)
            for name in reversed(names):
                small = own_class(wrapper)(small, "default", name, r=_RANK, lora_alpha=3, config=config)
            for p in small.parameters():
                p.data = probe.randn(p.shape, source, dtype) * p.shape[-1] ** -0.5
            results.append(_trained(forward, small, source, dtype, 1.0))
        if not all(probe.allclose_to_max(got, want, rtol) for got, want in zip(*results, strict=True)):
            return None, "it is not the weighted sum of experts with W + s B A"
    return Proof("lora", proven, build_wrapper(proven)), None


def _with_adapters(
    proven: Experts, wrapper: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the result of a wrapper with plain adapters."""
    *wrappers, block = _chain(wrapper)
    loras = _loras_now(wrapper, wrappers, block)
    assert loras is not None, "the adapters are plain"
    return proven.compute(block, x, ids, weights, loras=loras)


def build_wrapper(proven: Experts) -> Any:
    """Return the forward to bind to the outermost wrapper."""

    def forward(self, x: torch.Tensor, *routed: Any, **named: Any) -> Any:
        *wrappers, block = _chain(self)
        ids, weights = _routed(block, routed, named)
        if is_parametrized(block):  # by PEFT's code in the wrapper around this one, for this call
            return type(self).forward(self, x, *routed, **named)
        loras, why = None, _why_another(block, proven) or _why_block_is_not_ours(block)
        plain = why is None and ids is not None and not torch.compiler.is_compiling()
        if plain and _runs(block, proven, x):
            loras = _loras_now(self, wrappers, block)
        for wrapper in wrappers:
            _report_now(wrapper, why)
        if loras is None:
            return type(self).forward(self, x, *routed, **named)
        return proven.compute(block, x, ids, weights, loras=loras)

    return forward


def _why_block_is_not_ours(block: nn.Module) -> str | None:
    """Tell why a call of `block` would not run ours now, or why a hook would miss it; None where ours may run."""
    binding = Binding.of(block)
    if binding is None or not is_bound(block, binding):
        return "its block of experts is not swapped"
    if has_hooks(block):
        return "a hook on its block of experts would not be called"
    if binding.fallback_active:
        return "its block of experts keeps its own code"
    reason = None if binding.guards is None else binding.guards.broken(block)
    if reason is not None:
        binding.fall_back(reason)  # as a call of the block itself would
    return reason


def _loras_now(outer: nn.Module, wrappers: list[nn.Module], block: nn.Module) -> dict[str, ExpertLoRA] | None:
    """Return the LoRA on each parameter as it is now; None where it is anything but plain LoRAs without hooks."""
    loras = {}
    for wrapper in wrappers:
        state, parts = wrapper.__dict__, active_adapters(wrapper)
        if parts is None or not state.keys().isdisjoint(_METHODS):
            return None
        if wrapper is not outer and (has_hooks(wrapper) or replaced_forward(wrapper, state.get("forward"))):
            return None
        for part in parts:
            for layer in (part.a, part.b):
                if not is_linear(layer) or layer.bias is not None or has_hooks(layer):
                    return None
        pairs = [_factors(part.a.weight, part.b.weight, block.num_experts) for part in parts]
        rank = sum(a.shape[1] for a, _ in pairs)
        if not _fits(rank, pairs[0][0].device):
            return None
        if len(pairs) == 1:
            loras[state["parameter_name"]] = ExpertLoRA(*pairs[0], parts[0].scaling)
        else:
            a = torch.cat([a for a, _ in pairs], 1)
            b = torch.cat([part.scaling * b for (_, b), part in zip(pairs, parts, strict=True)], 2)
            loras[state["parameter_name"]] = ExpertLoRA(a, b, 1.0)
    return loras


def _fits(rank: int, device: torch.device) -> bool:
    """Return whether our kernels add LoRA of this rank on `device`. If not, warn once."""
    if device.type != "cuda" or rank <= most_rank(device):
        return True
    logger.warning_once(
        f"LoRA of rank {rank} on experts runs in PEFT's code, because this GPU has shared memory for rank "
        f"{most_rank(device)}. Lower `r` to that for the fused kernels."
    )
    return False


def _factors(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A (E, r, in) and B (E, out, r) of PEFT's matrices (E r, in) and (out, r E).

    In the latter experts are fastest.
    """
    return a.view(num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, num_experts).permute(2, 0, 1)


def wrapper_guards(wrapper: nn.Module) -> Guards:
    """Return the guards of PEFT's forward and of the methods that make W + B A for it."""
    cls = own_class(wrapper)
    _check_home(cls)
    methods = [(cls, name, getattr(cls, name, ...)) for name in _METHODS]
    return Guards(cls, [*code_guards_of(cls, nn.Linear).lookups, *methods])


WRAPPER_PATTERN = PatchPattern(is_wrapper, prove_wrapper, lambda module: "lora", guards=wrapper_guards)
