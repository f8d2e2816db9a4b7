"""Finds and checks everything that a recipe names, without loading weights: model, rows, rewards, chat template."""

from collections.abc import Callable
from typing import Any, NamedTuple

from liger_trainer.command.processes import Heartbeat, print_status
from liger_trainer.command.recipe.checks import check_columns_exist
from liger_trainer.command.recipe.model_source import ModelSource, find_model
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.recipe.trainers import TRAINERS
from liger_trainer.command.rows.chat_template import find_template, resolve_named_template
from liger_trainer.command.rows.columns import columns_of
from liger_trainer.command.rows.image_places import check_image_tokens
from liger_trainer.command.rows.images import unread_pictures
from liger_trainer.command.rows.load import load_rows
from liger_trainer.command.rows.rewards import check_columns_of, find_reward
from liger_trainer.command.rows.template_keys import check_template_keys
from liger_trainer.command.rows.turn_weights import check_turn_weights
from liger_trainer.data.formats import has_images
from liger_trainer.errors import RecipeError


class Sources(NamedTuple):
    """The result of `find_sources`: where the weights are, the model's config, the rows, and the reward functions."""

    model: ModelSource
    config: Any
    train_rows: Any
    eval_rows: Any
    rewards: list[Callable[..., Any]]


def model_of(recipe: Recipe) -> ModelSource:
    """Return where the model of a recipe is. `model_init_kwargs` may add a revision or a GGUF file."""
    init = recipe.training.model_init_kwargs or {}
    trust = getattr(recipe.training, "trust_remote_code", False)
    return find_model(
        recipe.model.model_name_or_path,
        init.get("gguf_file"),
        revision=init.get("revision", recipe.model.model_revision),
        trust_remote_code=init.get("trust_remote_code", trust),
    )


def find_sources(recipe: Recipe) -> Sources:
    """Read and check everything that a recipe names, except the weights of its model."""
    print_status(f"reading {recipe.args.dataset_name} and the config of {recipe.model.model_name_or_path}")
    with Heartbeat(lambda time: f"still reading and checking the rows, {time}."):
        return _find_sources(recipe)


def _find_sources(recipe: Recipe) -> Sources:
    from transformers import AutoConfig, AutoProcessor

    training, source = recipe.training, model_of(recipe)
    config = source.load(AutoConfig)
    if getattr(training, "trains_mtp", False):
        _check_mtp_head(source, training)
    if "subfolder" not in (training.model_init_kwargs or {}):
        source.check_tokenizer()
    with training.main_process_first(desc="loading the dataset"):
        train_rows, eval_rows = load_rows(recipe.args, recipe.path.parent, columns_of(recipe), training.seed)
    check_columns_exist(recipe, train_rows.column_names)
    has_messages = any(isinstance(train_rows[0].get(name), list) for name in ("messages", "completion"))
    if recipe.args.train_on and not has_messages:
        raise RecipeError(
            f"train_on is {recipe.args.train_on}, but the rows have {', '.join(train_rows.column_names)} and no "
            "messages. Remove it, or write the rows as messages of role and content."
        )
    for rows in (train_rows, eval_rows):
        if rows is not None:
            answers_alone = bool(getattr(training, "assistant_only_loss", False))
            check_turn_weights(rows, answers_alone, recipe.args.train_on or ("assistant",))
    _check_pictures(recipe, config, train_rows)
    if has_images(train_rows) and getattr(config, "vision_config", None) is not None:
        processor = source.load(AutoProcessor)
        for rows in (train_rows, eval_rows):
            check_image_tokens(rows, processor)
    rewards = [find_reward(name, recipe.path.parent) for name in recipe.args.reward_funcs or ()]
    for name, reward in zip(recipe.args.reward_funcs or (), rewards, strict=True):
        check_columns_of(name, reward, train_rows.column_names)
    _check_template(recipe, source, train_rows)
    return Sources(source, config, train_rows, eval_rows, rewards)


def _check_mtp_head(source: ModelSource, training: Any) -> None:
    """RecipeError if the files of the model have no MTP head that can be trained."""
    from liger_trainer.mtp.training import check_base

    try:
        check_base(source.path, training, source.options.get("revision"))
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _check_pictures(recipe: Recipe, config: Any, rows: Any) -> None:
    """RecipeError if the pictures of the rows would be ignored, or if the trainer takes no pictures."""
    if has_images(rows) and not recipe.entry.images:
        able = ", ".join(name for name, entry in TRAINERS.items() if entry.images)
        raise RecipeError(
            f"the rows have pictures, which {recipe.entry.trainer} does not read. Take one of {able}, or remove them."
        )
    sees_pictures = getattr(config, "vision_config", None) is not None
    advice = unread_pictures(rows) if sees_pictures else None
    if advice is not None:
        raise RecipeError(
            f"the rows have the columns {', '.join(rows.column_names)}, but pictures are only read from images or "
            f"image. Set {advice}, or remove that column to train on text only."
        )


def _check_template(recipe: Recipe, source: ModelSource, rows: Any) -> None:
    """RecipeError if the rows are messages and the model has no chat template."""
    resolve_named_template(recipe, source)
    first, template_path = rows[0], getattr(recipe.training, "chat_template_path", None)
    messages = any(isinstance(first.get(name), list) for name in ("messages", "prompt", "completion", "chosen"))
    if template_path is None and not messages:
        return
    tokenizer, where = find_template(recipe, source)
    if getattr(tokenizer, "chat_template", None) is None:
        advice = (
            "Set chat_template_path, such as chatml."
            if hasattr(recipe.training, "chat_template_path")
            else "Take a model with one: trainer: sft with chat_template_path: chatml saves it with the model."
        )
        raise RecipeError(f"the rows are messages, but {where} has no chat template. {advice}")
    if messages:
        check_template_keys(tokenizer, where, rows)
