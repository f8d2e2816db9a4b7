"""What to say of a key or an option that a recipe cannot have: a similar name, another trainer or another place."""

import dataclasses
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from liger_trainer.command.trainer_table import TRAINERS, TrainerEntry
from liger_trainer.errors import RecipeError

# These keys of a recipe are also keywords of `from_pretrained`, so they may stand under `model_init_kwargs` too.
_SHARED_WITH_MODEL_INIT = {"dtype", "attn_implementation", "trust_remote_code", "router_aux_loss_coef"}

# What other tools, and earlier releases of transformers and TRL, call a key, where a name that looks alike is another.
_OTHER_NAMES = {
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lora_rank": "lora_r",
    "model": "model_name_or_path",
    "base_model": "model_name_or_path",
    "dataset": "dataset_name",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "grad_accum": "gradient_accumulation_steps",
}


def nearest(key: str, known: Iterable[str], form: str = "Did you mean {}?") -> str:
    """A hint at the name in `known` that is most like `key`, with a space before it; empty if none is like it."""
    known = list(known)
    other = _OTHER_NAMES.get(key)
    match = [other] if other in known else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return " " + form.format(match[0]) if match else ""


def refuse_unknown_keys(path: Path, values: dict[str, Any], owners: Iterable[str], entry: TrainerEntry) -> None:
    """RecipeError for the first of the recipe's keys that is not in `owners`: unknown, or of another trainer."""
    for key, value in values.items():
        if key in owners:
            continue
        if inside := [k for k in value if k in owners] if isinstance(value, dict) else []:
            reason = f"is not a key, and a recipe has no sections. Move {', '.join(inside)} to the left margin."
            raise RecipeError(f"{path}: {key!r} {reason}")
        near = nearest(key, owners) or " `liger-trainer train RECIPE --help` lists all keys."
        reason = _elsewhere(key, entry) or f"is not a key of a recipe.{near}"
        raise RecipeError(f"{path}: {key!r} (with value {value!r}) {reason}")
    init = values.get("model_init_kwargs")
    for key in init if isinstance(init, dict) else ():
        if key in owners and key not in _SHARED_WITH_MODEL_INIT:  # the model may take it for one of its config
            raise RecipeError(f"{path}: {key!r} stands under model_init_kwargs. Move it to the left margin.")


def about_unknown_option(option: str, owners: Iterable[str], entry: TrainerEntry) -> str:
    """The message about the first word of the command line that the parser has left over."""
    if not option.startswith("--"):
        return f"{option!r} on the command line belongs to no option; options after RECIPE are written --key value."
    key = option[2:].partition("=")[0].replace("-", "_")
    near = nearest(key, owners, "Did you mean --{}?") or " `liger-trainer train RECIPE --help` lists all options."
    return f"--{key} {_elsewhere(key, entry) or f'is not an option.{near}'}"


def _elsewhere(key: str, entry: TrainerEntry) -> str | None:
    """What to say of a key that other trainers have and `entry` does not; None if no trainer has it."""
    import liger_trainer

    configs = {name: getattr(liger_trainer, other.config) for name, other in TRAINERS.items()}
    having = [name for name, config in configs.items() if key in {field.name for field in dataclasses.fields(config)}]
    if not having:
        return None
    (name,) = (name for name, other in TRAINERS.items() if other is entry)
    return f"is a key of the trainers {', '.join(having)}, and not of {name}. Remove it, or set another trainer."
