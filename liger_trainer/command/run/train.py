"""Runs a parsed recipe: checks everything, loads model and rows, trains, and saves."""

import inspect
import os
import re
from typing import Any

import torch
import trl
from accelerate.utils import parse_flag_from_env
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback

import liger_trainer
from liger_trainer._logging import logger
from liger_trainer.command.processes import Heartbeat, is_main_process, print_status
from liger_trainer.command.recipe.checks import NOT_ON_EXPERTS, check_packages
from liger_trainer.command.recipe.model_source import ModelSource, find_model, quantization_of, trainable_options
from liger_trainer.command.recipe.parser import nearest
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.rows.chat_template import answers_marked, raised_by_template
from liger_trainer.command.rows.counts import check_token_ids, report_row_counts
from liger_trainer.command.rows.images import broken_picture, check_first_batch
from liger_trainer.command.rows.preview import show_rows
from liger_trainer.command.rows.prompt_form import prompt_form, warn_unused_template
from liger_trainer.command.rows.sources import Sources, find_sources
from liger_trainer.command.run.manifest import fingerprint_run
from liger_trainer.command.run.output_dir import find_resume_point, lock_output_dir
from liger_trainer.command.run.preemption import SaveOnSigterm
from liger_trainer.command.run.reward_calls import checked_reward
from liger_trainer.command.run.saving import (
    CheckpointManager,
    RunTrainer,
    SavesWithManifest,
    describe_last_checkpoint,
    train_and_save,
)
from liger_trainer.command.run.summary import RunRecorder
from liger_trainer.data.formats import alpaca_row
from liger_trainer.errors import RecipeError, RunError, refusal, short
from liger_trainer.fitting.meta_model import auto_class_of
from liger_trainer.trainers.world import launch_problem


def run(recipe: Recipe, preview_rows: int | None = None, stop: SaveOnSigterm | None = None) -> str | None:
    """Train `recipe` and return its summary. With `preview_rows`, only return a preview of the first rows.

    Processes other than the main one return None. RecipeError if nothing was trained, RunError if a write failed.
    """
    training = recipe.training
    fault = launch_problem(os.environ, training.distributed_state, recipe.sharding)
    if fault:
        raise RecipeError(f"{fault}")
    check_packages(recipe)
    with lock_output_dir(recipe) as resumes:
        return _run(recipe, resumes, preview_rows, stop or SaveOnSigterm())


def _run(recipe: Recipe, resumes: str, preview_rows: int | None, stop: SaveOnSigterm) -> str | None:
    training, sources = recipe.training, find_sources(recipe)
    train_rows, eval_rows = sources.train_rows, sources.eval_rows
    fingerprint = fingerprint_run(recipe, sources.model, train_rows)
    resume_point = find_resume_point(recipe, resumes, fingerprint)
    checkpoints = CheckpointManager(fingerprint, resume_point, training.save_total_limit)
    training.save_total_limit = None  # `CheckpointManager` deletes old checkpoints instead of the trainer

    total = len(train_rows)
    if preview_rows is not None:
        train_rows = train_rows.select(range(min(preview_rows, total)))
        eval_rows = None if eval_rows is None else eval_rows.select(range(1))
    recorder = RunRecorder(prompt_form(recipe.args.prompt_template, train_rows))
    callbacks: list[Any] = [checkpoints, recorder]
    if recipe.args.early_stopping_patience is not None:
        recorder.early_stopping = EarlyStoppingCallback(recipe.args.early_stopping_patience)
        callbacks.append(recorder.early_stopping)
    callbacks.append(stop)  # last, because it may end the run
    if training.sample_prompts and recorder.form == "alpaca":
        rows = [alpaca_row({"instruction": text, "output": ""}) for text in training.sample_prompts]
        training.sample_prompts = [row["prompt"] for row in rows]
    print_status("loading the model")
    sources = sources._replace(train_rows=train_rows, eval_rows=eval_rows)
    with Heartbeat(lambda time: f"still loading the model and preparing the rows, {time}."):
        trainer = build_trainer(recipe, sources, callbacks, _saving_class(recipe))
        check_token_ids(trainer, "train")
        if eval_rows is not None and trainer.eval_dataset is not None:
            check_token_ids(trainer, "eval")
        check_first_batch(trainer)
    warn_unused_template(trainer.processing_class, recorder.form, train_rows)
    if preview_rows is not None:
        return show_rows(trainer, train_rows, total)
    recorder.rows = report_row_counts(trainer, train_rows, eval_rows)
    recorder.parameters = PeftModel.get_nb_trainable_parameters(trainer.model)  # which takes any model

    recipe.began = True
    trainer.checkpoints = checkpoints
    trainer.stop = stop
    trainer.recipe = recipe
    trainer.recorder = recorder
    _train(trainer, recipe, sources)
    if training.push_to_hub:
        trainer.push_to_hub()
    summary = recorder.summary(trainer) if trainer.is_world_process_zero() else None
    # A thread of gloo needs the GIL to free the tensors of the last collective. If the process group is destroyed at
    # that moment, both wait forever. A barrier has no tensors to free, and it releases the GIL.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return summary


def _saving_class(recipe: Recipe) -> type:
    """Return the trainer class of `recipe` with `SavesWithManifest`, under its own name."""
    recipe_class = getattr(liger_trainer, recipe.entry.trainer)
    class_attributes = {"__doc__": recipe_class.__doc__, "__module__": recipe_class.__module__}
    return type(recipe_class.__name__, (SavesWithManifest, recipe_class), class_attributes)


def _train(trainer: RunTrainer, recipe: Recipe, sources: Sources) -> None:
    """Train and save. RunError if a picture of the rows cannot be read."""
    try:
        train_and_save(trainer, recipe)
    except RecipeError:
        raise
    except Exception as error:
        broken = broken_picture(error, sources.train_rows, sources.eval_rows)
        if broken is None:
            raise
        raise RunError(f"{broken} {describe_last_checkpoint(recipe)}") from error
    finally:
        trainer.recorder.stop_heartbeat()


def build_trainer(recipe: Recipe, sources: Sources, callbacks: list[Any], trainer_class: type) -> Any:
    """Build the trainer of `recipe`, a `trainer_class`. RecipeError if a library rejects what the recipe names."""
    training, init = recipe.training, dict(recipe.training.model_init_kwargs or {})
    source, config, train_rows, eval_rows, rewards = sources
    init = {key: value for key, value in init.items() if key not in source.options}
    options = set(init)
    init = {"dtype": recipe.model.dtype, "attn_implementation": recipe.model.attn_implementation} | init
    trainer_arguments = {
        "train_dataset": train_rows,
        "eval_dataset": eval_rows,
        "callbacks": callbacks,
    }
    if rewards:
        trainer_arguments["reward_funcs"] = [
            checked_reward(name, reward) for name, reward in zip(recipe.args.reward_funcs or (), rewards, strict=True)
        ]
    if getattr(training, "teacher_model_name_or_path", None) is not None:
        trainer_arguments["teacher_model"] = find_model(
            training.teacher_model_name_or_path, key="teacher_model_name_or_path"
        ).path
    quantization = quantization_of(config, recipe.model)
    init = (trainable_options(config) if quantization is None else {"quantization_config": quantization}) | init
    training.model_init_kwargs = None if source.is_gguf else source.options | init
    try:
        trainer_arguments["peft_config"] = trl.get_peft_config(recipe.model)
        if source.is_gguf:  # TRL's trainers cannot load one themselves
            trainer_arguments["model"], trainer_arguments["processing_class"] = _load_gguf(source, config, init, recipe)
            if _needs_reference(recipe):  # reading the file again takes seconds
                trainer_arguments["ref_model"], _ = _load_gguf(source, config, init, recipe)
        else:
            trainer_arguments["model"] = source.path
        with answers_marked(recipe, source, train_rows, eval_rows) as restore_template:
            trainer = trainer_class(args=training, **trainer_arguments)
            restore_template(trainer)
    except RecipeError:
        raise
    except Exception as error:
        message = _wrong_in_recipe(error, recipe, sources, options)
        if message is None:
            raise
        raise RecipeError(message) from error
    _check_adapter(recipe.model, trainer.model)
    return trainer


def _wrong_in_recipe(error: Exception, recipe: Recipe, sources: Sources, options: set[str]) -> str | None:
    """Return what a library rejects, by the recipe's keys, and what to do. None for an error that may be a bug.

    `options` are the names in the recipe's `model_init_kwargs`.
    """
    training, model = recipe.training, recipe.model
    refused = _refused_adapter(error, model, sources.config)
    if refused is not None:
        return refused
    broken = broken_picture(error, sources.train_rows, sources.eval_rows)
    if broken is not None:
        return broken
    text = " ".join(str(error).split())
    if model.load_in_4bit and isinstance(error, ImportError) and "bitsandbytes" in text:
        return f"load_in_4bit is True: {text}"
    if training.push_to_hub and "offline mode is enabled" in text:
        return "push_to_hub is true, and HF_HUB_OFFLINE is set. Unset HF_HUB_OFFLINE, or push_to_hub: false."
    if isinstance(error, ImportError) and "FlashAttention" in text:
        attention = model.attn_implementation
        return f"attn_implementation is {attention!r}: {text} Install it, or set attn_implementation: sdpa."
    if isinstance(error, AttributeError) and "'generation_config'" in text:
        kind = (getattr(sources.config, "architectures", None) or ["model"])[0]
        return f"model_name_or_path is {model.model_name_or_path!r}, a {kind}, not a causal language model."
    if not raised_by_template(error):
        return refusal(error, "assistant_only_loss", model_init_kwargs=[*options], report_to=training.report_to)
    message = f"a chat template refuses a row: {text}"
    if any(isinstance(turn.get("content"), list) for turn in sources.train_rows[0].get("messages") or ()):
        message += ". The content of its messages is a list of parts; most templates want a text"
    return message


def _refused_adapter(error: Exception, args: Any, config: Any) -> str | None:
    """Return what PEFT rejects about the adapter, by its recipe keys; None if the error is about something else."""
    text, targets = str(error), args.lora_target_modules
    if not args.use_peft:
        return None
    if targets is None and "target_modules" in text:
        kind = getattr(config, "model_type", None)
        return (
            f"lora_target_modules is unset, and PEFT knows none for model type {kind!r}. Set it to the names of linear "
            "layers, such as [q_proj, v_proj], or to all-linear."
        )
    if isinstance(targets, str) and targets != "all-linear":  # PEFT takes a text as a regular expression
        if "not found" in text or isinstance(error, re.error):
            return (
                f"lora_target_modules is {targets!r}, which PEFT reads as a regular expression of whole module paths; "
                f"it {'matches none' if 'not found' in text else f'is not valid: {error}'}. To name modules, write a "
                "list, [q_proj, v_proj], or on the command line: --lora_target_modules q_proj v_proj."
            )
    if isinstance(targets, list) and "Target modules" in text and "not found" in text:
        known = _linear_names(config)
        hints = [nearest(name, known) for name in targets if name not in known]
        listed = ", ".join(known)
        return (
            f"lora_target_modules is {targets}, and the model has none of them.{hints[0]} Its linear layers: {listed}."
        )
    key = next((key for key in NOT_ON_EXPERTS if key in text), None)
    if "ParamWrapper" not in text or key is None:
        return None
    return (
        f"{key} is {getattr(args, key)}, which PEFT refuses for adapters on experts, and lora_target_modules: "
        f"{short(targets)} means experts too. Set {key}: {NOT_ON_EXPERTS[key]}, or name modules of attention alone, "
        "such as [q_proj, k_proj, v_proj, o_proj]."
    )


def _linear_names(config: Any) -> list[str]:
    """Return the distinct names of the linear layers of a model with `config`, without loading weights."""
    with torch.device("meta"):
        model = auto_class_of(config).from_config(config)
    paths = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return sorted({path.rpartition(".")[2] for path in paths})


def _check_adapter(args: Any, model: Any) -> None:
    """RecipeError if a key names a module that the model does not have. peft only checks that one name matches."""
    paths = [f".{path}." for path, _ in model.named_modules()]
    for key in ("lora_target_modules", "lora_modules_to_save") if args.use_peft else ():
        names = getattr(args, key)
        for name in names if isinstance(names, list) else ():
            if not any(f".{name}." in path for path in paths):
                raise RecipeError(f"{key} names {name!r}, but the model has no module of that name.")
    wrapped = {getattr(module, "parameter_name", None) for _, module in model.named_modules()}  # by PEFT's ParamWrapper
    if wrapped - {None} and args.lora_target_modules == "all-linear" and is_main_process():
        logger.warning(
            "lora_target_modules: all-linear has adapters on the experts too, and on the routers that choose them. For "
            "attention alone, name its modules, such as [q_proj, k_proj, v_proj, o_proj]."
        )


def _needs_reference(recipe: Recipe) -> bool:
    """Return whether the trainer would load a second copy of the model from its path, as the reference."""
    trainer = getattr(liger_trainer, recipe.entry.trainer)
    takes_one = any("ref_model" in inspect.signature(base.__init__).parameters for base in trainer.__mro__)
    precomputed = getattr(recipe.training, "precompute_ref_log_probs", False)
    sharded = recipe.training.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")  # FSDP needs a copy even to precompute
    return takes_one and (sharded or not precomputed) and not recipe.model.use_peft


def _load_gguf(source: ModelSource, config, init: dict, recipe: Recipe):
    """Load the model and the tokenizer of a GGUF source. The weights are dequantized to `dtype`."""
    if recipe.model.load_in_4bit or recipe.model.load_in_8bit:
        raise RecipeError("load_in_4bit and load_in_8bit do not apply to a GGUF model. Remove them.")
    from transformers import GgufConfig

    tokenizer = source.load(AutoTokenizer)
    # Without this, the trainer treats the model as quantized: it could be neither fully trained nor saved.
    init["quantization_config"] = GgufConfig(dequantize=True)
    model = source.load(AutoModelForCausalLM, config=config, **init)
    if recipe.model.use_peft:
        # An adapter names its base by path, and peft cannot open a GGUF file. So a plain copy is saved there.
        base = os.path.abspath(os.path.join(recipe.training.output_dir, "base_model"))
        if is_main_process():
            model.save_pretrained(base)
            tokenizer.save_pretrained(base)
        model.config._name_or_path = model.name_or_path = base
    return model, tokenizer
