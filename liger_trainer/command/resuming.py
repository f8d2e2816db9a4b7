"""What a resumed run must share with the run that saved its checkpoint: the trainer, the model and some of the keys.

The trainer, the keys and the number of processes are read from the arguments that lie in the checkpoint.
"""

import json
import sys
from pathlib import Path

from liger_trainer.command.launch import is_main_process
from liger_trainer.command.recipe import TRAINERS, Recipe
from liger_trainer.command.saved_arguments import processes_of, saved_arguments
from liger_trainer.command.whole_files import matches
from liger_trainer.errors import RecipeError

# The states of optimizer and scheduler hold these, and loading the states overwrites what the recipe has set.
_IN_THE_STATES = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def check_same_trainer(checkpoint: str, recipe: Recipe) -> None:
    """RecipeError if `checkpoint` was saved by another trainer than the recipe's."""
    saved = type(saved_arguments(checkpoint)).__name__.removeprefix("Liger")
    names = {entry.config.removeprefix("Liger"): name for name, entry in TRAINERS.items()}
    wanted = names[recipe.entry.config.removeprefix("Liger")]
    if names.get(saved, wanted) != wanted:  # a config of an unknown name may be a subclass of the right one
        raise RecipeError(
            f"resume_from_checkpoint means {checkpoint}, which was saved by the trainer {names[saved]!r}, but trainer "
            f"is {wanted!r}. Set trainer: {names[saved]} to go on with that run. To train its model further in another "
            "way, begin a new run in another output_dir."
        )


def check_same_model(checkpoint: str, config, recipe: Recipe) -> None:
    """RecipeError if `checkpoint` belongs to another model, or if only one of it and the recipe has an adapter."""
    folder = Path(checkpoint)
    has_adapter, uses_peft = (folder / "adapter_config.json").is_file(), recipe.model.use_peft
    has_model = bool(matches(folder, ("model*.safetensors", "pytorch_model*.bin")))
    differences = []
    if has_adapter != uses_peft and (has_adapter or has_model):
        differences.append(f"use_peft is {str(uses_peft).lower()} and was {str(has_adapter).lower()}")
    if has_adapter and uses_peft:
        rank = json.loads((folder / "adapter_config.json").read_text()).get("r")
        if rank not in (None, recipe.model.lora_r):
            differences.append(f"lora_r is {recipe.model.lora_r} and was {rank}")
    if (folder / "config.json").is_file():
        saved = json.loads((folder / "config.json").read_text())
        if saved.get("model_type", config.model_type) != config.model_type:
            differences.append(f"model_type is {config.model_type!r} and was {saved['model_type']!r}")
        saved, text = saved.get("text_config", saved), config.get_text_config()
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if name in saved and getattr(text, name, saved[name]) != saved[name]:
                differences.append(f"{name} is {getattr(text, name)} and was {saved[name]}")
    if differences:
        raise RecipeError(
            f"resume_from_checkpoint means {checkpoint}, which was saved for another model than "
            f"{recipe.model.model_name_or_path!r}: {'; '.join(differences)}. Give the model and the adapter of that "
            "run, or a checkpoint of this one."
        )


def say_what_the_checkpoint_decides(checkpoint: str, recipe: Recipe) -> None:
    """Name, in a line on stderr, the keys that have no effect because the checkpoint has other values for them.

    Another line says what changes where other processes than then share the run.
    """
    if not is_main_process():
        return
    before, now = processes_of(checkpoint), recipe.training.world_size
    if before is not None and before != now:
        print(
            f"liger-trainer: {checkpoint} was saved by {before} process{'' if before == 1 else 'es'}, and this run has "
            f"{now}. A step has {now}/{before} of its rows now, and the rows of this epoch are dealt out anew, so some "
            "are learned twice or not at all in it. Change gradient_accumulation_steps to keep the rows of a step.",
            file=sys.stderr,
        )
    if not matches(Path(checkpoint), ("optimizer*", "global_step*")):
        return
    saved = vars(saved_arguments(checkpoint))
    kept: list[str] = []
    for key in _IN_THE_STATES:
        given = getattr(recipe.training, key)
        if saved.get(key, given) != given:
            kept.append(f"{key} stays {saved[key]} and not {given}")
    if kept:
        print(
            f"liger-trainer: {', '.join(kept)}, because the optimizer's state in {checkpoint} decides. To use other "
            "values, begin a new run with the model of that checkpoint.",
            file=sys.stderr,
        )
