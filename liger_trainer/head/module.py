"""Finds the LM head of a model, says whether it can be fused, reads its parameters, and binds its forward.

A head can be fused if its output is `x @ W.T + b`, with at most one plain LoRA on top. Its parameters are used only
inside calls of the modules that own them, so that FSDP2 and ZeRO-3 gather them and all hooks run.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from liger_trainer.head.outputs import HeadOptions
from liger_trainer.patching.core.binding import Binding, bind, call_previous, own_class
from liger_trainer.patching.core.guards import linear_is_torchs
from liger_trainer.patching.core.hooks import has_hooks, hook_on, output_seen_by
from liger_trainer.patching.core.pattern import PLAIN_TENSORS

LoRA = tuple[torch.Tensor, torch.Tensor, float]  # A (R, H), B (V, R) and the scaling
MakeStandIn: TypeAlias = Callable[[torch.Tensor, int], Any]  # gets the head's input and V; returns None for real logits


class InterceptBinding(Binding):
    """The binding of an LM head, with the forward that can return a stand-in. `bind_head` makes it.

    Attributes:
        stand_ins (`dict`): The functions that make stand-ins, by the id of the thread that runs `intercept`.
    """

    key = "_liger_intercept"

    def __init__(self, function: Callable):
        super().__init__(function)
        self.stand_ins: dict[int, MakeStandIn] = {}


class HeadCall:
    """Sentinel argument of a call of a head: it returns `compute(hidden)` while its parameters are gathered."""

    def __init__(self, compute: Callable[[torch.Tensor], Any]):
        self.compute = compute


def head_parameters(head: nn.Module, hidden: torch.Tensor, vocab_size: int) -> dict[str, Any]:
    """Return the arguments that the functions of `liger_triton` take for a head. Use it inside a call of the head.

    Args:
        head (`nn.Module`): The LM head.
        hidden (`torch.Tensor`): Its input (..., H).
        vocab_size (`int`): V, how many rows of its weight are used, from the first on.

    Returns:
        `dict`: `weight` (V, H), `bias` (V,) or None, `lora` and its input after dropout, `lora_input`, or None.
    """
    head = innermost(head)
    base, adapters = base_and_adapters(head)
    bias = None if base.bias is None else base.bias[:vocab_size]
    parameters = {"weight": base.weight[:vocab_size], "bias": bias, "lora": None, "lora_input": None}
    for adapter in adapters:  # at most one
        dtype = hidden.dtype  # PEFT keeps adapters of a 16-bit model in fp32, and computes in the dtype of `hidden`
        lora_a = head.lora_A[adapter].weight.to(dtype)
        lora_b = head.lora_B[adapter].weight.to(dtype)
        dropout = head.lora_dropout[adapter]
        parameters["lora"] = (lora_a, lora_b[:vocab_size], head.scaling[adapter])
        parameters["lora_input"] = None if isinstance(dropout, nn.Identity) else dropout(hidden)
    return parameters


def innermost(head: nn.Module) -> nn.Module:
    """Return the module that projects: `head`, or the copy that PEFT's `modules_to_save` chooses now."""
    if "modules_to_save" in head._modules:
        adapters = head.active_adapters
        if head.disable_adapters or len(adapters) != 1 or adapters[0] not in head.modules_to_save:
            return head.original_module
        return head.modules_to_save[adapters[0]]
    return head


def why_not_fusable(head: nn.Module, cast_to_fp32: bool = False) -> str | None:
    """Return the reason why the fused kernels do not compute what `head` computes, or None if they do.

    With `cast_to_fp32` the kernels project in fp32. TRL puts a forward with the same effect on the head, so that one is
    allowed.
    """
    inner = innermost(head)
    base, adapters = base_and_adapters(inner)
    layers = [base]
    if base is not inner:
        reason = _why_not_a_plain_lora(inner, adapters)
        if reason is not None:
            return reason
        for name in adapters:
            for layer in (inner.lora_A[name], inner.lora_B[name]):
                layers.append(getattr(layer, "_fsdp_wrapped_module", layer))
    for layer in layers:
        reason = _why_not_plain(layer)
        if reason is not None:
            return reason
    if isinstance(base.weight, DTensor) and not _gathered_by_a_call((head, inner, base), base.weight):
        return "its weight is a DTensor that no call of the head gathers, as in tensor parallelism"
    for module in modules_called_by(head):
        attached = hook_on(module, InterceptBinding.of(module), allowed=("trl.",) if cast_to_fp32 else ())
        if attached is not None:
            return f"{attached} on it would not see logits"
    return None


def _why_not_a_plain_lora(layer: Any, adapters: list[str]) -> str | None:
    """Return the reason why an adapter layer adds more than one plain LoRA, or None."""
    kind = f"{own_class(layer).__module__}.{own_class(layer).__name__}"
    if kind != "peft.tuners.lora.layer.Linear":
        return f"its adapter layer is a {kind}, not a plain LoRA"
    if len(adapters) > 1:
        return f"{len(adapters)} adapters are active on it at once"
    for name in adapters:
        if name in layer.lora_variant:
            return f"its adapter is a LoRA variant ({type(layer.lora_variant[name]).__name__})"
        if layer.lora_bias.get(name):
            return "its LoRA has a bias (lora_bias=True)"
    return None


def _why_not_plain(module: nn.Module) -> str | None:
    """Return the reason why `module` is not a plain linear layer, or None."""
    if not isinstance(module, nn.Linear):
        return f"it is a {type(module).__name__}, not a linear layer"
    if type(module).forward is not nn.Linear.forward or not linear_is_torchs():
        return f"the forward of {type(module).__name__} is not torch.nn.Linear's own"
    for name in ("weight", "bias"):
        if hasattr(type(module), name):
            return f"its {name} is computed whenever it is read, as by a parametrization"
        tensor = module._parameters.get(name, vars(module).get(name))  # neither has it while FSDP1 keeps it sharded
        local = tensor._local_tensor if type(tensor) is DTensor else tensor
        # A tensor subclass may compute anything.
        if local is not None and type(local) not in PLAIN_TENSORS:
            return f"its {name} is a {type(local).__name__}, not a plain tensor"
    return None


def _gathered_by_a_call(units: tuple[nn.Module, ...], weight: DTensor) -> bool:
    """Return whether FSDP2, which shards one of `units`, gathers the whole weight for a call."""
    is_unit = any(isinstance(unit, FSDPModule) for unit in units)
    sharded_dims = [placement for placement in weight.placements if not placement.is_replicate()]
    return is_unit and len(sharded_dims) == 1


def base_and_adapters(head: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the linear layer of an innermost head, and the names of the adapters that add a LoRA to it."""
    if "base_layer" not in head._modules:
        return head, []
    if getattr(head, "disable_adapters", False) or getattr(head, "merged", False):
        return head.base_layer, []
    return head.base_layer, [name for name in head.active_adapters if name in getattr(head, "lora_A", ())]


def modules_called_by(head: nn.Module) -> list[nn.Module]:
    """Return the modules that a call of `head` calls: `head`, what it wraps, and the layers of its active LoRAs."""
    inner = innermost(head)
    modules = [head, inner]
    if "base_layer" in inner._modules:
        modules.append(inner.base_layer)
        for name in getattr(inner, "active_adapters", ()):
            for group in ("lora_A", "lora_B", "lora_dropout"):
                layers = getattr(inner, group, ())
                if name in layers:
                    modules.append(layers[name])
    return list(dict.fromkeys(modules))


def call_within(
    head: nn.Module, hidden: torch.Tensor, compute: Callable[[torch.Tensor], Any], owners: list[nn.Module] | None = None
) -> Any:
    """Run `compute(hidden)` inside calls of the modules that own parameters of `head`, and return its result.

    `owners` are these modules, the outermost first. Unset: all modules that a call of `head` calls. Only modules that
    gather parameters in a call are called: the units of FSDP, and under ZeRO-3 all modules. A unit that is gathered
    already is not called, because it would count the call as another forward pass.

    The modules get `hidden` detached. FSDP2 would take the gradient of this argument for the end of the unit's backward
    pass, and free the weight of a norm in the same unit too early.
    """
    run: Callable[[], Any] = functools.partial(compute, hidden)
    for owner in reversed(modules_called_by(head) if owners is None else owners):
        sharded_by_fsdp1 = isinstance(owner, FullyShardedDataParallel)
        is_gathered = isinstance(owner, FSDPModule) and not any(isinstance(p, DTensor) for p in owner.parameters())
        if (has_hooks(owner) or sharded_by_fsdp1) and not is_gathered:
            bind_head(owner.module if sharded_by_fsdp1 else owner)
            # The next owner calls this one, and so on: the last one that is wrapped is called first.
            run = functools.partial(owner, hidden.detach(), HeadCall(_ignoring_hidden(run)))
    return run()


def _ignoring_hidden(run: Callable[[], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda hidden: run()


def plain_forward(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return real logits from the head's own forward, even within `intercept`. It runs inside a call of the head."""
    inner = innermost(head)

    def own_forward(hidden: torch.Tensor) -> torch.Tensor:
        return call_previous(inner, InterceptBinding, (hidden,), {})

    return call_within(head, hidden, own_forward, list(dict.fromkeys((head, inner))))


def _intercepted_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a `HeadCall`, or return a stand-in for logits, or call the forward that this one replaces."""
    if len(args) == 2 and isinstance(args[1], HeadCall):
        return args[1].compute(args[0])
    binding = InterceptBinding.of(self)
    assert binding is not None, "this is the forward of a binding"
    made = None
    if binding.stand_ins and len(args) == 1 and not kwargs:
        # Traced code cannot ask for the thread's id. Only one thread traces, so there is only one entry.
        traced = torch.compiler.is_compiling()
        make = next(iter(binding.stand_ins.values())) if traced else binding.stand_ins.get(threading.get_ident())
        if make is not None:
            base, _ = base_and_adapters(self)
            made = make(args[0], base.weight.shape[0])  # out_features may be out of date
    return binding.call_previous(args, kwargs) if made is None else made


_intercepted_forward.__name__ = "forward"


def bind_head(module: nn.Module) -> InterceptBinding | None:
    """Bind the intercepting forward to `module`, unless it is bound already, and return the binding.

    Compiled code cannot bind, so `bind_all` binds all modules before.
    """
    binding = InterceptBinding.of(module)
    if binding is None and not torch.compiler.is_compiling():
        binding = bind(module, InterceptBinding(_intercepted_forward))
    return binding


def bind_all(head: nn.Module) -> None:
    """Bind every module that a fused call of `head` may call, so that a compiled call finds all of them bound."""
    for module in modules_called_by(head):
        if not isinstance(module, FullyShardedDataParallel):
            bind_head(module)


def intercept(head: nn.Module, make: MakeStandIn | None, run: Callable[[], Any]) -> Any:
    """Return `run()`. Calls of `head` in it return `make(hidden, vocab_size)` in place of logits.

    If `make` is None or returns None, they return logits. Calls in other threads are not affected. If a hook calls the
    model inside `run`, that call has its own `intercept`, and `make` is back after it.
    """
    head = innermost(head)
    binding = InterceptBinding.of(head) if make is None else bind_head(head)
    if binding is None:  # the head was never intercepted
        return run()
    stand_ins = binding.stand_ins
    thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
    outer = stand_ins.pop(thread, None)
    if make is not None:
        stand_ins[thread] = make
    try:
        return run()
    finally:
        stand_ins.pop(thread, None)
        if outer is not None:
            stand_ins[thread] = outer


# The head of a model


class FusedHeadBinding(Binding):
    """The binding of a model, with the forward that answers requests. `install_fused_head` makes it.

    Attributes:
        options (`HeadOptions`): The defaults of calls with `fused_lm_head=True`.
    """

    key = "_liger_head"
    is_of_model = True

    def __init__(self, function: Callable):
        super().__init__(function)
        self.options = HeadOptions()


def base_model_of(model: nn.Module) -> nn.Module:
    """Return the transformers model inside `torch.compile` and a PEFT wrapper, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the module that makes the logits of a transformers model, or None."""
    get_head = getattr(base_model_of(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()


def longest_rows_of_stand_ins(model: nn.Module) -> int | None:
    """Return how many tokens a row may have for `model` to get stand-ins for its logits, or None for any number.

    A few model types of transformers write into their logits in their own forward, which a stand-in refuses. Their
    heads return real logits.
    """
    # By name, because only running a forward shows what it does to its logits. A type that is missing here raises in
    # its first step, and tests/liger_trainer/patching/test_all_architectures.py trains each type that transformers has.
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type == "chameleon":  # in every call, it writes over the logits of image tokens
        return 0
    if model_type == "xlstm" and not model.training:  # it caps the logits of longer rows chunk by chunk, in place
        config: Any = model.config
        return config.max_inference_chunksize
    return None


def head_reason(model: nn.Module, options: HeadOptions | None = None) -> str | None:
    """Return the reason why `model` cannot have a fused head with `options`, by default its own, or None."""
    model = base_model_of(model)
    head = output_head(model)
    options = options or head_options(model)
    if head is None:
        return f"{type(model).__name__} has no LM head (get_output_embeddings() is None)"
    if longest_rows_of_stand_ins(model) == 0:
        reason: str | None = "the model writes into its logits"
    else:
        reason = why_not_fusable(head, options is not None and options.cast_lm_head_to_fp32)
    return None if reason is None else f"the LM head of {type(model).__name__} cannot be fused: {reason}"


def head_options(model: nn.Module) -> HeadOptions | None:
    """Return the options of the fused head of `model`, or None if it has no such head."""
    binding = FusedHeadBinding.of(base_model_of(model))
    return None if binding is None or binding.fallback_active else binding.options


def has_fused_head(model: nn.Module) -> bool:
    """Return whether `model` has a fused head, even if accelerate has wrapped its forward."""
    return head_options(model) is not None


def who_sees_outputs(model: nn.Module) -> str | None:
    """Return which hook or forward of the user's gets the outputs of `model`, which may be wrapped, or None."""
    for module in model.modules():  # a wrapper comes before what it wraps
        binding = FusedHeadBinding.of(module)
        seen_by = output_seen_by(module, binding)
        if seen_by is not None:
            return f"{seen_by} on the {type(module).__name__} sees its outputs, which would have no logits"
        if binding is not None:
            break
    return None


def report_unfused(model: nn.Module, reason: str) -> None:
    """Log and report that the head of `model` is not fused, and why. PEFT may wrap the model."""
    binding = FusedHeadBinding.of(base_model_of(model))
    if binding is not None and not torch.compiler.is_compiling():
        binding.report_fallback(
            reason, "builds full logits, with the same numbers and more memory, since its LM head is not fused"
        )


def why_peft_needs_logits(model: nn.Module) -> str | None:
    """Return the reason why the PEFT wrapper `model` needs real logits in calls with labels, or None."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type == "CPT":
            return f"the adapter {name!r} is CPT, which computes its own loss from logits"
    return None
