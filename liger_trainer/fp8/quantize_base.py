"""Puts frozen linear layers and experts of a model with adapters, or of one that is frozen as a whole, into eight bits.

Each layer becomes a `FrozenFloat8Linear` in its place, and a block of experts gets another class, so half of its memory
is free before the next one is looked at. What is trained or shared stays as it is.

PEFT must not write to such a base, since that would be lost: to merge adapters into it, or to begin another one from it
(PiSSA, OLoRA). The weights that it reads are read-only. DoRA, which reads alone, works.
Layers that another method than LoRA wraps stay as they are.
"""

from collections import Counter

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from liger_trainer.fp8.frozen_experts import WEIGHTS, is_block, put_into_eight_bits
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear, InEightBits
from liger_trainer.head.module import base_model_of, modules_called_by, output_head
from liger_trainer.instance.binding import own_class
from liger_trainer.instance.hooks import HOOK_DICTS
from liger_trainer.instance.kind import names_of, slot_of
from liger_trainer.instance.report import OperationReport
from liger_triton.float8_cast import MULTIPLE

OPERATION = "frozen_float8"

_LORA = ("peft.tuners.lora.layer", "Linear")
_LAYER = ("peft.tuners.tuners_utils", "BaseTunerLayer")
_WRAPPER = ("peft.utils.other", "AuxiliaryTrainingWrapper")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_READ_BY_MIXERS = ("x_proj", "dt_proj", "out_proj")  # of state-space models such as Mamba, by kernels for the GPU
_ROUTERS = ("gate", "router", "wg"), ("Router", "Gating")  # names of layers, and parts of the names of their owners


def quantize_base(model: nn.Module, device: torch.device | None = None) -> OperationReport:
    """Put the frozen linear layers and experts of `model` into eight bits.

    Those that are in eight bits already count as swapped.

    Args:
        model (`nn.Module`): A model with adapters of PEFT, or one whose trained parameters are no part of its base.
        device (`torch.device`, *optional*): Where the weights are put into eight bits. Unset, that is where they are.

    Raises:
        ValueError: One of the adapters is merged into the weights.
    """
    report, base = OperationReport(), base_model_of(model)
    output = output_head(model)
    head = [] if output is None else modules_called_by(output)
    owners = Counter(id(p) for _, p in base.named_parameters(remove_duplicate=False))
    found = _layers_of_base(base)
    for name, chain in found.items():
        if merged := getattr(chain[-1], "merged_adapters", None):
            raise ValueError(
                f"The adapters {merged} are merged into {name}, from which they could not be taken out in eight bits. "
                "Call unmerge_adapter() before the trainer is built, or leave out fp8."
            )
    for name, chain in found.items():
        linear = base.get_submodule(name)
        if linear in head:
            reason: str | None = "it is the LM head, which is fused with the loss"
        elif type(linear) is not nn.Linear:
            reason = f"it is a {type(linear).__name__}, whose product may be another"
        elif owners[id(linear.weight)] > 1:
            reason = "its weight is shared with another module"
        else:
            reason = _why_left(name, chain, linear)
        if reason is None:
            parent, _, child = name.rpartition(".")
            base.get_submodule(parent)._modules[child] = FrozenFloat8Linear.of(linear, device)
        else:
            report.skipped[name] = reason
    for name, block in [(name, module) for name, module in base.named_modules() if is_block(module)]:
        parts = name.split(".")
        chain = [base.get_submodule(".".join(parts[:k])) for k in range(len(parts))]
        reason = _why_block_left(chain, block, owners)
        if reason is None:
            put_into_eight_bits(block, device)
        else:
            report.skipped[name] = reason
    report.swapped = quantized_before(model).swapped
    return report


def prepare_for_shards(model: nn.Module) -> None:
    """Have the layers of `model` that are in eight bits hold them as FSDP2 takes them."""
    for module in base_model_of(model).modules():
        if isinstance(module, InEightBits):
            module.hold_words()


def quantized_before(model: nn.Module) -> OperationReport:
    """Return the layers and experts of `model` that are in eight bits."""
    report = OperationReport()
    for name, module in base_model_of(model).named_modules():
        if isinstance(module, InEightBits):
            report.swapped[name] = f"e4m3 with a scale for each row, from {str(module.compute_dtype)[6:]}"
    return report


def _is(module: nn.Module, names: tuple[str, str]) -> bool:
    return any(names_of(cls) == names for cls in type(module).__mro__)


def _layers_of_base(base: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the name of each linear layer of the base, without adapters, and the modules around it.

    The layers themselves are not returned, so that no caller holds one that was replaced.
    """
    modules, found = dict(base.named_modules()), {}
    for name, module in modules.items():
        if not isinstance(module, (nn.Linear, Conv1D)):
            continue
        parts = name.split(".")
        chain = [modules[".".join(parts[:k])] for k in range(len(parts))]
        inside = zip(chain, parts, strict=True)
        of_adapter = any(
            (_is(around, _LAYER) and part != "base_layer") or (_is(around, _WRAPPER) and part != "original_module")
            for around, part in inside
        )
        if not of_adapter:
            found[name] = chain
    return found


def _why_block_left(chain: list[nn.Module], block: nn.Module, owners: Counter) -> str | None:
    """Return why a block of experts stays as it is, or None."""
    weights = [block._parameters[name] for name in WEIGHTS]
    if any(_is(around, _LAYER) for around in chain):
        return "PEFT adapts its weights, and its code for that is for 16 bits"
    if any(owners[id(weight)] > 1 for weight in weights):
        return "its weights are shared with another module"
    return _why_weights_left(chain, block, weights) or slot_of(block, around=True)[1]


def _why_weights_left(chain: list[nn.Module], module: nn.Module, weights: list) -> str | None:
    """Return why a module that owns the `weights` stays as it is, or None."""
    if any(_is(around, _WRAPPER) for around in chain):
        return "modules_to_save has a trained copy of it"
    for weight in weights:
        if type(weight) is not nn.Parameter:
            return f"its weight is a {type(weight).__name__}"
        if weight.requires_grad:
            return "it is trained"
        if weight.dtype not in _DTYPES:
            return f"its weight is {str(weight.dtype)[6:]}"
        if any(width % MULTIPLE for width in weight.shape[-2:]):
            return f"its widths, {weight.shape[-1]} and {weight.shape[-2]}, are not both multiples of {MULTIPLE}"
    hooked = any(hasattr(weight, "ds_id") for weight in weights) or any(getattr(module, hooks) for hooks in HOOK_DICTS)
    return "a hook on it gathers its weight, or would be lost" if hooked or "_hf_hook" in module.__dict__ else None


def _why_left(name: str, chain: list[nn.Module], linear: nn.Linear) -> str | None:
    """Return why a layer that is neither the LM head nor shared stays as it is, or None."""
    weight, parent = linear.weight, chain[-1]
    if (reason := _why_weights_left(chain, linear, [weight])) is not None:
        return reason
    if (replaced := slot_of(linear)[1]) is not None:
        return replaced
    around = [module for module in chain if _is(module, _LAYER)]
    if around and (around != [parent] or names_of(own_class(parent)) != _LORA):
        return f"{'.'.join(names_of(own_class(around[0])))} of PEFT has code of its own for it"
    called, caller = name.split(".")[-2 if around else -1], chain[-2] if around else parent
    if called in _ROUTERS[0] or any(word in own_class(caller).__name__ for word in _ROUTERS[1]):
        return "it chooses experts, and a rounding may change which"
    if called in _READ_BY_MIXERS and hasattr(caller, "ssm_state_size"):
        return "a state-space mixer hands its weight to a kernel, which would take numbers in 16 bits"
    return None
