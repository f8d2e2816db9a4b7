"""Turns a recipe into the `TrainSpec` that `liger-trainer fit` estimates."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from liger_trainer.command.recipe.model_source import ModelSource, quantization_of
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.recipe.trainers import TRAINERS
from liger_trainer.command.rows.sources import model_of
from liger_trainer.errors import RecipeError, refusal
from liger_trainer.fitting import losses, optimizers
from liger_trainer.fitting.images import RowImages, row_images
from liger_trainer.fitting.meta_model import ModelSpec
from liger_trainer.fitting.sharding import Sharding
from liger_trainer.fitting.states import usual_documents
from liger_trainer.fitting.step import TrainSpec
from liger_trainer.memory.host_inputs import OPTION
from liger_trainer.trainers.cuda_graphs import arguments_reason

LOSSES = {
    "LigerSFTTrainer": losses.of_labels,
    "LigerDPOTrainer": losses.of_pairs,
    "LigerORPOTrainer": losses.of_pairs,
    "LigerCPOTrainer": losses.of_pairs,
    "LigerKTOTrainer": losses.of_answers,
}
_IN_FP32 = ("LigerORPOTrainer", "LigerCPOTrainer")  # these trainers keep weights that are not 4-bit in fp32
_WITH_REFERENCE = ("LigerDPOTrainer", "LigerKTOTrainer")
_OPTIONS_NOT_KNOWN = {"every_n_layers": 1, "selective": False}  # and their values without effect


def train_spec_of(recipe: Recipe, gpus: int, images: Sequence[tuple[int, int]] = (), fla: bool = True) -> TrainSpec:
    """Return the `TrainSpec` of `recipe` on `gpus` GPUs. RecipeError if `fit` cannot estimate a part of it.

    Args:
        recipe (`Recipe`): The recipe.
        gpus (`int`): The GPUs that share the model.
        images (`Sequence`, *optional*): The sizes of the images of a row, in pixels.
        fla (`bool`, *optional*, defaults to `True`): Whether flash-linear-attention is installed in the training.
    """
    import torch
    import trl
    from transformers import BitsAndBytesConfig

    training, model = recipe.training, recipe.model
    _refuse_unknown(recipe, gpus)
    init = dict(training.model_init_kwargs or {})
    source = model_of(recipe)
    config = _load_config(source)
    stored = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if stored not in (None, "mxfp4"):
        raise _unknown(recipe, f"a checkpoint in {stored}")
    quantization = quantization_of(config, model)
    if isinstance(quantization, BitsAndBytesConfig) and importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            f"{recipe.path}: load_in_4bit is true, and liger-trainer fit needs bitsandbytes to build 4-bit layers. Run "
            "`pip install bitsandbytes`, which needs no GPU."
        )
    name = init.get("dtype", model.dtype)
    dtype = getattr(torch, str(name), None) if name not in (None, "auto") else getattr(config, "dtype", None)
    precomputed = getattr(training, "precompute_ref_log_probs", False)
    autocast = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    model_spec = ModelSpec(
        config,
        dtype or torch.float32,
        trl.get_peft_config(model),
        fp8=training.fp8,
        quantization=quantization,
        liger_config=training.liger_config,
        trust_remote_code=source.options.get("trust_remote_code", False),
    )
    if images and not model_spec.has_tower:
        raise RecipeError(f"--images is given, but {source.path} is a text-only model. Leave it out.")
    return TrainSpec(
        shape=model_spec,
        loss=LOSSES[recipe.entry.trainer],
        optimizer=lambda weights: optimizers.make(training, weights),
        autocast=autocast,
        sharding=_sharding(recipe, gpus, autocast),
        accumulates=training.gradient_accumulation_steps > 1,
        checkpointing=_options_of_checkpointing(recipe),
        reference=recipe.entry.trainer in _WITH_REFERENCE and not precomputed,
        budget=training.memory_budget,
        in_backward=training.optimizer_in_backward,
        images=_row_images(source, images) if images else None,
        documents=usual_documents if getattr(training, "packing", False) else None,
        fla=fla,
    )


def _row_images(source: ModelSource, sizes: Sequence[tuple[int, int]]) -> RowImages:
    from transformers import AutoProcessor

    processor = source.load(AutoProcessor)
    try:
        return row_images(processor, sizes)
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        raise RecipeError(f"The processor of {source.path} cannot make a row from --images: {reason}") from error


def size_of(recipe: Recipe, images: RowImages | None = None) -> tuple[int, int]:
    """Return the number of rows in a micro-batch, and the tokens of its longest row."""
    length = getattr(recipe.training, "max_length", None)
    if length is None:
        raise RecipeError(
            f"{recipe.path}: max_length is unset, so rows may have any length. Pass --max_length 2048, or the number "
            "of tokens of the longest row with its pictures."
        )
    if images is not None and length < images.tokens:
        raise RecipeError(
            f"{recipe.path}: max_length is {length}, but the images of a row alone have {images.tokens} tokens. "
            f"Pass --max_length {images.tokens + 256}, or smaller --images."
        )
    return recipe.training.per_device_train_batch_size, length


def checkpointing_of(recipe: Recipe) -> bool | str:
    setting = getattr(recipe.training, "activation_checkpointing", None)
    return bool(recipe.training.gradient_checkpointing) if setting is None else setting


def may_capture(recipe: Recipe, gpus: int) -> bool:
    """Return False if the recipe rules out captured steps (`cuda_graphs`)."""
    training = recipe.training
    return training.cuda_graphs is not False and gpus == 1 and arguments_reason(training) is None


def _options_of_checkpointing(recipe: Recipe) -> dict[str, Any]:
    """Return the options for `torch.utils.checkpoint`."""
    training = recipe.training
    setting = getattr(training, "activation_checkpointing_kwargs", None) or training.gradient_checkpointing_kwargs
    options = dict(setting or {})
    for key, without in _OPTIONS_NOT_KNOWN.items():
        value = options.pop(key, without)
        if value != without:
            raise _unknown(recipe, f"activation_checkpointing_kwargs: {key}: {value}")
    return {"use_reentrant": False} | options


def _load_config(source: ModelSource) -> Any:
    """Load the config of the model. For a model that cannot be downloaded, the RecipeError says what `fit` needs."""
    from transformers import AutoConfig

    try:
        return source.load(AutoConfig)
    except RecipeError as error:
        if os.path.isdir(source.path):
            raise
        raise RecipeError(
            f"{error} For a gated or unreachable model, liger-trainer fit needs only the file config.json: "
            "save it in a folder, such as my_model/config.json, and add --model_name_or_path ./my_model."
        ) from error


def _unknown(recipe: Recipe, what: str) -> RecipeError:
    advice = " Set another value to see the step without it."
    if what == recipe.entry.trainer:
        known = ", ".join(name for name, entry in TRAINERS.items() if entry.trainer in LOSSES)
        advice = f" It knows {known}. A copy of the recipe with one of these and rows as long gives a rough estimate."
    return RecipeError(f"{recipe.path}: liger-trainer fit cannot estimate a step with {what}.{advice}")


def _refuse_unknown(recipe: Recipe, gpus: int) -> None:
    training, model = recipe.training, recipe.model
    sharded, offloads = recipe.sharding == "FSDP", os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    unknown = {
        recipe.entry.trainer: recipe.entry.trainer not in LOSSES,
        "use_liger: false": not training.use_liger,
        "load_in_4bit: true where FSDP shards the weights": model.load_in_4bit and sharded,
        f"load_in_4bit: true and {recipe.entry.trainer}": model.load_in_4bit and recipe.entry.trainer in _IN_FP32,
        "load_in_8bit: true": model.load_in_8bit,
        "torch_compile: true": training.torch_compile,
        "fp8: true and use_peft: false": training.fp8 and not model.use_peft,
        "offload: true where FSDP shards the weights": sharded and bool(_options_of_checkpointing(recipe).get(OPTION)),
        "train_mtp: true": getattr(training, "train_mtp", False),
        "activation_offloading: true": getattr(training, "activation_offloading", False),
        "DeepSpeed": training.deepspeed or recipe.sharding == "DEEPSPEED",
        "context parallelism": os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1") != "1",
        "optimizer_in_backward: true on more than one GPU": training.optimizer_in_backward
        and (gpus > 1 or recipe.sharding is not None),
        "fsdp_offload_params: true": sharded and offloads,
    }
    for what, setting in unknown.items():
        if setting:
            raise _unknown(recipe, what)


def _sharding(recipe: Recipe, gpus: int, autocast: Any) -> Sharding:
    import torch

    if recipe.sharding != "FSDP":
        return Sharding("ddp" if gpus > 1 else "none", gpus)
    options = (recipe.training.fsdp_config if recipe.training.fsdp else None) or {}
    default = "2" if recipe.training.fsdp else "1"
    version = str(options.get("version", os.environ.get("FSDP_VERSION", default)))
    if version != "2":
        raise _unknown(recipe, f"FSDP of version {version}")
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    return Sharding("fsdp2", gpus, autocast, torch.float32 if autocast is not None else None, reshard)
