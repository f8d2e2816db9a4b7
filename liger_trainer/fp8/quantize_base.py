"""Quantizes the frozen linear layers and experts of a model to FP8: the base under adapters, or a frozen model.

Layers are converted one at a time, so only one layer exists in both precisions. Trained and shared weights stay as
they are, and so do layers that PEFT wraps with another method than LoRA.

PEFT reads dequantized copies, and a write to them would be lost: merging an adapter, or starting one from the base
(PiSSA, OLoRA). The copies are read-only, so PEFT raises. DoRA only reads, and works.
"""

from collections import Counter

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from liger_trainer.fp8.frozen_experts import WEIGHTS, is_block, quantize_block
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear, FrozenFP8Module
from liger_trainer.head.module import base_model_of, modules_called_by, output_head
from liger_trainer.patching.core.binding import own_class
from liger_trainer.patching.core.hooks import HOOK_DICTS
from liger_trainer.patching.core.pattern import names_of, slot_of
from liger_trainer.patching.core.report import OperationReport
from liger_triton.float8_cast import MULTIPLE

OPERATION = "frozen_float8"

_LORA = ("peft.tuners.lora.layer", "Linear")
_LAYER = ("peft.tuners.tuners_utils", "BaseTunerLayer")
_WRAPPER = ("peft.utils.other", "AuxiliaryTrainingWrapper")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_READ_BY_MIXERS = ("x_proj", "dt_proj", "out_proj")  # GPU kernels of state-space models (Mamba) read these weights
_ROUTER_NAMES = ("gate", "router", "wg")
_ROUTER_CLASSES = ("Router", "Gating")  # parts of the class names of the modules that own a router


def quantize_base(model: nn.Module, device: torch.device | None = None) -> OperationReport:
    """Quantize the frozen linear layers and experts of `model` to FP8. Already quantized ones count as swapped.

    Args:
        model (`nn.Module`): A model with PEFT adapters, or a model without trained parameters in its base.
        device (`torch.device`, *optional*): Device that quantizes. Unset: the device of each weight.

    Raises:
        ValueError: An adapter is merged into the weights.
    """
    report = OperationReport()
    base = base_model_of(model)
    output = output_head(model)
    head = [] if output is None else modules_called_by(output)
    owners = Counter(id(parameter) for _, parameter in base.named_parameters(remove_duplicate=False))
    ancestors = _linear_layers(base)
    for name, chain in ancestors.items():  # all of them before the first layer is converted
        merged = getattr(chain[-1], "merged_adapters", None)
        if merged:
            raise ValueError(
                f"The adapters {merged} are merged into {name}, and could not be unmerged from an fp8 weight. Call "
                "unmerge_adapter() before the trainer is built, or leave out fp8."
            )
    for name, chain in ancestors.items():
        linear = base.get_submodule(name)
        if linear in head:
            reason: str | None = "it is the LM head, which is fused with the loss"
        elif type(linear) is not nn.Linear:
            reason = f"it is a {type(linear).__name__}, which may not compute x W^T + b"
        elif owners[id(linear.weight)] > 1:
            reason = "its weight is shared with another module"
        else:
            reason = _layer_reason(name, chain, linear)
        if reason is None:
            parent, _, child = name.rpartition(".")
            base.get_submodule(parent)._modules[child] = FrozenFloat8Linear.of(linear, device)
        else:
            report.skipped[name] = reason
    blocks = [(name, module) for name, module in base.named_modules() if is_block(module)]
    for name, block in blocks:
        parts = name.split(".")
        chain = [base.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
        reason = _block_reason(chain, block, owners)
        if reason is None:
            quantize_block(block, device)
        else:
            report.skipped[name] = reason
    report.swapped = quantized_before(model).swapped
    return report


def prepare_for_shards(model: nn.Module) -> None:
    """Store the FP8 weights of `model` in the dtype that FSDP2 can shard."""
    for module in base_model_of(model).modules():
        if isinstance(module, FrozenFP8Module):
            module.view_as_bf16()


def quantized_before(model: nn.Module) -> OperationReport:
    """Return a report of the layers and experts of `model` that are already FP8."""
    report = OperationReport()
    for name, module in base_model_of(model).named_modules():
        if isinstance(module, FrozenFP8Module):
            report.swapped[name] = f"e4m3 with a scale for each row, from {str(module.compute_dtype)[6:]}"
    return report


def _has_class(module: nn.Module, names: tuple[str, str]) -> bool:
    return any(names_of(cls) == names for cls in type(module).__mro__)


def _linear_layers(base: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the names of the base's linear layers, each with its ancestors from the root to the parent.

    Adapters do not count. The layers themselves are not returned: holding them would keep the replaced ones in memory.
    """
    modules = dict(base.named_modules())
    ancestors = {}
    for name, module in modules.items():
        if not isinstance(module, (nn.Linear, Conv1D)):
            continue
        parts = name.split(".")
        chain = [modules[".".join(parts[:depth])] for depth in range(len(parts))]
        if not _is_of_adapter(chain, parts):
            ancestors[name] = chain
    return ancestors


def _is_of_adapter(chain: list[nn.Module], parts: list[str]) -> bool:
    """Return whether a module belongs to PEFT instead of the base, by its ancestors and the parts of its name."""
    for ancestor, child in zip(chain, parts, strict=True):
        if _has_class(ancestor, _LAYER) and child != "base_layer":
            return True
        if _has_class(ancestor, _WRAPPER) and child != "original_module":
            return True
    return False


def _block_reason(chain: list[nn.Module], block: nn.Module, owners: Counter) -> str | None:
    """Return why a block of experts is not quantized, or None if it can be."""
    weights = [block._parameters[name] for name in WEIGHTS]
    if any(_has_class(ancestor, _LAYER) for ancestor in chain):
        return "PEFT adapts its weights, and PEFT's code needs them in 16-bit"
    if any(owners[id(weight)] > 1 for weight in weights):
        return "its weights are shared with another module"
    return _weights_reason(chain, block, weights) or slot_of(block, around=True)[1]


def _weights_reason(chain: list[nn.Module], module: nn.Module, weights: list) -> str | None:
    """Return why the `weights` of `module` are not quantized, or None if they can be."""
    if any(_has_class(ancestor, _WRAPPER) for ancestor in chain):
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
    is_gathered = any(hasattr(weight, "ds_id") for weight in weights)  # DeepSpeed ZeRO-3
    has_hooks = any(getattr(module, hooks) for hooks in HOOK_DICTS) or "_hf_hook" in module.__dict__
    if is_gathered or has_hooks:
        return "a hook on it gathers its weight, or would be lost"
    return None


def _layer_reason(name: str, chain: list[nn.Module], linear: nn.Linear) -> str | None:
    """Return why a layer is not quantized, or None if it can be. The LM head and shared layers are checked before."""
    reason = _weights_reason(chain, linear, [linear.weight]) or slot_of(linear)[1]
    if reason is not None:
        return reason
    parent = chain[-1]
    peft_layers = [module for module in chain if _has_class(module, _LAYER)]
    if peft_layers and (peft_layers != [parent] or names_of(own_class(parent)) != _LORA):
        return f"PEFT's {'.'.join(names_of(own_class(peft_layers[0])))} has its own code for it"
    if peft_layers:  # the layer is `base_layer` of a LoRA, which has its name and its place in the model
        layer_name = name.split(".")[-2]
        owner = chain[-2]
    else:
        layer_name = name.split(".")[-1]
        owner = parent
    if layer_name in _ROUTER_NAMES or any(word in own_class(owner).__name__ for word in _ROUTER_CLASSES):
        return "it chooses experts, and a rounding may change which"
    if layer_name in _READ_BY_MIXERS and hasattr(owner, "ssm_state_size"):
        return "a state-space mixer hands its weight to a kernel, which needs it in 16-bit"
    return None
