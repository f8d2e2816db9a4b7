"""The options `fp8` and `fp8_recipe`: torchao's layers by accelerate, or a frozen base in eight bits under adapters.

Arguments or a launcher ask for accelerate's `mixed_precision: fp8`, with torchao. `accelerate launch` hands its
`mixed_precision` on in a variable, which the trainer's own `bf16` overrides. TRL's configs set `bf16` by default, so
fp8 would be lost without a word.

With adapters, the frozen base is put into eight bits once, when the trainer is built, and so is a model that is frozen
as a whole under Medusa heads. accelerate would convert what is trained as well, so it is told the precision of
autocast: bf16 unless the user has switched it off.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from liger_trainer.feature import Feature
from liger_trainer.fp8.layers import configs_of, nominated
from liger_trainer.fp8.quantize_base import OPERATION, prepare_for_shards, quantize_base, quantized_before
from liger_trainer.head.module import base_model_of
from liger_trainer.instance.report import OperationReport
from liger_triton.float8_cast import fault_of_device as fault_of_gpu


@dataclass
class Fp8Fields:
    """The fields of fp8."""

    fp8: bool = field(
        default=False,
        metadata={
            "help": "Compute most products in eight bits. Results differ from bf16. accelerate converts all linear "
            "layers but the first and the last, the LM head, to torchao's when training starts. With adapters, and in "
            "stage 1 of Medusa heads, the weights of the frozen base are put into eight bits instead, which needs no "
            "torchao. It needs a GPU of compute capability 8.9 or later."
        },
    )
    fp8_recipe: str | None = field(
        default=None,
        metadata={
            "help": "With fp8 of all weights: the name of a recipe of torchao. 'tensorwise', the default: one "
            "scale for a tensor, gradients in e5m2. 'rowwise': scales by row, gradients in e4m3. 'rowwise_with_gw_hp': "
            "the same, with the gradients of weights computed in 16 bits."
        },
    )


class Fp8(Feature):
    """`fp8`, of all weights or of a frozen base."""

    def settle(self, args: Any) -> None:
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
                    f"fp8 is true, and {name} is {getattr(args, name)!r}, with which it does not work. Remove one."
                )

    def check(self, args: Any) -> None:
        """Tell accelerate, by way of the arguments."""
        if args.fp8:
            args.mixed_precision = "fp8"
        if args.fp8_recipe is not None:
            _check_recipe(args)

    @contextmanager
    def around_accelerator(self, trainer: Any) -> Iterator[None]:
        """Decide what fp8 is for `trainer`. For a frozen base, ask the accelerator for autocast's precision alone."""
        args, model = trainer.args, getattr(trainer, "model", None)
        is_base = _has_adapters(model) or trainer.freezes_model
        asked = trainer.uses_liger and str(args.mixed_precision) == "fp8" and is_base
        trainer.freezes_in_eight_bits = asked
        if not asked:
            if getattr(args, "fp8", False) and importlib.util.find_spec("torchao") is None:
                raise ValueError(
                    "fp8 is true, which needs torchao for a model without adapters: pip install torchao, or set fp8 to "
                    "false."
                )
            yield
            if trainer.uses_liger:
                prepare(args, trainer.accelerator)
            return
        if (recipe := getattr(args, "fp8_recipe", None)) is not None:
            raise ValueError(
                f"fp8_recipe is {recipe!r}, and the base of the model is frozen, for which fp8 has no recipes. Remove "
                "fp8_recipe, or train all weights."
            )
        precision = args.mixed_precision
        # TRL's configs have None for a `bf16` that is unset, and make True of it, so that False is the user's word
        switched_off = type(args).__dataclass_fields__["bf16"].default is None and args.bf16 is False
        args.mixed_precision = "no" if switched_off else "bf16"
        try:
            yield
        finally:
            args.mixed_precision = precision

    def before_patch(self, model: nn.Module, trainer: Any) -> dict[str, OperationReport]:
        """Put the base of `model` into eight bits if `trainer` asks for it, before anything holds its layers.

        This cannot be undone, so whatever has to be refused is refused before. If building the trainer fails later,
        another trainer can go on with this base.
        """
        if not trainer.freezes_in_eight_bits:
            before = quantized_before(model)  # by an earlier trainer
            if before.swapped and trainer.is_fsdp_enabled:
                prepare_for_shards(model)
            return {OPERATION: before} if before.swapped else {}
        _refuse_elsewhere(trainer, model)
        report = quantize_base(model, trainer.args.device)
        if trainer.is_fsdp_enabled:
            prepare_for_shards(model)
        if not report.swapped:
            reasons = "; ".join(sorted(set(report.skipped.values()))) or "it has no linear layers"
            raise ValueError(
                f"fp8 is asked for, but no layer of the base of {type(base_model_of(model)).__name__} can be put into "
                f"eight bits ({reasons}). Leave out fp8."
            )
        return {OPERATION: report}

    def check_trainer(self, trainer: Any) -> None:
        """Refuse torchao's fp8 where the device has no fp8, or where adapters would be converted."""
        if not trainer.uses_liger:
            return
        converts = handler_of(trainer.accelerator)
        configs = [*configs_of(trainer.model), *([] if converts is None else [converts.config])]
        fault = fault_of_device(trainer.args.device) if any(not config.emulate for config in configs) else None
        if fault is not None:
            raise ValueError(
                f"torchao's fp8 is asked for (fp8, mixed_precision, or convert_to_float8_training), but {fault}. Use "
                "bf16, or take a GPU of compute capability 8.9 or later: Ada, Hopper, Blackwell."
            )
        if converts is not None and converts.module_filter_func is None and _has_adapters(trainer.model):
            raise ValueError(
                "fp8 is asked for, and the model, which comes from model_init, has adapters, which accelerate would "
                "convert too. Pass the model itself to the trainer, in place of model_init."
            )
        if converts is not None:
            _refuse_no_conversion(trainer.model, converts)


def _check_recipe(args: Any) -> None:
    given = f"fp8_recipe is {args.fp8_recipe!r}"
    if str(args.mixed_precision) != "fp8" or not args.use_liger:
        missing, mend = ("fp8 is false", "fp8") if args.use_liger else ("use_liger is False", "use_liger and fp8")
        raise ValueError(f"{given}, and {missing}, so that it has no effect. Set {mend} to true, or remove fp8_recipe.")
    if importlib.util.find_spec("torchao") is None:
        return  # `around_accelerator` says so
    names = [recipe.value for recipe in importlib.import_module("torchao.float8").Float8LinearRecipeName]
    if args.fp8_recipe not in names:
        raise ValueError(f"{given}; expected one of {', '.join(map(repr, names))}.")


def fault_of_device(device: torch.device) -> str | None:
    """Return why `device` cannot train in eight bits, or None."""
    return f"{device} is no GPU" if device.type == "cpu" else fault_of_gpu(device)


def handler_of(accelerator: Any) -> Any:
    """Return accelerate's settings of torchao's fp8, or None if it converts no models."""
    return getattr(accelerator, "ao_recipe_handler", None) if str(accelerator.mixed_precision) == "fp8" else None


def prepare(args: Any, accelerator: Any) -> None:
    """Have accelerate convert with the recipe that `args` name, and leave weights to FSDP2 in 16 bits.

    The rest of its config stays as far as the recipe allows. By default accelerate 1.15 wraps each weight, sharded or
    not, so that FSDP2 gathers it in eight bits. Without FSDP2 the wrapper is a new parameter, unknown to the optimizer:
    no layer in fp8 would train.
    """
    handler, name = handler_of(accelerator), getattr(args, "fp8_recipe", None)
    if handler is None:
        return
    config = before = handler.config
    if name is not None:
        config = importlib.import_module("torchao.float8").Float8LinearConfig.from_recipe_name(name)
    handler.config = replace(config, pad_inner_dim=before.pad_inner_dim, enable_fsdp_float8_all_gather=False)


def _has_adapters(model: Any) -> bool:
    """Return whether `model` has adapters of PEFT, around it or inside."""
    return bool(getattr(model, "peft_config", None))


def _refuse_elsewhere(trainer: Any, model: nn.Module) -> None:
    args, base = trainer.args, base_model_of(model)
    fault = fault_of_device(args.device)
    quantised = any(getattr(base, name, False) for name in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit"))
    method = getattr(getattr(base, "quantization_method", None), "value", "a method of its own")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    refused = (
        (fault, fault, "Use bf16, or take a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"),
        (
            plugin is not None and plugin.fsdp_version != 2,
            "fsdp_version is 1, which flattens weights of eight bits and of 16 into one tensor",
            "Set fsdp_version to 2",
        ),
        (
            getattr(trainer, "is_deepspeed_enabled", False),
            "DeepSpeed (deepspeed) is to shard the weights of a frozen base",
            "Train on one GPU, with DDP or with FSDP2",
        ),
        (
            quantised,
            f"the base is quantised already ({method})",
            "Load it in 16 bits (without load_in_4bit, load_in_8bit and quantization_config)",
        ),
        (
            getattr(args, "use_vllm", False),
            "use_vllm is True, for which TRL merges the adapters into the base in every step",
            "Set use_vllm to False",
        ),
    )
    for is_refused, what, mend in refused:
        if is_refused:
            raise ValueError(f"fp8 is asked for, but {what}. {mend}, or leave out fp8.")


def _refuse_no_conversion(model: nn.Module, handler: Any) -> None:
    """Raise if accelerate would convert no layer, which would then train in 16 bits without a word."""
    chooses = handler.module_filter_func
    if chooses is None:
        ao = importlib.import_module("accelerate.utils.ao")
        first_and_last = list(ao.find_first_last_linear_layers(model))
        chooses = functools.partial(ao.filter_linear_layers, layers_to_filter=first_and_last)
    if not any(nominated(m) or (isinstance(m, nn.Linear) and chooses(m, name)) for name, m in model.named_modules()):
        raise ValueError(
            f"fp8 is asked for, but accelerate would convert no layer of {type(base_model_of(model)).__name__}: it "
            "takes linear layers whose widths are multiples of 16, but for the first and the last. Leave out fp8."
        )
