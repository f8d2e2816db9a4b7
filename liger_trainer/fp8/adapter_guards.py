"""What PEFT must not do to a base in eight bits: what it writes to the weights would be lost.

PEFT's LoRA uses the weight of its base layer

- to merge adapters into it: refused here;
- to begin an adapter from it (PiSSA, OLoRA, CorDA, MiCA, LoftQ, orthogonal, LoRA-GA) or to change it (KaSA), which also
  writes it: refused here for adapters that are added later. What a model had before its base was quantised stands;
- to read it, for DoRA, or for its device and dtype when an adapter is added or loaded: works.

All that is put on a model here is found by its name in a pickle, and is copied with the model.
"""

import functools
from typing import Any, NoReturn

from torch import nn
from transformers.integrations import PeftAdapterMixin

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.head.find import base_model_of

_KNOWN_VARIANTS = ("DoraLinearVariant",)
_KNOWN_INITS = (True, False, "gaussian", "eva")
_MERGES = ("merge_and_unload", "merge_adapter")


def guard(model: nn.Module) -> None:
    """Have `model` refuse what would write to the weights of its base."""
    base = base_model_of(model)
    for layer in model.modules():
        if type(layer._modules.get("base_layer")) is FrozenFloat8Linear:
            layer.__dict__["merge"] = refuse_merge
    tuner = model._modules.get("base_model")
    if tuner is not None and hasattr(type(tuner), "inject_adapter"):
        tuner.__dict__.update(dict.fromkeys(_MERGES, refuse_merge))
        tuner.__dict__["inject_adapter"] = functools.partial(_inject_adapter, tuner)
    for module in base.modules():  # also the decoder of a model, or its vision tower
        if not any(type(part) is FrozenFloat8Linear for part in module.modules()):
            continue
        if isinstance(module, PeftAdapterMixin):  # transformers has a way of its own, past the tuner
            module.__dict__["add_adapter"] = functools.partial(_add_adapter, module)
        if hasattr(type(module), "save_pretrained") and module is not model:
            module.__dict__["save_pretrained"] = refuse_saving  # with adapters inside, a model saves these alone


def refuse_merge(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of all methods of PEFT that add an adapter to the weights of the base."""
    raise RuntimeError(
        "The base of this model has eight bits (fp8), into which no adapter can be merged. Save the adapter, load the "
        "original model in 16 bits, and merge there: PeftModel.from_pretrained(original, adapter).merge_and_unload(), "
        "or liger-trainer merge."
    )


def refuse_saving(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of the `save_pretrained` of the base, and of models that are parts of it."""
    raise RuntimeError(
        "The base of this model has eight bits (fp8), which transformers would load as if they were its weights. Save "
        "the adapter, with the save_pretrained of the PEFT model or with trainer.save_model; the original model is "
        "unchanged where it was loaded from."
    )


def _inject_adapter(tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """PEFT's `inject_adapter`, for adapters that do not begin from the weights of the base."""
    _refuse_reading(model, tuner.peft_config[adapter_name], adapter_name)
    return type(tuner).inject_adapter(tuner, model, adapter_name, *args, **kwargs)


def _add_adapter(model: Any, adapter_config: Any, adapter_name: str | None = None) -> None:
    """The `add_adapter` of transformers, for the same adapters. PEFT refuses most of the others, too, but when the
    model has a part of them already."""
    _refuse_reading(model, adapter_config, adapter_name or "default")
    type(model).add_adapter(model, adapter_config, adapter_name)


def _refuse_reading(model: nn.Module, config: Any, adapter_name: str) -> None:
    """ValueError if an adapter of `config` begins from the weights of the base, or trains copies of its layers."""
    begins = getattr(config, "init_lora_weights", True)
    changes = getattr(config, "kasa_config", None) is not None
    if begins not in _KNOWN_INITS or changes:
        what = "kasa_config is set" if changes else f"init_lora_weights is {begins!r}"
        raise ValueError(
            f"{what} for the adapter {adapter_name!r}, which reads the weights of the base, but these have eight bits "
            "(fp8). Add the adapter before the trainer is built, or set init_lora_weights to True."
        )
    for copied in getattr(config, "modules_to_save", None) or ():
        for name, module in model.named_modules():
            around = name.split(".") if type(module) is FrozenFloat8Linear else []
            if any(".".join(around[: k + 1]).endswith(copied) for k in range(len(around))):
                raise ValueError(
                    f"modules_to_save has {copied!r} for the adapter {adapter_name!r}, which would train a copy of "
                    f"{name}, but that has eight bits (fp8). Add the adapter before the trainer is built, or give it a "
                    "LoRA there, by target_modules."
                )


def unknown_variant(layer: nn.Module) -> str | None:
    """The name of a variant of LoRA that an adapter of `layer` is, unless that is known to read no bits."""
    names = [type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()]
    return next((name for name in names if name not in _KNOWN_VARIANTS), None)


def refuse_merged(layer: nn.Module, name: str) -> None:
    """ValueError if `layer` holds the base layer `name`, and has an adapter merged into it."""
    if getattr(layer, "merged_adapters", None):
        raise ValueError(
            f"The adapters {layer.merged_adapters} are merged into {name}, from which they could not be taken out in "
            "eight bits. Call unmerge_adapter() before the trainer is built, or leave out fp8."
        )
