"""The options `fp8` and `fp8_recipe`: accelerate converts to torchao's layers, or a frozen base is quantized to FP8.

A model that is trained as a whole is converted by accelerate (`mixed_precision: fp8`, with torchao). The arguments or
`accelerate launch` ask for it. The launcher passes its `mixed_precision` in an environment variable, and the trainer's
`bf16` overrides that variable. TRL's configs set `bf16` by default, so this feature reads the variable first.

A frozen base under adapters, or under Medusa heads, is quantized once, when the trainer is built. accelerate would also
convert the trained layers, so it only gets the precision of autocast: bf16, or none if the user set `bf16: false`.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from liger_trainer.feature import Feature, FeatureTrainer
from liger_trainer.fp8.layers import configs_of, is_candidate
from liger_trainer.fp8.quantize_base import OPERATION, prepare_for_shards, quantize_base, quantized_before
from liger_trainer.head.module import base_model_of
from liger_trainer.patching.core.report import OperationReport
from liger_triton.float8_cast import fault_of_device as fault_of_gpu


@dataclass
class Fp8Fields:
    """Fields that switch FP8 on."""

    fp8: bool = field(
        default=False,
        metadata={
            "help": "Run most matmuls in FP8. Results differ from bf16. accelerate converts all linear layers to "
            "torchao's when training starts, except the first one and the last one (the LM head). With adapters, and "
            "in stage 1 of Medusa heads, the frozen base is quantized to FP8 instead; torchao is not needed then. "
            "Needs a GPU of compute capability 8.9 or later."
        },
    )
    fp8_recipe: str | None = field(
        default=None,
        metadata={
            "help": "torchao's recipe, for fp8 without adapters. 'tensorwise', the default: one scale per tensor, "
            "gradients in e5m2. 'rowwise': one scale per row, gradients in e4m3. 'rowwise_with_gw_hp': the same, with "
            "weight gradients computed in 16-bit."
        },
    )


class Fp8Arguments(Protocol):
    """The trainer arguments that FP8 reads. It writes the first two."""

    fp8: bool
    mixed_precision: str
    bf16: bool | None
    device: torch.device
    fp16: bool
    fp8_recipe: str | None
    use_liger: bool


class Fp8Trainer(FeatureTrainer, Protocol):
    """The trainer attributes that FP8 reads. It writes `freezes_in_fp8`."""

    args: Fp8Arguments
    model: nn.Module
    freezes_model: bool
    freezes_in_fp8: bool


class Fp8(Feature[Fp8Arguments, Fp8Trainer]):
    """Sets up `fp8` for a trained model or for a frozen base."""

    def resolve(self, args: Fp8Arguments) -> None:
        """Turn fp8 on if a launcher asks for it and `bf16` is unset."""
        if not isinstance(args.fp8, bool):
            raise ValueError(f"fp8 is {args.fp8!r}; expected true or false.")
        by_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "fp8"
        if args.use_liger is True and by_launcher and args.bf16 is None and not args.fp16:
            args.fp8 = True
        others = {"use_liger": not args.use_liger, "fp16": args.fp16, "deepspeed": getattr(args, "deepspeed", None)}
        for name, is_refused in others.items():
            if args.fp8 and is_refused:
                raise ValueError(
                    f"fp8 is true, but it does not work with {name} = {getattr(args, name)!r}. Remove one of the two."
                )

    def check(self, args: Fp8Arguments) -> None:
        """Set `mixed_precision` for accelerate, and check `fp8_recipe`."""
        if args.fp8:
            args.mixed_precision = "fp8"
        if args.fp8_recipe is not None:
            _check_recipe(args)

    @contextmanager
    def around_accelerator(self, trainer: Fp8Trainer) -> Iterator[None]:
        """Choose between torchao's layers and a frozen FP8 base, and hide `fp8` from accelerate for a frozen base."""
        args = trainer.args
        has_frozen_base = _has_adapters(getattr(trainer, "model", None)) or trainer.freezes_model
        quantizes_base = trainer.uses_liger and str(args.mixed_precision) == "fp8" and has_frozen_base
        trainer.freezes_in_fp8 = quantizes_base
        if not quantizes_base:
            if getattr(args, "fp8", False) and importlib.util.find_spec("torchao") is None:
                fault = fault_of_device(args.device)  # then installing torchao would not help
                also = "" if fault is None else f" It also needs a GPU with fp8, but {fault}."
                raise ValueError(
                    "fp8 is true, which needs torchao for a model without adapters: pip install torchao, or set fp8 to "
                    f"false.{also}"
                )
            yield
            if trainer.uses_liger:
                prepare(args, trainer.accelerator)
            return
        recipe = getattr(args, "fp8_recipe", None)
        if recipe is not None:
            raise ValueError(
                f"fp8_recipe is {recipe!r}, but the base of the model is frozen, and recipes are for trained weights. "
                "Remove fp8_recipe, or train all weights."
            )
        precision = args.mixed_precision
        # TRL's configs default `bf16` to None and turn None into True, so there False was set by the user. Trainer's
        # default is False, which says nothing.
        stock: Any = type(args)
        bf16_is_off = stock.__dataclass_fields__["bf16"].default is None and args.bf16 is False
        args.mixed_precision = "no" if bf16_is_off else "bf16"
        try:
            yield
        finally:
            args.mixed_precision = precision

    def before_patch(self, model: nn.Module, trainer: Fp8Trainer) -> dict[str, OperationReport]:
        """Quantize the frozen base of `model` to FP8 if `trainer` asks for it, before patches refer to its layers.

        Quantizing cannot be undone, so everything is checked first. If building the trainer fails later, another
        trainer can use the quantized base.
        """
        if not trainer.freezes_in_fp8:
            report = quantized_before(model)  # by an earlier trainer
            if report.swapped and trainer.is_fsdp_enabled:
                prepare_for_shards(model)
            return {OPERATION: report} if report.swapped else {}
        _check_frozen_base(trainer, model)
        report = quantize_base(model, trainer.args.device)
        if trainer.is_fsdp_enabled:
            prepare_for_shards(model)
        if not report.swapped:
            reasons = "; ".join(sorted(set(report.skipped.values()))) or "it has no linear layers"
            raise ValueError(
                f"fp8 is asked for, but no layer of the base of {type(base_model_of(model)).__name__} can be quantized "
                f"to fp8 ({reasons}). Leave out fp8."
            )
        return {OPERATION: report}

    def check_trainer(self, trainer: Fp8Trainer) -> None:
        """Raise if torchao's FP8 is asked for on a device without FP8, or if accelerate would convert adapters."""
        if not trainer.uses_liger:
            return
        handler = handler_of(trainer.accelerator)
        configs = configs_of(trainer.model)
        if handler is not None:
            configs.append(handler.config)
        needs_fp8 = any(not config.emulate for config in configs)
        fault = fault_of_device(trainer.args.device) if needs_fp8 else None
        if fault is not None:
            raise ValueError(
                f"torchao's fp8 is asked for (fp8, mixed_precision, or convert_to_float8_training), but {fault}. Use "
                "bf16, or take a GPU of compute capability 8.9 or later: Ada, Hopper, Blackwell."
            )
        if handler is None:
            return
        if handler.module_filter_func is None and _has_adapters(trainer.model):
            raise ValueError(
                "fp8 is asked for, but the model from model_init has adapters, and accelerate would convert them too. "
                "Pass the model to the trainer instead of model_init."
            )
        _check_some_layer_converts(trainer.model, handler)


def _check_recipe(args: Fp8Arguments) -> None:
    is_recipe = f"fp8_recipe is {args.fp8_recipe!r}"
    if not args.use_liger:
        raise ValueError(
            f"{is_recipe}, but it has no effect: use_liger is False. Set use_liger and fp8 to true, or remove "
            "fp8_recipe."
        )
    if str(args.mixed_precision) != "fp8":
        raise ValueError(f"{is_recipe}, but it has no effect: fp8 is false. Set fp8 to true, or remove fp8_recipe.")
    if importlib.util.find_spec("torchao") is None:
        return  # `around_accelerator` raises, unless the base is frozen
    names = [recipe.value for recipe in importlib.import_module("torchao.float8").Float8LinearRecipeName]
    if args.fp8_recipe not in names:
        raise ValueError(f"{is_recipe}; expected one of {', '.join(map(repr, names))}.")


def fault_of_device(device: torch.device) -> str | None:
    """Return why `device` cannot train in FP8, or None."""
    return f"{device} is not a GPU" if device.type == "cpu" else fault_of_gpu(device)


def handler_of(accelerator: Accelerator) -> Any:
    """Return accelerate's settings for torchao's FP8, or None if it converts no models."""
    return getattr(accelerator, "ao_recipe_handler", None) if str(accelerator.mixed_precision) == "fp8" else None


def prepare(args: Fp8Arguments, accelerator: Accelerator) -> None:
    """Set the recipe that accelerate converts with, and have FSDP2 all-gather 16-bit weights.

    accelerate 1.15 wraps every weight for an FP8 all-gather by default, sharded or not. Without FSDP2 the wrapper is a
    new parameter that the optimizer does not know, so no FP8 layer would train.
    """
    handler = handler_of(accelerator)
    if handler is None:
        return
    old_config = handler.config
    config = old_config
    recipe = getattr(args, "fp8_recipe", None)
    if recipe is not None:
        config = importlib.import_module("torchao.float8").Float8LinearConfig.from_recipe_name(recipe)
    handler.config = replace(config, pad_inner_dim=old_config.pad_inner_dim, enable_fsdp_float8_all_gather=False)


def _has_adapters(model: nn.Module) -> bool:
    """Return whether `model` has PEFT adapters, as a `PeftModel` or injected."""
    return bool(getattr(model, "peft_config", None))


def _check_frozen_base(trainer: Fp8Trainer, model: nn.Module) -> None:
    """Raise if the device, the way of sharding, the base or TRL's vLLM does not work with a frozen FP8 base."""
    base = base_model_of(model)
    fault = fault_of_device(trainer.args.device)
    flags = ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")
    is_quantized = any(getattr(base, name, False) for name in flags)
    method = getattr(getattr(base, "quantization_method", None), "value", "a custom method")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    refusals = (
        (fault, fault, "Use bf16, or take a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"),
        (
            plugin is not None and plugin.fsdp_version != 2,
            "fsdp_version is 1, and FSDP1 flattens fp8 and 16-bit weights into one tensor",
            "Set fsdp_version to 2",
        ),
        (
            getattr(trainer, "is_deepspeed_enabled", False),
            "DeepSpeed (deepspeed) cannot shard the frozen fp8 base",
            "Train on one GPU, with DDP or with FSDP2",
        ),
        (
            is_quantized,
            f"the base is already quantized ({method})",
            "Load it in 16-bit (without load_in_4bit, load_in_8bit and quantization_config)",
        ),
        (
            getattr(trainer.args, "use_vllm", False),
            "use_vllm is True, and TRL then merges the adapters into the base in every step",
            "Set use_vllm to False",
        ),
    )
    for is_refused, problem, remedy in refusals:
        if is_refused:
            raise ValueError(f"fp8 is asked for, but {problem}. {remedy}, or leave out fp8.")


def _check_some_layer_converts(model: nn.Module, handler: Any) -> None:
    """Raise if accelerate would convert no layer. The model would silently train in 16-bit."""
    converts = handler.module_filter_func
    if converts is None:
        ao = importlib.import_module("accelerate.utils.ao")
        first_and_last = list(ao.find_first_last_linear_layers(model))
        converts = functools.partial(ao.filter_linear_layers, layers_to_filter=first_and_last)
    for name, module in model.named_modules():
        if is_candidate(module) or (isinstance(module, nn.Linear) and converts(module, name)):
            return
    raise ValueError(
        f"fp8 is asked for, but accelerate would convert no layer of {type(base_model_of(model)).__name__}: it only "
        "takes linear layers with widths that are multiples of 16, except the first and the last one. Leave out fp8."
    )
