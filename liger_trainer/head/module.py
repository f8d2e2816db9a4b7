"""The LM head as a module: when it can be fused, where its parameters are, and the forward bound to it.

A head is fused where its output is `x @ W.T + b`, with at most one plain LoRA on top; its parameters are used only
inside calls of the modules that own them, so that the gathers of FSDP2 and ZeRO-3 and the hooks of anyone else run as
in a normal forward.
"""

import functools
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from liger_trainer.instance.binding import Binding, bind, binding_of, call_previous, unbind
from liger_trainer.instance.hooks import has_hooks, hook_on

_KEY = "_liger_capture"  # of what `bind_head` binds


class HeadCall:
    """Second argument of a head's call: `compute(hidden)` is run inside the module call and its result returned."""

    def __init__(self, compute: Callable):
        self.compute = compute


class HeadParameters:
    """What the fused kernels need of a head, read inside its module call.

    These are `weight (V, H)`, `bias (V,)`, `lora` and `lora_input`.
    """

    def __init__(self, head: nn.Module, hidden: torch.Tensor):
        head = innermost(head)
        base, adapter = _base_and_adapter(head)
        self.weight, self.bias = base.weight, base.bias
        self.lora = self.lora_input = None
        if adapter is not None:
            dtype = hidden.dtype  # PEFT keeps adapters of a 16-bit model in fp32; the products run in the hidden dtype
            self.lora = (
                head.lora_A[adapter].weight.to(dtype),
                head.lora_B[adapter].weight.to(dtype),
                head.scaling[adapter],
            )
            dropout = head.lora_dropout[adapter]
            self.lora_input = None if isinstance(dropout, nn.Identity) else dropout(hidden)

    def kwargs(self, vocab_size: int) -> dict:
        """Keyword arguments of the `liger_triton` functions for the first `vocab_size` rows of the head."""
        lora = self.lora
        if vocab_size < self.weight.shape[0]:
            lora = lora and (lora[0], lora[1][:vocab_size], lora[2])
        bias = None if self.bias is None else self.bias[:vocab_size]
        return {"weight": self.weight[:vocab_size], "bias": bias, "lora": lora, "lora_input": self.lora_input}


def innermost(head: nn.Module) -> nn.Module:
    """The module that really projects: PEFT's `modules_to_save` wraps the head in one that only chooses a copy."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        adapters = head.active_adapters
        if head.disable_adapters or len(adapters) != 1 or adapters[0] not in head.modules_to_save:
            return head.original_module
        return head.modules_to_save[adapters[0]]
    return head


def own_class(module: nn.Module) -> type:
    """The class of `module` before FSDP2 made one of its own out of it, with another name."""
    return next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))


def why_not_fusable(head: nn.Module, cast_to_fp32: bool = False) -> str | None:
    """None where the fused kernels compute what `head` computes, else the reason why they do not.

    `cast_to_fp32`: the fused kernels project in fp32, as the forward does that TRL's `cast_lm_head_to_fp32` gives the
    head.
    """
    outer, head = head, innermost(head)
    if _is_plain_linear(head):
        weight = head.weight
    elif hasattr(head, "lora_A") and hasattr(head, "base_layer"):
        if not _is_plain_linear(head.base_layer):
            return f"its LoRA wraps a {type(head.base_layer).__name__}"
        kind = own_class(head).__name__
        if kind != "Linear":
            return f"its adapter layer is a {kind}, not a plain LoRA"
        active = [name for name in head.active_adapters if name in head.lora_A]
        if not (head.disable_adapters or head.merged):
            if len(active) > 1:
                return f"{len(active)} adapters are active on it at once"
            if any(name in head.lora_variant for name in active):
                return f"its adapter is a LoRA variant ({type(head.lora_variant[active[0]]).__name__})"
            if any(head.lora_bias.get(name) for name in active):
                return "its LoRA has a bias (lora_bias=True)"
        weight = head.base_layer.weight
    elif hasattr(head, "base_layer"):
        return f"its adapter layer is a {own_class(head).__module__}.{own_class(head).__name__}, not a plain LoRA"
    else:
        return f"it is a {type(head).__name__}, not a linear layer"
    for module in parts_of(outer):
        attached = hook_on(module, binding_of(module, _KEY), allowed="trl." if cast_to_fp32 else None)
        if attached is not None:
            return f"{attached} on it would not see logits"
    units = (outer, head, getattr(head, "base_layer", None))
    if isinstance(weight, DTensor) and not _gathered_by_a_call(units, weight):
        return "its weight is a DTensor outside of its gather (tensor parallelism)"
    return None


def _gathered_by_a_call(units: tuple, weight: DTensor) -> bool:
    """Whether one of `units` is one of FSDP2, which gathers the weight for its call, and nothing else cuts it."""
    is_unit = any(isinstance(unit, FSDPModule) for unit in units)
    return is_unit and sum(not placement.is_replicate() for placement in weight.placements) == 1


def _is_plain_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _base_and_adapter(head: nn.Module) -> tuple[nn.Linear, str | None]:
    if _is_plain_linear(head):
        return head, None
    active = [name for name in head.active_adapters if name in head.lora_A]
    off = head.disable_adapters or head.merged or not active
    return head.base_layer, None if off else active[0]


def parts_of(head: nn.Module) -> list[nn.Module]:
    """The modules that a call of `head` enters, the outermost first: wrapper, projection, and what a LoRA adds."""
    inner = innermost(head)
    if not hasattr(inner, "base_layer"):
        return list(dict.fromkeys((head, inner)))
    parts = [head, inner, inner.base_layer]
    for name in getattr(inner, "active_adapters", ()):
        for group in ("lora_A", "lora_B", "lora_dropout"):
            if name in getattr(inner, group, ()):
                parts.append(getattr(inner, group)[name])
    return list(dict.fromkeys(parts))


def call_within(head: nn.Module, hidden: torch.Tensor, compute: Callable):
    """`compute(hidden)`, run inside the calls of all modules that own parameters of `head`."""
    inner = innermost(head)
    base, adapter = _base_and_adapter(inner)
    owners = list(dict.fromkeys((head, inner, base)))
    if adapter is not None:
        owners += [inner.lora_A[adapter], inner.lora_B[adapter]]
    return _call_inside(owners, hidden, functools.partial(compute, hidden))


def plain_forward(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The head's own forward inside a call of the module, whether or not a capture is on."""
    inner = innermost(head)
    run = functools.partial(call_previous, inner, _KEY, (hidden,), {})
    return _call_inside(list(dict.fromkeys((head, inner))), hidden, run)


def _call_inside(owners: list[nn.Module], hidden: torch.Tensor, run: Callable):
    """`run()` inside calls of those `owners` whose parameters are gathered when they are called.

    These are units of FSDP, and under ZeRO-3 all modules. Their hooks have seen `hidden` in the call that was captured;
    here they see it detached. FSDP2 takes the gradient of an argument for the end of the unit's backward pass: of this
    call's, it would free a norm that is in one unit with the head before the norm's own backward pass. Nor does a unit
    that is gathered already need the call: to a unit of several modules it would look like the start of another
    forward pass.
    """
    for owner in reversed(owners):
        sharded_by_fsdp1 = isinstance(owner, FullyShardedDataParallel)
        gathered = isinstance(owner, FSDPModule) and not any(isinstance(p, DTensor) for p in owner.parameters())
        if (has_hooks(owner) or sharded_by_fsdp1) and not gathered:
            bind_head(owner.module if sharded_by_fsdp1 else owner)
            run = functools.partial(owner, hidden.detach(), HeadCall(_ignoring_argument(run)))
    return run()


def _ignoring_argument(run: Callable):
    return lambda _: run()


def _captured_forward(self, *args, **kwargs):
    if len(args) == 2 and isinstance(args[1], HeadCall):
        return args[1].compute(args[0])
    stand_in = _stand_in(binding_of(self, _KEY).stand_ins)
    if stand_in is not None and len(args) == 1 and not kwargs:
        return stand_in(args[0], self, self.out_features)
    return call_previous(self, _KEY, args, kwargs)


_captured_forward.__name__ = "forward"


def bind_head(module: nn.Module) -> Binding:
    """Bind the capturing forward to `module`, once. Whatever forward it had is kept and called outside of captures."""
    binding = binding_of(module, _KEY)
    if binding is not None or torch.compiler.is_compiling():  # no compiled graph may bind; see `bind_all`
        return binding
    return bind(module, _KEY, _captured_forward, stand_ins={})


def capture(head: nn.Module, stand_in: Callable | None, run: Callable):
    """`run()`, in which calls of `head` return `stand_in(hidden, head, vocab_size)` in place of logits; None: logits.

    This holds for the calls of this thread, and for those within that are not themselves inside another `capture`: a
    hook may call the model while it runs, and gets what it asks for.
    """
    stand_ins = bind_head(head).stand_ins
    thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
    outer = stand_ins.pop(thread, None)
    if stand_in is not None:
        stand_ins[thread] = stand_in
    try:
        return run()
    finally:
        stand_ins.pop(thread, None)
        if outer is not None:
            stand_ins[thread] = outer


def is_captured(head: nn.Module) -> bool:
    """Whether a `capture` of `head` is on."""
    binding = binding_of(head, _KEY)
    return binding is not None and bool(binding.stand_ins)


def _stand_in(stand_ins: dict) -> Callable | None:
    if not stand_ins:
        return None
    if torch.compiler.is_compiling():  # one thread traces, and it cannot be asked which
        return next(iter(stand_ins.values()))
    return stand_ins.get(threading.get_ident())


def bind_all(head: nn.Module) -> None:
    """Bind every part of `head` that a fused call may enter, so that a compiled call finds them bound."""
    for module in parts_of(head):
        if not isinstance(module, FullyShardedDataParallel):
            bind_head(module)


def unbind_head(module: nn.Module) -> None:
    """Undo `bind_head`: the module's `__dict__` is as before."""
    unbind(module, _KEY)
