"""`fp8` for a model with adapters: its frozen base is put into eight bits, once, when the trainer is built.

accelerate's own fp8 would convert the matrices of the adapters as well, so it is told another precision: that of
autocast, bf16 unless the user has switched it off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from liger_trainer.fp8 import fields as fp8_fields
from liger_trainer.fp8.quantize_base import OPERATION, quantize_base, quantized_before
from liger_trainer.head.find import base_model_of
from liger_trainer.instance.report import OperationReport


def has_adapters(model: Any) -> bool:
    """Whether `model` has adapters of PEFT, around it or inside."""
    return bool(getattr(model, "peft_config", None))


@contextmanager
def settled(trainer: Any) -> Iterator[None]:
    """Decide what the fp8 of `trainer` is, before its accelerator is made.

    Within the block, in which that happens, its arguments ask for the precision of autocast if the base of its model is
    to be in eight bits.
    """
    args, model = trainer.args, getattr(trainer, "model", None)
    asked = trainer.uses_liger and str(args.mixed_precision) == "fp8" and has_adapters(model)
    trainer.freezes_in_eight_bits = asked
    if not asked:
        fp8_fields.refuse_without_torchao(args)
        yield
        if trainer.uses_liger:
            fp8_fields.prepare(args, trainer.accelerator)
        return
    if (recipe := getattr(args, "fp8_recipe", None)) is not None:
        raise ValueError(
            f"fp8_recipe is {recipe!r}, and the model has adapters, with which fp8 puts the frozen base into "
            "eight bits in a way of its own. Remove fp8_recipe, or train all weights."
        )
    precision = args.mixed_precision
    # TRL's configs have None for a `bf16` that is unset, and make True of it, so that False is what the user has said.
    switched_off = type(args).__dataclass_fields__["bf16"].default is None and args.bf16 is False
    args.mixed_precision = "no" if switched_off else "bf16"
    try:
        yield
    finally:
        args.mixed_precision = precision


def quantize(trainer: Any, model: nn.Module) -> dict[str, OperationReport]:
    """Put the base of `model` into eight bits if `trainer` is to do so. Returns what goes into the trainer's report.

    This cannot be undone, so that all that is refused on its account is refused before. A trainer that fails later,
    while it is built, leaves the model with such a base, on which another one goes on.

    Raises:
        ValueError: The GPU, the model or how it is to be shared out does not go with it, or no layer can be converted.
    """
    if not trainer.freezes_in_eight_bits:
        before = quantized_before(model)  # by an earlier trainer
        return {OPERATION: before} if has_adapters(model) and before.swapped else {}
    _refuse_elsewhere(trainer, model)
    report = quantize_base(model)
    if not report.swapped:
        reasons = "; ".join(sorted(set(report.skipped.values()))) or "it has no linear layers"
        raise ValueError(
            f"fp8 is asked for, but no layer of the base of {type(base_model_of(model)).__name__} can be put into "
            f"eight bits ({reasons}). Leave out fp8."
        )
    return {OPERATION: report}


def _refuse_elsewhere(trainer: Any, model: nn.Module) -> None:
    args, base = trainer.args, base_model_of(model)
    fault = fp8_fields.fault_of_device(args.device)
    quantised = any(getattr(base, name, False) for name in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit"))
    method = getattr(getattr(base, "quantization_method", None), "value", "a method of its own")
    shards, one = "is to shard the weights of a model with adapters", "Train on one GPU or with DDP"
    refused = (
        (fault, fault, "Use bf16, or take a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"),
        (getattr(trainer, "is_fsdp_enabled", False), f"FSDP (fsdp) {shards}", one),
        (getattr(trainer, "is_deepspeed_enabled", False), f"DeepSpeed (deepspeed) {shards}", one),
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
