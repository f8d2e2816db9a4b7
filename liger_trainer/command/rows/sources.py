"""Finds and checks what a recipe names before any weight is loaded: its model, rows, rewards and chat template."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from liger_trainer.command.recipe.checks import check_rows
from liger_trainer.command.recipe.model_source import ModelSource, find_model
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.recipe.trainers import TRAINERS
from liger_trainer.command.rows.chat_template import find_template, settle_named_template
from liger_trainer.command.rows.images import unread_pictures
from liger_trainer.command.rows.load import columns_of, load_rows
from liger_trainer.data.formats import has_images
from liger_trainer.data.rewards import REWARDS
from liger_trainer.errors import RecipeError


class Sources(NamedTuple):
    """The findings of `find_sources`: where the weights are, the model's config, the rows, and the reward functions."""

    model: ModelSource
    config: Any
    train_rows: Any
    eval_rows: Any
    rewards: list[Callable[..., Any]]


def model_of(recipe: Recipe) -> ModelSource:
    """Where the model of a recipe is; `model_init_kwargs` may say more than `model_name_or_path`."""
    init = recipe.training.model_init_kwargs or {}
    trust = getattr(recipe.training, "trust_remote_code", False)
    return find_model(
        recipe.model.model_name_or_path,
        init.get("gguf_file"),
        revision=init.get("revision", recipe.model.model_revision),
        trust_remote_code=init.get("trust_remote_code", trust),
    )


def find_sources(recipe: Recipe) -> Sources:
    """Read and check everything that a recipe names, but for the weights of its model."""
    from transformers import AutoConfig

    training, source = recipe.training, model_of(recipe)
    config = source.load(AutoConfig)
    if "subfolder" not in (training.model_init_kwargs or {}):
        source.check_tokenizer()
    with training.main_process_first(desc="loading the dataset"):
        train_rows, eval_rows = load_rows(recipe.args, recipe.path.parent, columns_of(recipe), training.seed)
    check_rows(recipe, train_rows.column_names)
    _check_pictures(recipe, config, train_rows)
    rewards = [find_reward(name, recipe.path.parent) for name in recipe.args.reward_funcs or ()]
    for name, reward in zip(recipe.args.reward_funcs or (), rewards, strict=True):
        _check_columns_of(name, reward, train_rows.column_names)
    _check_template(recipe, source, train_rows)
    return Sources(source, config, train_rows, eval_rows, rewards)


def _check_pictures(recipe: Recipe, config: Any, rows: Any) -> None:
    """RecipeError if a model would be trained without the pictures of its rows, or the trainer takes none."""
    if has_images(rows) and not recipe.entry.images:
        able = ", ".join(name for name, entry in TRAINERS.items() if entry.images)
        raise RecipeError(
            f"the rows have pictures, which {recipe.entry.trainer} does not read. Take one of {able}, or remove them."
        )
    if getattr(config, "vision_config", None) is not None and (mend := unread_pictures(rows)) is not None:
        raise RecipeError(
            f"the rows have the columns {', '.join(rows.column_names)}, and pictures are read from images or image. "
            f"Set {mend}, or remove that column to train on text alone."
        )


def _check_template(recipe: Recipe, source: ModelSource, rows: Any) -> None:
    """RecipeError if rows are messages and there is no chat template for them."""
    settle_named_template(recipe, source)
    first, own = rows[0], getattr(recipe.training, "chat_template_path", None)
    messages = any(isinstance(first.get(name), list) for name in ("messages", "prompt", "completion", "chosen"))
    if own is None and not messages:
        return
    tokenizer, where = find_template(recipe, source)
    if getattr(tokenizer, "chat_template", None) is None:
        mend = (
            "Set chat_template_path, such as chatml."
            if hasattr(recipe.training, "chat_template_path")
            else "Take a model with one: trainer: sft with chat_template_path: chatml saves it with the model."
        )
        raise RecipeError(f"the rows are messages, and {where} has no chat template. {mend}")


def _check_columns_of(name: str, reward: Callable, columns: list[str]) -> None:
    """RecipeError if a reward function reads a column that the rows do not have, which it would notice in training."""
    from_trl = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # of a function that has none, such as one in C
        return
    needed = [p.name for p in parameters if p.default is p.empty and not p.kind.name.startswith("VAR_")]
    if missing := [column for column in needed if column not in from_trl.union(columns)]:
        raise RecipeError(
            f"reward_funcs has {name!r}, which reads the column {missing[0]}, and the rows have {', '.join(columns)}. "
            f"Say which it is in columns, such as {{{missing[0]}: answer}}, or add it."
        )


def find_reward(name: str, folder: Path | None = None) -> Callable:
    """The function that `name` means: a key of `REWARDS`, or a dotted path such as `my_rewards.brief`.

    A dotted path imports its module, which runs its code. Modules are also found in `folder`, the recipe's, and in the
    working directory, which stay at the end of `sys.path` for what the function imports.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.rpartition(".")
    found, why = None, ""
    if module:
        for path in (folder, Path.cwd()):
            if path is not None and str(path.resolve()) not in sys.path:
                sys.path.append(str(path.resolve()))
        try:
            found = getattr(importlib.import_module(module), attribute, None)
            why = f" {module} has no function {attribute}." if found is None else ""
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            why = f" There is no module {error.name}, next to the recipe nor in the working directory."
    if inspect.isclass(found) or not callable(found):
        raise RecipeError(
            f"reward_funcs has {name!r}, which is none of {', '.join(REWARDS)}, and no path of a function.{why}"
        )
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # of a function that has none, such as one in C
        return found
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise RecipeError(
            f"reward_funcs has {name!r}, which takes {', '.join(p.name for p in parameters)} alone. TRL passes further "
            "arguments by keyword: end its parameters with **columns."
        )
    return found
