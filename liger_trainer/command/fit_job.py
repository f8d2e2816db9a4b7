"""From a recipe to the training whose memory `liger-trainer fit` counts."""

import os
from typing import Any

from liger_trainer.command.recipe import Recipe
from liger_trainer.command.sources import model_of
from liger_trainer.errors import RecipeError
from liger_trainer.fitting import losses, optimizers
from liger_trainer.fitting.hollow import Shape
from liger_trainer.fitting.sharding import Sharding
from liger_trainer.fitting.step import Job

LOSSES = {
    "LigerSFTTrainer": losses.of_labels,
    "LigerDPOTrainer": losses.of_pairs,
    "LigerORPOTrainer": losses.of_pairs,
    "LigerCPOTrainer": losses.of_pairs,
    "LigerKTOTrainer": losses.of_answers,
}
_WITH_REFERENCE = ("LigerDPOTrainer", "LigerKTOTrainer")
_OPTIONS_NOT_KNOWN = {"every_n_layers": 1, "offload": False, "selective": False}  # and their values without effect


def job_of(recipe: Recipe, gpus: int) -> Job:
    """The training of `recipe` on `gpus` GPUs.

    Raises:
        RecipeError: It has something of which nothing is known here.
    """
    import torch
    import trl
    from transformers import AutoConfig

    training, model = recipe.training, recipe.model
    _refuse_unknown(recipe)
    if training.optimizer_in_backward and (gpus > 1 or recipe.sharding is not None):
        raise RecipeError(
            f"{recipe.path}: optimizer_in_backward is true, which trains on one GPU only. Pass --gpus 1 and no "
            "accelerate_config that shares a model out, or --optimizer_in_backward false."
        )
    init = dict(training.model_init_kwargs or {})
    source = model_of(recipe)
    config = source.load(AutoConfig)
    name = init.get("dtype", model.dtype)
    dtype = getattr(torch, str(name), None) if name not in (None, "auto") else getattr(config, "dtype", None)
    precomputed = getattr(training, "precompute_ref_log_probs", False)
    autocast = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    return Job(
        shape=Shape(
            config, dtype or torch.float32, trl.get_peft_config(model), fp8=training.fp8,
            liger_config=training.liger_config,
            trust_remote_code=source.options.get("trust_remote_code", False),
        ),
        loss=LOSSES[recipe.entry.trainer],
        optimizer=lambda weights: optimizers.make(training, weights),
        autocast=autocast,
        sharding=_sharding(recipe, gpus, autocast),
        accumulates=training.gradient_accumulation_steps > 1,
        checkpointing=_options_of_checkpointing(recipe),
        reference=recipe.entry.trainer in _WITH_REFERENCE and not precomputed,
        budget=training.memory_budget,
        in_backward=training.optimizer_in_backward,
    )  # fmt: skip


def size_of(recipe: Recipe) -> tuple[int, int]:
    """The rows of a micro-batch, and the tokens of its longest row."""
    length = getattr(recipe.training, "max_length", None)
    if length is None:
        raise RecipeError(f"{recipe.path}: max_length is unset, so that rows have any length. Pass --max_length 2048.")
    return recipe.training.per_device_train_batch_size, length


def checkpointing_of(recipe: Recipe) -> bool | str:
    given = getattr(recipe.training, "activation_checkpointing", None)
    return bool(recipe.training.gradient_checkpointing) if given is None else given


def _options_of_checkpointing(recipe: Recipe) -> dict[str, Any]:
    """The options that PyTorch's function gets."""
    training = recipe.training
    given = getattr(training, "activation_checkpointing_kwargs", None) or training.gradient_checkpointing_kwargs
    options = dict(given or {})
    for key, without in _OPTIONS_NOT_KNOWN.items():
        value = options.pop(key, without)
        if value != without:
            raise RecipeError(
                f"{recipe.path}: activation_checkpointing_kwargs has {key}: {value}, and liger-trainer fit does not "
                "know what a step takes then. Pass --activation_checkpointing_kwargs '{\"use_reentrant\": false}' to "
                "see the step without it."
            )
    return options or {"use_reentrant": False}


def _refuse_unknown(recipe: Recipe) -> None:
    training = recipe.training
    if recipe.entry.trainer not in LOSSES:
        raise RecipeError(
            f"{recipe.path}: liger-trainer fit does not know what a step of {recipe.entry.trainer} takes. It knows "
            f"{', '.join(LOSSES)}."
        )
    off = [
        ("use_liger", training.use_liger, not training.use_liger),
        ("load_in_4bit", True, recipe.model.load_in_4bit),
        ("load_in_8bit", True, recipe.model.load_in_8bit),
        ("torch_compile", True, training.torch_compile),
        ("fp8", True, training.fp8 and not recipe.model.use_peft),  # torchao's; with adapters, it is known
        ("activation_offloading", True, getattr(training, "activation_offloading", False)),
    ]
    for key, value, given in off:
        if given:
            raise RecipeError(
                f"{recipe.path}: {key} is {value}, and liger-trainer fit does not know what a step takes then. Pass "
                f"--{key} {'true' if value is False else 'false'} to see the step without it."
            )
    if training.fp8 and recipe.sharding == "FSDP":
        raise RecipeError(
            f"{recipe.path}: fp8 is true, use_peft is true, and FSDP shards the weights, which does not work. Pass "
            "--fp8 false, or no accelerate_config that shards the model."
        )
    if training.deepspeed or recipe.sharding == "DEEPSPEED":
        raise RecipeError(
            f"{recipe.path}: the model is shared out by DeepSpeed, whose buffers liger-trainer fit does not know. Pass "
            "--accelerate_config fsdp2 to see FSDP2 in its place."
        )
    if os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1") != "1":
        raise RecipeError(
            f"{recipe.path}: rows are shared out by context parallelism, and liger-trainer fit does not know what a "
            "step takes then. Pass --accelerate_config fsdp2."
        )


def _sharding(recipe: Recipe, gpus: int, autocast: Any) -> Sharding:
    import torch

    if recipe.sharding != "FSDP":
        return Sharding("ddp" if gpus > 1 else "none", gpus)
    options = recipe.training.fsdp_config if recipe.training.fsdp else {}
    version = str(
        (options or {}).get("version", os.environ.get("FSDP_VERSION", "1" if not recipe.training.fsdp else "2"))
    )
    if version != "2":
        raise RecipeError(
            f"{recipe.path}: FSDP is of version {version}, and liger-trainer fit knows version 2 only. Set "
            "that version where FSDP is asked for, or pass --accelerate_config fsdp2."
        )
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise RecipeError(
            f"{recipe.path}: fsdp_offload_params is true, and liger-trainer fit does not know what a step takes then. "
            "Pass --accelerate_config fsdp2 to see FSDP2 without it."
        )
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    return Sharding("fsdp2", gpus, autocast, torch.float32 if autocast is not None else None, reshard)
