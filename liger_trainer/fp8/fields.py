"""The fields `fp8`, which is accelerate's `mixed_precision: fp8` with torchao, asked for in the arguments or by a
launcher, and `fp8_recipe`, which is a name of torchao's.

For a model with adapters it means something else, which `frozen_base.py` does.

`accelerate launch` hands its `mixed_precision` on in a variable, which the trainer's own `bf16` overrides. TRL's
configs set `bf16` by default, so that fp8 would be lost without a word.
"""

import functools
import importlib.util
import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from liger_triton.float8_cast import fault_of_device as fault_of_gpu


def asked_by_launcher() -> bool:
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "fp8"


def settle(args: Any) -> None:
    """Let a launcher that asks for fp8 be heard where `bf16` is unset. Call this before the stock class looks."""
    if not isinstance(args.fp8, bool):
        raise ValueError(f"fp8 is {args.fp8!r}; expected true or false.")
    if args.use_liger is True and asked_by_launcher() and args.bf16 is None and not args.fp16:
        args.fp8 = True
    if not args.fp8:
        return
    others = {"use_liger": not args.use_liger, "fp16": args.fp16, "deepspeed": getattr(args, "deepspeed", None)}
    for name, set_otherwise in others.items():
        if set_otherwise:
            raise ValueError(
                f"fp8 is true, and {name} is {getattr(args, name)!r}, with which it does not work. Remove one of them."
            )


def apply(args: Any) -> None:
    """Tell accelerate, by way of the arguments. Call after the stock class has looked."""
    if args.fp8:
        args.mixed_precision = "fp8"
    if args.fp8_recipe is not None:
        _check_recipe(args)


def _check_recipe(args: Any) -> None:
    given = f"fp8_recipe is {args.fp8_recipe!r}"
    if str(args.mixed_precision) != "fp8" or not args.use_liger:
        missing, mend = ("fp8 is false", "fp8") if args.use_liger else ("use_liger is False", "use_liger and fp8")
        raise ValueError(f"{given}, and {missing}, so that it has no effect. Set {mend} to true, or remove fp8_recipe.")
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"{given}, which is a name of torchao's: pip install torchao. Or remove fp8_recipe.")
    names = [recipe.value for recipe in importlib.import_module("torchao.float8").Float8LinearRecipeName]
    if args.fp8_recipe not in names:
        raise ValueError(f"{given}; expected one of {', '.join(map(repr, names))}.")


def refuse_without_torchao(args: Any) -> None:
    """ValueError if fp8 is asked for and torchao is missing, which a frozen base alone can do without."""
    if getattr(args, "fp8", False) and importlib.util.find_spec("torchao") is None:
        raise ValueError(
            "fp8 is true, which needs torchao for a model without adapters: pip install torchao. Or set fp8 to false."
        )


def fault_of_device(device: torch.device) -> str | None:
    """Why nothing should be trained in eight bits on `device`; None where it can be."""
    return f"{device} is no GPU" if device.type == "cpu" else fault_of_gpu(device)


def handler_of(accelerator: Any) -> Any:
    """accelerate's settings of torchao's fp8, if it is going to convert models; None if it is not."""
    return getattr(accelerator, "ao_recipe_handler", None) if str(accelerator.mixed_precision) == "fp8" else None


def layers_to_convert(accelerator: Any, model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of `model` that accelerate is going to convert when training starts, by their names."""
    handler = handler_of(accelerator)
    if handler is None:
        return {}
    chooses = handler.module_filter_func
    if chooses is None:
        ao = importlib.import_module("accelerate.utils.ao")
        first_and_last = list(ao.find_first_last_linear_layers(model))
        chooses = functools.partial(ao.filter_linear_layers, layers_to_filter=first_and_last)
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and chooses(m, name)}


def prepare(args: Any, accelerator: Any) -> None:
    """Have accelerate convert with the recipe that `args` name, and gather weights in fp8 only where some are gathered.

    What else its config says stays as far as the recipe allows. accelerate's default wraps each weight for gathering,
    sharded or not. Without FSDP2 the wrapper is a new parameter, which the optimizer does not know: with accelerate
    1.15, no layer in fp8 would be trained, without a sign.
    """
    handler, name = handler_of(accelerator), getattr(args, "fp8_recipe", None)
    if handler is None:
        return
    config = before = handler.config
    if name is not None:
        config = importlib.import_module("torchao.float8").Float8LinearConfig.from_recipe_name(name)
    by_tensor = config.cast_config_weight.scaling_granularity.value == "tensorwise"  # others cannot be gathered in fp8
    gathers = before.enable_fsdp_float8_all_gather and by_tensor and accelerator.is_fsdp2
    handler.config = replace(config, pad_inner_dim=before.pad_inner_dim, enable_fsdp_float8_all_gather=gathers)
