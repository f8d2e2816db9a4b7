"""The folder of a run: whether the run may use it, where it resumes from, and what is left if the run ends early."""

import contextlib
import errno
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from liger_trainer.command.launch import is_main_process, launched_processes
from liger_trainer.command.recipe import Recipe
from liger_trainer.command.whole_files import checkpoints_in, fault_of_checkpoint, fault_of_file, matches
from liger_trainer.errors import RecipeError, RunError

# What a finished run leaves beside its checkpoints, as glob patterns: the model itself, and the files that go with it.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*", "medusa_heads")
_BESIDE_WEIGHTS = (
    "model.safetensors.index.json", "pytorch_model.bin.index.json", "config.json", "generation_config.json",
    "adapter_config.json", "trainer_state.json", "liger_report.json",
)  # fmt: skip


def check_output_dir(recipe: Recipe) -> None:
    """RecipeError if `output_dir` cannot be written, or holds another run, with which this one would be mixed."""
    if not recipe.training.output_dir:
        raise RecipeError(f"{recipe.path}: output_dir is empty. Set it to a folder for the model.")
    folder, overwrite = Path(recipe.training.output_dir), recipe.args.overwrite_output_dir
    resumes = str(recipe.training.resume_from_checkpoint or "false").lower()
    if overwrite and resumes != "false":
        raise RecipeError(
            f"{recipe.path}: overwrite_output_dir is true and resume_from_checkpoint is {resumes}, but the one deletes "
            "what the other needs. Keep one of them."
        )
    found = matches(folder, (*_WEIGHTS, "trainer_state.json"))
    if not recipe.restarts:  # a restart has found these, and none of them is whole
        found = checkpoints_in(folder) + found
    own = resumes == "true" or (resumes != "false" and _is_inside(resumes, folder))
    if found and not overwrite and not own:
        names = ", ".join(path.name for path in found)
        raise RecipeError(
            f"{recipe.path}: output_dir is {str(folder)!r}, which holds an earlier run ({names}). Set another "
            "output_dir, or resume_from_checkpoint: true to go on from the last checkpoint of that run, or "
            "overwrite_output_dir: true to delete it when this one begins."
        )
    if overwrite:
        for key in ("model_name_or_path", "teacher_model_name_or_path", "medusa_init_heads_from"):
            value = getattr(recipe.model, key, None) or getattr(recipe.training, key, None)
            if value and os.path.exists(os.path.expanduser(value)) and _is_inside(value, folder):
                raise RecipeError(
                    f"{recipe.path}: {key} is {value!r}, which overwrite_output_dir would delete from output_dir "
                    f"{str(folder)!r}. Set another output_dir."
                )
    if is_main_process():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reason = "it is a file" if folder.is_file() else error.strerror
            raise RecipeError(
                f"{recipe.path}: output_dir is {str(folder)!r}, which cannot be written: {reason}. Set another "
                "output_dir."
            ) from error


@contextlib.contextmanager
def no_empty_folder(output_dir: str | None) -> Iterator[None]:
    """Remove the folders that were made for a run if it is refused or stopped before it has saved anything."""
    folder = Path(output_dir or ".")
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new if is_main_process() else ():
            if not path.is_dir() or any(path.iterdir()):
                break
            path.rmdir()
        raise


def remove_earlier_run(output_dir: str) -> None:
    """Delete the checkpoints and the model in `output_dir`, as `overwrite_output_dir` asks, and no other file."""
    folder = Path(output_dir)
    model = matches(folder, _WEIGHTS)
    if model:  # without a model, a config.json in that folder does not come from a run
        model += matches(folder, _BESIDE_WEIGHTS)
    for path in checkpoints_in(folder) + model:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def train_and_save(trainer, checkpoint: str | None, recipe: Recipe) -> None:
    """Train, and save the model in `output_dir`.

    Raises:
        RecipeError: The first evaluation does not have the metric that `metric_for_best_model` names.
        RunError: A checkpoint or the model cannot be written. What was trained is saved if possible: as the model
            without its optimizer, or, if the checkpoints could be written, as a checkpoint of the last step.
    """
    try:
        if not _is_finished(trainer, checkpoint):
            trainer.train(resume_from_checkpoint=checkpoint)
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        with contextlib.suppress(Exception):  # if this step cannot be saved, the message names an earlier checkpoint
            trainer._save_checkpoint(trainer.model, trial=None)
        raise RecipeError(f"{recipe.path}: {error.args[0]} {what_is_left(recipe)}") from error
    except Exception as error:
        if _is_of_the_disk(error):
            reason = _reason(error, trainer.args.output_dir)
            left = " ".join(filter(None, (_keep_model(trainer), what_is_left(recipe))))
            raise RunError(f"A checkpoint cannot be written: {reason}. {left}") from error
        raise
    failure = None
    try:
        trainer.save_model(trainer.args.output_dir)
        trainer.save_state()
    except Exception as error:
        failure = error
    if _any_process(trainer, failure is not None):
        kept = _keep_last_step(trainer, recipe)
        if failure is None:
            raise RunError("The trained model cannot be written; the main process says why.")
        if _is_of_the_disk(failure):
            reason = _reason(failure, trainer.args.output_dir)
            raise RunError(f"The trained model cannot be written to output_dir: {reason}. {kept}") from failure
        failure.add_note(kept)
        raise failure


def _is_finished(trainer, checkpoint: str | None) -> bool:
    """Whether `checkpoint` is of the last step of the run. If so, load its model.

    The stock trainer would train one more step.
    """
    if checkpoint is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    from transformers import TrainerState

    state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
    if not 0 < trainer.args.max_steps <= state.global_step:
        return False
    state.init_training_references(trainer, trainer.args.max_steps, state.num_train_epochs, trial=None)
    trainer.state = state
    trainer.callback_handler.on_train_begin(trainer.args, state, trainer.control)
    trainer._load_from_checkpoint(checkpoint)
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.callback_handler.on_train_end(trainer.args, state, trainer.control)
    return True


def what_is_left(recipe: Recipe) -> str:
    """What to say of a run that ended early: its newest whole checkpoint, and the command that goes on from it."""
    if not recipe.began:  # whatever is in output_dir is from an earlier run
        return "Training had not begun."
    training = recipe.training
    for path in reversed(checkpoints_in(Path(training.output_dir))):
        if not fault_of_checkpoint(path, needs_optimizer=not training.save_only_model):
            return f"The last checkpoint is {path}. {_how_to_resume(recipe)}"
    return f"No checkpoint was saved (save_strategy is {training.save_strategy.value!r})."


def _how_to_resume(recipe: Recipe) -> str:
    if launched_processes() > 1:
        return "To go on, launch the same command with --resume_from_checkpoint true."
    words, rest = [], list(recipe.words)
    dropped = ("--overwrite_output_dir", "--resume_from_checkpoint")
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0].replace("-", "_").replace("__", "--", 1) not in dropped:
            words.append(word)
        elif "=" not in word and rest and not rest[0].startswith("--"):
            rest.pop(0)
    words += ["--resume_from_checkpoint", "true"]
    if recipe.args.overwrite_output_dir:
        words += ["--overwrite_output_dir", "false"]
    return f"To go on: liger-trainer train {shlex.join(words)}"


def _keep_last_step(trainer, recipe: Recipe) -> str:
    """After the final save has failed, save a checkpoint of the last step, or else the model in another folder.

    Returns:
        `str`: What is saved and where, as sentences for the user.
    """
    folder = Path(trainer.args.output_dir)
    last = folder / f"checkpoint-{trainer.state.global_step}"
    if trainer.is_world_process_zero():
        _remove_half_model(folder)
    existed = not fault_of_checkpoint(last, needs_optimizer=not trainer.args.save_only_model)
    if not existed:
        try:
            trainer._save_checkpoint(trainer.model, trial=None)
        except Exception as error:
            shutil.rmtree(last, ignore_errors=True)
            reason = f"A checkpoint of the last step cannot be written there either: {_reason(error, folder)}."
            return f"{reason} {_keep_elsewhere(trainer)} {what_is_left(recipe)}"
    return f"The last step is saved as a checkpoint: {last}. Make room on the disk. {_how_to_resume(recipe)}"


def _keep_model(trainer) -> str:
    """After a checkpoint could not be written, save the model alone, which is smaller, in `output_dir` or elsewhere.

    The unfinished checkpoint is deleted first, because its space is needed. If an earlier run has left a model in
    `output_dir`, that model is kept, and this one is saved elsewhere.

    Returns:
        `str`: Where the model is saved, as a sentence for the user; empty if it cannot be saved by one process.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not trainer.is_world_process_zero():
        return ""  # each process has a part of the model, and the others do not come here to save theirs
    folder = Path(trainer.args.output_dir)
    checkpoint = folder / f"checkpoint-{trainer.state.global_step}"
    if fault_of_checkpoint(checkpoint, needs_optimizer=not trainer.args.save_only_model):
        shutil.rmtree(checkpoint, ignore_errors=True)
    if not matches(folder, _WEIGHTS):
        try:
            trainer._save(str(folder))
        except Exception:  # the disk again, which the message is about already
            _remove_half_model(folder)
        else:
            return f"The model of step {trainer.state.global_step} is saved in {folder}, without its optimizer."
    return _keep_elsewhere(trainer)


def _remove_half_model(folder: Path) -> None:
    for path in matches(folder, _WEIGHTS):
        if path.is_file() and fault_of_file(path):
            path.unlink()  # part of a model looks like a whole one, and its space is needed


def _keep_elsewhere(trainer) -> str:
    """Save the model in the system's folder for temporary files, which may be on another disk, and say where it is."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not trainer.is_world_process_zero():
        return ""
    folder = tempfile.mkdtemp(prefix="liger-trainer-")
    try:
        trainer._save(folder)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        return f"The model cannot be written to {tempfile.gettempdir()} either."
    return f"The trained model is in {folder}; move it away from there."


def _any_process(trainer, here: bool) -> bool:
    """Whether `here` is true in any process of the run."""
    import torch

    if trainer.args.world_size == 1:
        return here
    return bool(trainer.accelerator.gather(torch.tensor([int(here)], device=trainer.args.device)).any())


_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def _is_of_the_disk(error: BaseException) -> bool:
    """Whether `error` says that a write has failed. safetensors and torch have errors of their own, beside OSError."""
    if isinstance(error, OSError):
        return error.errno in _DISK_ERRORS
    return any(sign in str(error) for sign in ("Error while serializing: I/O error", "inline_container.cc"))


def _reason(error: BaseException, folder) -> str:
    """Why a write into `folder` has failed. torch itself says only how many bytes are missing."""
    if "inline_container.cc" in str(error):
        return f"no space left on {folder}, or a limit on the size of its files"
    return str(error) if getattr(error, "filename", None) else f"{error} (in {folder})"


def _is_inside(path: str, folder: Path) -> bool:
    return Path(path).expanduser().resolve().is_relative_to(folder.resolve())
