"""What a resumed run has in common with the run that saved its checkpoint: the trainer, and keys it cannot change.

Both are read from `training_args.bin`, which every trainer of transformers leaves in a checkpoint.
"""

import pickle
import sys
import zipfile
from pathlib import Path

from liger_trainer.command.launch import is_main_process
from liger_trainer.command.recipe import TRAINERS, Recipe
from liger_trainer.command.whole_files import matches
from liger_trainer.errors import RecipeError

# The optimizer's and the scheduler's states hold these, and loading them overwrites what the run has set.
_IN_THE_STATES = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def check_same_trainer(checkpoint: str, recipe: Recipe) -> None:
    """RecipeError where another trainer than the recipe's has saved `checkpoint`."""
    saved = type(_saved_arguments(checkpoint)).__name__.removeprefix("Liger")
    names = {entry.config.removeprefix("Liger"): name for name, entry in TRAINERS.items()}
    wanted = names[recipe.entry.config.removeprefix("Liger")]
    if names.get(saved, wanted) != wanted:  # a config that nobody knows may be a subclass of the right one
        raise RecipeError(
            f"resume_from_checkpoint means {checkpoint}, which the trainer {names[saved]!r} has saved, and trainer is "
            f"{wanted!r}. Set trainer: {names[saved]} to go on with that run, or begin a new run, in another "
            "output_dir, to train its model further in another way."
        )


def say_what_the_checkpoint_decides(checkpoint: str, recipe: Recipe) -> None:
    """A line on stderr on the keys whose values differ from the checkpoint's, and will have no effect."""
    if not is_main_process() or not matches(Path(checkpoint), ("optimizer*", "global_step*")):
        return
    saved = vars(_saved_arguments(checkpoint))
    kept = []
    for key in _IN_THE_STATES:
        given = getattr(recipe.training, key)
        if saved.get(key, given) != given:
            kept.append(f"{key} stays {saved[key]} and not {given}")
    if kept:
        print(
            f"liger-trainer: {', '.join(kept)}, because the optimizer's state in {checkpoint} decides. To change that, "
            "begin a new run with the model of that checkpoint.",
            file=sys.stderr,
        )


class _Inert:
    """Stands for an object of whatever class; of an object with attributes, it has those."""

    def __init__(self, *args):
        pass


class _InertUnpickler(pickle.Unpickler):
    """Reads attributes only: no class of the file is imported and no function of it called, whoever has written it."""

    def find_class(self, module, name):
        return type(name, (_Inert,), {"__module__": module})

    def persistent_load(self, pid):
        return None


def _saved_arguments(checkpoint: str) -> _Inert:
    """The arguments of the run that saved `checkpoint`; without attributes where the file is missing."""
    path = Path(checkpoint) / "training_args.bin"
    if not path.is_file():
        return _Inert()
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(member) as file:
            return _InertUnpickler(file).load()
