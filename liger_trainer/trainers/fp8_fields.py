"""The field `fp8`: accelerate's `mixed_precision: fp8` with torchao, asked for in the arguments or by a launcher.

For a model with adapters it means something else, which `frozen_base.py` does.

`accelerate launch` hands its `mixed_precision` on in a variable, which the trainer's own `bf16` overrides. TRL's
configs set `bf16` where nobody has, so that fp8 would be lost without a word.
"""

import importlib.util
import os
from dataclasses import replace
from typing import Any

import torch

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


def without_needless_wrappers(accelerator: Any) -> None:
    """Have weights gathered in fp8 only where weights are gathered.

    accelerate's default wraps each weight for that, sharded or not. Without FSDP2 the wrapper is a new parameter, which
    the optimizer does not know: with accelerate 1.15, no layer in fp8 would be trained, without a sign.
    """
    handler = handler_of(accelerator)
    if handler is not None and handler.config.enable_fsdp_float8_all_gather and not accelerator.is_fsdp2:
        handler.config = replace(handler.config, enable_fsdp_float8_all_gather=False)
