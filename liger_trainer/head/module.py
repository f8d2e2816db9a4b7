"""The LM head as a module: when it can be fused, where its parameters are, and the forward bound to it.

A head is fused where its output is `x @ W.T + b`, with at most one plain LoRA on top. Its parameters are used only
inside calls of the modules that own them, so that FSDP2 and ZeRO-3 gather the parameters, and the hooks of everyone
else run, as in a normal forward.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from liger_trainer.instance.binding import Binding, bind, call_previous, own_class, unbind
from liger_trainer.instance.guards import linear_is_torchs
from liger_trainer.instance.hooks import has_hooks, hook_on

LoRA = tuple[torch.Tensor, torch.Tensor, float]  # A (R, H), B (V, R) and the scaling


class CaptureBinding(Binding):
    """What `bind_head` binds to an LM head.

    Attributes:
        stand_ins (`dict`): Id of a thread -> the function whose results calls of the head in this thread return instead
            of logits. See `capture`.
    """

    key: ClassVar[str] = "_liger_capture"

    def __init__(self, function: Callable):
        super().__init__(function)
        self.stand_ins: dict[int, Callable] = {}


class HeadCall:
    """The second argument of a call of a head that shall run `compute(hidden)` and return the result.

    `compute` runs inside the call of the module, where the module's parameters are gathered.
    """

    def __init__(self, compute: Callable):
        self.compute = compute


class HeadParameters:
    """The parameters of a head that the fused kernels need, read inside a call of the head.

    Attributes:
        weight (`torch.Tensor`): (V, H).
        bias (`torch.Tensor` or `None`): (V,).
        lora (`tuple` or `None`): A (R, H) and B (V, R) of the active adapter in the dtype of `hidden`, and its scaling.
        lora_input (`torch.Tensor` or `None`): `hidden` after the adapter's dropout; None where it has none.
    """

    def __init__(self, head: nn.Module, hidden: torch.Tensor):
        head = innermost(head)
        base, adapter = _base_and_adapter(head)
        self.weight, self.bias = base.weight, base.bias
        self.lora: LoRA | None = None
        self.lora_input: torch.Tensor | None = None
        if adapter is not None:
            dtype = hidden.dtype  # PEFT keeps adapters of a 16-bit model in fp32, and computes in the dtype of `hidden`
            self.lora = (
                head.lora_A[adapter].weight.to(dtype),
                head.lora_B[adapter].weight.to(dtype),
                head.scaling[adapter],
            )
            dropout = head.lora_dropout[adapter]
            self.lora_input = None if isinstance(dropout, nn.Identity) else dropout(hidden)

    def kwargs(self, vocab_size: int) -> dict[str, Any]:
        """The keyword arguments of the functions of `liger_triton`, for the first `vocab_size` rows of the head."""
        lora = self.lora
        if vocab_size < self.weight.shape[0]:
            lora = lora and (lora[0], lora[1][:vocab_size], lora[2])
        bias = None if self.bias is None else self.bias[:vocab_size]
        return {"weight": self.weight[:vocab_size], "bias": bias, "lora": lora, "lora_input": self.lora_input}


def innermost(head: nn.Module) -> nn.Module:
    """The module that does the projection.

    That is `head` itself, unless PEFT's `modules_to_save` has wrapped it in a module that chooses one of its copies.
    """
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        adapters = head.active_adapters
        if head.disable_adapters or len(adapters) != 1 or adapters[0] not in head.modules_to_save:
            return head.original_module
        return head.modules_to_save[adapters[0]]
    return head


def why_not_fusable(head: nn.Module, cast_to_fp32: bool = False) -> str | None:
    """The reason why the fused kernels do not compute what `head` computes, or None where they do.

    With `cast_to_fp32` the fused kernels project in fp32. So does the forward that TRL's `cast_lm_head_to_fp32` gives
    to the head, so that forward does not count then.
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
    for module in modules_called_by(outer):
        attached = hook_on(module, CaptureBinding.of(module), allowed=("trl.",) if cast_to_fp32 else ())
        if attached is not None:
            return f"{attached} on it would not see logits"
    units = (outer, head, getattr(head, "base_layer", None))
    if isinstance(weight, DTensor) and not _gathered_by_a_call(units, weight):
        return "its weight is a DTensor that no call of the head gathers, as in tensor parallelism"
    return None


def _gathered_by_a_call(units: tuple[nn.Module | None, ...], weight: DTensor) -> bool:
    """Whether FSDP2 gathers the whole weight for a call: it shards one of `units`, and nothing else shards it too."""
    is_unit = any(isinstance(unit, FSDPModule) for unit in units)
    return is_unit and sum(not placement.is_replicate() for placement in weight.placements) == 1


def _is_plain_linear(module: nn.Module) -> bool:
    own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return own and linear_is_torchs() and not is_parametrized(module)


def _base_and_adapter(head: nn.Module) -> tuple[nn.Linear, str | None]:
    """The linear layer of an innermost head, and the name of the adapter whose LoRA is added to it, or None."""
    if _is_plain_linear(head):
        return head, None
    active = [name for name in head.active_adapters if name in head.lora_A]
    off = head.disable_adapters or head.merged or not active
    return head.base_layer, None if off else active[0]


def modules_called_by(head: nn.Module) -> list[nn.Module]:
    """The modules that a call of `head` calls, `head` first, then what it wraps and the layers of active LoRAs."""
    inner = innermost(head)
    if not hasattr(inner, "base_layer"):
        return list(dict.fromkeys((head, inner)))
    modules = [head, inner, inner.base_layer]
    for name in getattr(inner, "active_adapters", ()):
        for group in ("lora_A", "lora_B", "lora_dropout"):
            if name in getattr(inner, group, ()):
                modules.append(getattr(inner, group)[name])
    return list(dict.fromkeys(modules))


def call_within(head: nn.Module, hidden: torch.Tensor, compute: Callable[[torch.Tensor], Any]) -> Any:
    """Run `compute(hidden)` inside calls of all modules that own parameters of `head`, and return its result."""
    inner = innermost(head)
    base, adapter = _base_and_adapter(inner)
    owners = list(dict.fromkeys((head, inner, base)))
    if adapter is not None:
        owners += [inner.lora_A[adapter], inner.lora_B[adapter]]
    return _call_inside(owners, hidden, functools.partial(compute, hidden))


def plain_forward(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Real logits: run the head's own forward inside a call of the head, also while a `capture` of it is on."""
    inner = innermost(head)
    run = functools.partial(call_previous, inner, CaptureBinding, (hidden,), {})
    return _call_inside(list(dict.fromkeys((head, inner))), hidden, run)


def _call_inside(owners: list[nn.Module], hidden: torch.Tensor, run: Callable[[], Any]) -> Any:
    """Run `run()` inside calls of those `owners` whose parameters are gathered when they are called.

    These are the units of FSDP, and under ZeRO-3 all modules. Their hooks have seen `hidden` in the call that was
    captured, and here they get it detached. Otherwise FSDP2 would take the gradient of this argument for the end of
    the unit's backward pass. Where the unit holds a norm beside the head, the norm's weight would then be freed before
    the norm's own backward pass.

    A unit that is gathered already is not called, because a unit of several modules would take the call for the start
    of another forward pass.
    """
    for owner in reversed(owners):
        sharded_by_fsdp1 = isinstance(owner, FullyShardedDataParallel)
        is_gathered = isinstance(owner, FSDPModule) and not any(isinstance(p, DTensor) for p in owner.parameters())
        if (has_hooks(owner) or sharded_by_fsdp1) and not is_gathered:
            bind_head(owner.module if sharded_by_fsdp1 else owner)
            run = functools.partial(owner, hidden.detach(), HeadCall(_ignoring_argument(run)))
    return run()


def _ignoring_argument(run: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda _: run()


def _captured_forward(self, *args, **kwargs):
    """Run a `HeadCall`, or return a stand-in for logits, or call the forward in whose place this one is bound."""
    if len(args) == 2 and isinstance(args[1], HeadCall):
        return args[1].compute(args[0])
    stand_in = _stand_in_of_this_thread(CaptureBinding.of(self).stand_ins)
    if stand_in is not None and len(args) == 1 and not kwargs:
        return stand_in(args[0], self, self.out_features)
    return call_previous(self, CaptureBinding, args, kwargs)


_captured_forward.__name__ = "forward"


def bind_head(module: nn.Module) -> None:
    """Bind the capturing forward to `module`, once. Whatever forward it had is kept and called outside of captures.

    Compiled code binds nothing, so `bind_all` does it beforehand.
    """
    if CaptureBinding.of(module) is None and not torch.compiler.is_compiling():
        bind(module, CaptureBinding(_captured_forward))


def capture(head: nn.Module, stand_in: Callable | None, run: Callable[[], Any]) -> Any:
    """Run `run()`, in which calls of `head` return `stand_in(hidden, head, vocab_size)` in place of logits.

    Where `stand_in` is None, they return logits. Calls in other threads are not affected. A hook inside `run` may call
    the model. That call has a `capture` of its own, in which it gets what it asks for.
    """
    bind_head(head)
    binding = CaptureBinding.of(head)
    assert binding is not None, "bind_all has to bind the head before it is compiled"
    stand_ins = binding.stand_ins
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
    """Whether a `capture` of `head` is on in any thread."""
    binding = CaptureBinding.of(head)
    return binding is not None and bool(binding.stand_ins)


def _stand_in_of_this_thread(stand_ins: dict[int, Callable]) -> Callable | None:
    if not stand_ins:
        return None
    if torch.compiler.is_compiling():  # only one thread traces, and traced code cannot ask for the thread's id
        return next(iter(stand_ins.values()))
    return stand_ins.get(threading.get_ident())


def bind_all(head: nn.Module) -> None:
    """Bind every module that a fused call of `head` may call, so that a compiled call finds all of them bound."""
    for module in modules_called_by(head):
        if not isinstance(module, FullyShardedDataParallel):
            bind_head(module)


def unbind_head(module: nn.Module) -> None:
    """Undo `bind_head`: the module's `__dict__` is as before."""
    unbind(module, CaptureBinding)
