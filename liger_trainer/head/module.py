"""The LM head of a model: when it can be fused, where its parameters are, and the forward bound to it.

A head is fused where its output is `x @ W.T + b`, with at most one plain LoRA on top. Its parameters are used only
inside calls of the modules that own them, so that FSDP2 and ZeRO-3 gather them and all hooks run.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from liger_trainer.head.outputs import HeadOptions
from liger_trainer.instance.binding import Binding, bind, call_previous, own_class
from liger_trainer.instance.guards import linear_is_torchs
from liger_trainer.instance.hooks import has_hooks, hook_on, output_seen_by
from liger_trainer.instance.kind import PLAIN_TENSORS

LoRA = tuple[torch.Tensor, torch.Tensor, float]  # A (R, H), B (V, R) and the scaling


class CaptureBinding(Binding):
    """The binding of an LM head, made by `bind_head`."""

    key = "_liger_capture"

    def __init__(self, function: Callable):
        super().__init__(function)
        self.stand_ins: dict[int, Callable] = {}  # by the id of a thread; see `capture`


class HeadCall:
    """The second argument of a call of a head that shall return `compute(hidden)`, computed on gathered parameters."""

    def __init__(self, compute: Callable):
        self.compute = compute


def head_parameters(head: nn.Module, hidden: torch.Tensor, vocab_size: int) -> dict[str, Any]:
    """Read what the functions of `liger_triton` take for the first `vocab_size` rows of `head`, inside a call of it."""
    head = innermost(head)
    base, adapters = base_and_adapters(head)
    bias = None if base.bias is None else base.bias[:vocab_size]
    found = {"weight": base.weight[:vocab_size], "bias": bias, "lora": None, "lora_input": None}
    for adapter in adapters:  # at most one
        dtype = hidden.dtype  # PEFT keeps adapters of a 16-bit model in fp32, and computes in the dtype of `hidden`
        a, b = head.lora_A[adapter].weight.to(dtype), head.lora_B[adapter].weight.to(dtype)
        dropout = head.lora_dropout[adapter]
        found["lora"] = (a, b[:vocab_size], head.scaling[adapter])
        found["lora_input"] = None if isinstance(dropout, nn.Identity) else dropout(hidden)
    return found


def innermost(head: nn.Module) -> nn.Module:
    """The module that projects: `head`, or the copy that PEFT's `modules_to_save` chooses now."""
    if "modules_to_save" in head._modules:
        adapters = head.active_adapters
        if head.disable_adapters or len(adapters) != 1 or adapters[0] not in head.modules_to_save:
            return head.original_module
        return head.modules_to_save[adapters[0]]
    return head


def why_not_fusable(head: nn.Module, cast_to_fp32: bool = False) -> str | None:
    """The reason why the fused kernels do not compute what `head` computes, or None where they do.

    With `cast_to_fp32` they project in fp32, as does the forward that TRL gives to the head, which then does not count.
    """
    outer, head = head, innermost(head)
    base, adapters = base_and_adapters(head)
    parts = [part[name] for name in adapters for part in (head.lora_A, head.lora_B)]
    layers = [base, *(getattr(part, "_fsdp_wrapped_module", part) for part in parts)]
    if base is not head:
        kind = f"{own_class(head).__module__}.{own_class(head).__name__}"
        if kind != "peft.tuners.lora.layer.Linear":
            return f"its adapter layer is a {kind}, not a plain LoRA"
        if len(adapters) > 1:
            return f"{len(adapters)} adapters are active on it at once"
        if any(name in head.lora_variant for name in adapters):
            return f"its adapter is a LoRA variant ({type(head.lora_variant[adapters[0]]).__name__})"
        if any(head.lora_bias.get(name) for name in adapters):
            return "its LoRA has a bias (lora_bias=True)"
    for layer in layers:
        if (reason := _why_not_plain(layer)) is not None:
            return reason
    if isinstance(base.weight, DTensor) and not _gathered_by_a_call((outer, head, base), base.weight):
        return "its weight is a DTensor that no call of the head gathers, as in tensor parallelism"
    for module in modules_called_by(outer):
        attached = hook_on(module, CaptureBinding.of(module), allowed=("trl.",) if cast_to_fp32 else ())
        if attached is not None:
            return f"{attached} on it would not see logits"
    return None


def _why_not_plain(module: nn.Module) -> str | None:
    """Tell why `module` is no plain linear layer, or return None. Tensors of other classes may compute anything."""
    if not isinstance(module, nn.Linear):
        return f"it is a {type(module).__name__}, not a linear layer"
    if type(module).forward is not nn.Linear.forward or not linear_is_torchs():
        return f"the forward of {type(module).__name__} is not that of a linear layer of torch"
    for name in ("weight", "bias"):
        if hasattr(type(module), name):
            return f"its {name} is computed whenever it is read, as by a parametrization"
        own = module._parameters.get(name, vars(module).get(name))  # neither has it while FSDP1 keeps it sharded
        local = own._local_tensor if type(own) is DTensor else own
        if local is not None and type(local) not in PLAIN_TENSORS:
            return f"its {name} is a {type(local).__name__}, not a plain tensor"
    return None


def _gathered_by_a_call(units: tuple[nn.Module, ...], weight: DTensor) -> bool:
    """Return whether FSDP2, which shards one of `units`, gathers the whole weight for a call."""
    is_unit = any(isinstance(unit, FSDPModule) for unit in units)
    return is_unit and sum(not placement.is_replicate() for placement in weight.placements) == 1


def base_and_adapters(head: nn.Module) -> tuple[nn.Module, list[str]]:
    """The linear layer of an innermost head, and the names of the adapters whose LoRA is added to it."""
    if "base_layer" not in head._modules:
        return head, []
    off = getattr(head, "disable_adapters", False) or getattr(head, "merged", False)
    return head.base_layer, [] if off else [n for n in head.active_adapters if n in getattr(head, "lora_A", ())]


def modules_called_by(head: nn.Module) -> list[nn.Module]:
    """The modules that a call of `head` calls, `head` first, then what it wraps and the layers of active LoRAs."""
    inner = innermost(head)
    modules = [head, inner]
    if "base_layer" in inner._modules:
        modules.append(inner.base_layer)
        for name in getattr(inner, "active_adapters", ()):
            parts = (getattr(inner, group, ()) for group in ("lora_A", "lora_B", "lora_dropout"))
            modules += [part[name] for part in parts if name in part]
    return list(dict.fromkeys(modules))


def call_within(head: nn.Module, hidden: torch.Tensor, compute: Callable[[torch.Tensor], Any]) -> Any:
    """Run `compute(hidden)` inside calls of all modules that own parameters of `head`, and return its result."""
    return _call_inside(modules_called_by(head), hidden, functools.partial(compute, hidden))


def plain_forward(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Real logits: run the head's own forward inside a call of the head, also while a `capture` of it is on."""
    inner = innermost(head)
    run = functools.partial(call_previous, inner, CaptureBinding, (hidden,), {})
    return _call_inside(list(dict.fromkeys((head, inner))), hidden, run)


def _call_inside(owners: list[nn.Module], hidden: torch.Tensor, run: Callable[[], Any]) -> Any:
    """Run `run()` inside calls of those `owners` whose parameters are gathered when they are called.

    These are the units of FSDP, and under ZeRO-3 all modules. They get `hidden` detached: FSDP2 would take the gradient
    of this argument for the end of the unit's backward pass, and free the weight of a norm in the same unit too early.
    A unit that is gathered already is not called, since it would take that for another forward pass.
    """
    for owner in reversed(owners):
        sharded_by_fsdp1 = isinstance(owner, FullyShardedDataParallel)
        is_gathered = isinstance(owner, FSDPModule) and not any(isinstance(p, DTensor) for p in owner.parameters())
        if (has_hooks(owner) or sharded_by_fsdp1) and not is_gathered:
            bind_head(owner.module if sharded_by_fsdp1 else owner)
            run = functools.partial(owner, hidden.detach(), HeadCall(lambda _, run=run: run()))
    return run()


def _captured_forward(self, *args, **kwargs):
    """Run a `HeadCall`, or return a stand-in for logits, or call the forward in whose place this one is bound."""
    if len(args) == 2 and isinstance(args[1], HeadCall):
        return args[1].compute(args[0])
    stand_ins, made = CaptureBinding.of(self).stand_ins, None
    if stand_ins and len(args) == 1 and not kwargs:
        # Only one thread traces, and traced code cannot ask for the thread's id.
        traced = torch.compiler.is_compiling()
        stand_in = next(iter(stand_ins.values())) if traced else stand_ins.get(threading.get_ident())
        if stand_in is not None:
            made = stand_in(args[0], base_and_adapters(self)[0].weight.shape[0])  # out_features may be out of date
    return call_previous(self, CaptureBinding, args, kwargs) if made is None else made


_captured_forward.__name__ = "forward"


def bind_head(module: nn.Module) -> None:
    """Bind the capturing forward to `module`, once. Compiled code binds nothing, so `bind_all` does it beforehand."""
    if CaptureBinding.of(module) is None and not torch.compiler.is_compiling():
        bind(module, CaptureBinding(_captured_forward))


def bind_all(head: nn.Module) -> None:
    """Bind every module that a fused call of `head` may call, so that a compiled call finds all of them bound."""
    for module in modules_called_by(head):
        if not isinstance(module, FullyShardedDataParallel):
            bind_head(module)


def capture(head: nn.Module, stand_in: Callable | None, run: Callable[[], Any]) -> Any:
    """Run `run()`, in which calls of `head` return `stand_in(hidden, vocab_size)` in place of logits.

    Where `stand_in` is None or returns None, they return logits. Calls in other threads are not affected. A call of the
    model inside `run`, by a hook, has a `capture` of its own.
    """
    head = innermost(head)
    if stand_in is not None:
        bind_head(head)
    binding = CaptureBinding.of(head)
    if binding is None:  # nothing has ever been captured
        return run()
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


# The head of a model


class FusedHeadBinding(Binding):
    """The binding of a model, made by `install_fused_head`.

    Attributes:
        options (`HeadOptions`): What calls with `fused_lm_head=True` do by default.
    """

    key = "_liger_head"

    def __init__(self, function: Callable):
        super().__init__(function)
        self.options = HeadOptions()


def base_model_of(model: nn.Module) -> nn.Module:
    """The transformers model inside `torch.compile` and a PEFT wrapper, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits of a transformers model, or None."""
    get_head = getattr(base_model_of(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()


def longest_rows_of_stand_ins(model: nn.Module) -> int | None:
    """Return how many tokens a row may have for `model` to get stand-ins for its logits, or None for any number.

    A few model types of transformers write into their logits in their own forward, which a stand-in refuses. Their
    heads return real logits.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type == "chameleon":  # rules out the words of images, in every call
        return 0
    if model_type == "xlstm" and not model.training:  # caps longer rows chunk by chunk
        config: Any = model.config
        return config.max_inference_chunksize
    return None


def head_reason(model: nn.Module, options: HeadOptions | None = None) -> str | None:
    """Tell why `model` cannot have a fused head with `options`, by default those that it has, or return None."""
    model = base_model_of(model)
    head, options = output_head(model), options or head_options(model)
    if head is None:
        return f"{type(model).__name__} has no LM head (get_output_embeddings() is None)"
    if longest_rows_of_stand_ins(model) == 0:
        reason: str | None = "the model writes into its logits"
    else:
        reason = why_not_fusable(head, options is not None and options.cast_lm_head_to_fp32)
    return None if reason is None else f"the LM head of {type(model).__name__} cannot be fused: {reason}"


def head_options(model: nn.Module) -> HeadOptions | None:
    """The options of the fused head of `model`, or None where it has none."""
    binding = FusedHeadBinding.of(base_model_of(model))
    return None if binding is None or binding.aside else binding.options


def has_fused_head(model: nn.Module) -> bool:
    """Return whether `model` has a fused head, also where accelerate has wrapped its forward."""
    return head_options(model) is not None


def who_sees_outputs(model: nn.Module) -> str | None:
    """Describe a hook or a forward of the user's that gets the outputs of `model`, which may be wrapped, or None."""
    for module in model.modules():  # a wrapper comes before what it wraps
        ours = FusedHeadBinding.of(module)
        if (seen := output_seen_by(module, ours)) is not None:
            return f"{seen} on the {type(module).__name__} sees its outputs, which would have no logits"
        if ours is not None:
            break
    return None


def report_unfused(model: nn.Module, reason: str) -> None:
    """Say in the log and in the report of `model`, which may be wrapped by PEFT, that its head is not fused."""
    binding = FusedHeadBinding.of(base_model_of(model))
    if binding is not None and not torch.compiler.is_compiling():
        binding.tell(
            reason, "builds full logits, with the same numbers and more memory, since its LM head is not fused"
        )


def why_peft_needs_logits(model: nn.Module) -> str | None:
    """Tell why the PEFT wrapper `model` needs real logits in calls with labels, or return None."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type == "CPT":
            return f"the adapter {name!r} is CPT, which computes its own loss from logits"
    return None
