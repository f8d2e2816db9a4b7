"""How a run saves: checkpoints that end with a manifest, the stop at a SIGTERM, and what is kept if a save fails."""

import contextlib
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback

from liger_trainer.command import manifest
from liger_trainer.command.launch import launched_processes, on_all, on_main_for_all
from liger_trainer.command.manifest import checkpoints_in
from liger_trainer.command.options import take_options
from liger_trainer.command.output_dir import WEIGHTS, Beginning, matches
from liger_trainer.command.preemption import SaveOnSigterm, Terminated
from liger_trainer.command.recipe import Recipe
from liger_trainer.errors import RecipeError, RunError


class _CannotSave(Exception):
    """A checkpoint could not be written. Its cause says why, and is an error of the disk."""


class Keeper:
    """The checkpoints of a run: their manifests, and how many of them stay.

    Checksums are taken in a thread while training goes on. Only when the manifest of a checkpoint is there are older
    ones deleted, by their steps and never those of another run, so that there is a whole one at any time.

    Args:
        facts (`dict`): What each manifest says of the run.
        run (`str`, *optional*): The name of the run that this one goes on with.
        limit (`int`, *optional*): `save_total_limit`. The newest checkpoint and the best one stay in any case.
    """

    def __init__(self, facts: dict[str, Any], run: str | None = None, limit: int | None = None) -> None:
        self._facts, self._limit = facts | {"run": run or uuid.uuid4().hex}, limit
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future | None = None
        self.saved_at: int | None = None  # the step of the last checkpoint

    def begin(self, trainer: Any) -> None:
        if trainer.args.should_save:
            manifest.begin(_checkpoint_of(trainer), self._facts)
        trainer.accelerator.wait_for_everyone()  # an attempt before may have left files of other processes there

    def finish(self, trainer: Any) -> None:
        """Have the manifest written as soon as all processes have come here, which have then saved their parts."""
        checkpoint, args = _checkpoint_of(trainer), trainer.args
        seen = on_all(args, manifest.files_in(checkpoint))  # of a network disk, none may see all files at once
        names = seen[args.process_index] if args.save_on_each_node else {name for some in seen for name in some}
        self.saved_at = trainer.state.global_step
        if args.should_save:
            facts, best = self._facts | {"step": self.saved_at}, trainer.state.best_model_checkpoint
            self._writing = self._pool.submit(self._write, checkpoint, names, facts, best)

    def wait(self) -> None:
        """Wait for the manifest of the last checkpoint."""
        try:
            if self._writing is not None:
                self._writing.result()  # Ctrl-C may end this one, and what is said of the run then waits again
        except OSError as error:
            self._writing = None
            raise _CannotSave from error
        self._writing = None

    def _write(self, checkpoint: Path, names: Iterable[str], facts: dict[str, Any], best: str | None) -> None:
        manifest.write(checkpoint, names, facts)
        if self._limit is None:
            return
        here = checkpoints_in(checkpoint.parent)
        found = {path: manifest.read(path) for path in here[: here.index(checkpoint) + 1]}  # later ones are damaged
        own = [path for path, said in found.items() if said is not None and said["run"] == facts["run"]]
        kept = {checkpoint, *(path for path in own if best is not None and path.name == Path(best).name)}
        surplus = [path for path in own if path not in kept][: max(0, len(own) - max(self._limit, len(kept)))]
        for path in [*surplus, *(path for path in found if (path / manifest.BEGUN).exists())]:
            with contextlib.suppress(OSError):  # one that cannot be deleted does no harm
                manifest.remove(path)


class SavesWithManifest:
    """What a run of the command changes in a trainer: its checkpoints, its stop at a SIGTERM, and what it resumes."""

    beginning: Beginning
    keeper: Keeper
    stop: SaveOnSigterm
    _stopped_early = False  # before this start of the run

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        self.keeper.wait()
        try:
            self.keeper.begin(self)
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            self.keeper.finish(self)
        except Exception as error:
            if _is_of_the_disk(error):
                raise _CannotSave from error
            raise
        if self.args.push_to_hub:
            self.keeper.wait()
            super()._push_from_checkpoint(str(_checkpoint_of(self)))  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Wait for the manifest, which is pushed too: the stock trainer calls this before it can be written."""

    def _maybe_log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if not self.stop.now:
            return
        if self.keeper.saved_at != self.state.global_step:
            self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_save(self.args, self.state, self.control)
        self.keeper.wait()
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.stop.any_asked()  # so that no process ends, and has the launcher end the others, while another one saves
        raise Terminated

    def _load_callback_state(self: Any) -> None:
        """After the state: find the best checkpoint if the folder was moved, and count patience on where it was."""
        super()._load_callback_state()  # type: ignore[misc]
        best = Path(self.beginning.checkpoint).parent / f"checkpoint-{self.state.best_global_step}"
        if best.is_dir():
            self.state.best_model_checkpoint = str(best)
        kept = self.state.stateful_callbacks.get("EarlyStoppingCallback")
        for callback in self.callback_handler.callbacks if kept else ():
            if isinstance(callback, EarlyStoppingCallback):
                callback.early_stopping_patience_counter = kept["attributes"]["early_stopping_patience_counter"]
                self._stopped_early = callback.early_stopping_patience_counter >= callback.early_stopping_patience

    def _load_best_model(self: Any) -> None:
        self.keeper.wait()
        best = Path(self.state.best_model_checkpoint)
        found = manifest.read(best) if self.is_world_process_zero() else None
        if found is not None and (fault := manifest.fault_of(best, found)) is not None:
            raise RunError(
                f"The best checkpoint {best} is not whole ({fault}), so its model cannot be loaded. To save the model "
                "of the last step in its place, set load_best_model_at_end: false and resume_from_checkpoint: true."
            )
        super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        plain = self.args.optim.startswith("adamw_torch") and not self.is_deepspeed_enabled
        for weight, state in self.optimizer.state.items() if plain else ():
            if (kept := state.get("exp_avg")) is not None and kept.numel() != weight.numel():
                raise ValueError(  # torch does not compare them, and the first step would write past their ends
                    f"The optimizer's states are of other weights: {tuple(kept.shape)} for {tuple(weight.shape)}."
                )

    def _run_epoch(self: Any, **kwargs: Any) -> None:
        # The stock loop trains one more step of a finished run.
        if self.state.global_step < self.state.max_steps and not self._stopped_early:
            super()._run_epoch(**kwargs)  # type: ignore[misc]


def train_and_save(trainer: Any, recipe: Recipe) -> None:
    """Train, and save the model in `output_dir`.

    Raises:
        RecipeError: The first evaluation does not have the metric that `metric_for_best_model` names, or a checkpoint
            without a manifest cannot be loaded.
        RunError: A checkpoint or the model cannot be written. What was trained is saved if possible: as the model
            without its optimizer, or, if the checkpoints could be written, as a checkpoint of the last step.
    """
    beginning = trainer.beginning
    try:
        trainer.train(resume_from_checkpoint=beginning.checkpoint)
        trainer.keeper.wait()
    except _CannotSave as error:
        left = " ".join(filter(None, (_keep_model(trainer), what_is_left(recipe))))
        raise RunError(f"A checkpoint cannot be written: {_reason(error.__cause__, trainer)}. {left}") from error
    except Exception as error:
        if isinstance(error, KeyError) and "metric_for_best_model" in str(error):
            with contextlib.suppress(_CannotSave):  # the message names an earlier checkpoint then
                trainer._save_checkpoint(trainer.model, trial=None)
                trainer.keeper.wait()
            raise RecipeError(f"{recipe.path}: {error.args[0]} {what_is_left(recipe)}") from error
        if beginning.known or trainer.stop.training:
            raise
        raise RecipeError(
            f"resume_from_checkpoint means {beginning.checkpoint}, which has no {manifest.NAME} and cannot be loaded: "
            f"{' '.join(str(error).split())} ({type(error).__name__})"
        ) from error
    finally:
        with contextlib.suppress(_CannotSave):  # after another error: what_is_left may name this checkpoint
            trainer.keeper.wait()
    folder, failure = Path(trainer.args.output_dir), None
    before = {path: path.stat().st_mtime_ns for path in matches(folder, WEIGHTS)}
    try:
        trainer.save_model(trainer.args.output_dir, _internal_call=True)  # without a push, whose errors are no disk's
        trainer.save_state()
    except Exception as error:
        failure = error
    if any(on_all(trainer.args, failure is not None)):
        if trainer.is_world_process_zero():
            _remove_half_model(folder, before)
        kept = _keep_last_step(trainer, recipe)
        if failure is None:
            raise RunError("The trained model cannot be written; another process says why.")
        if _is_of_the_disk(failure):
            reason = _reason(failure, trainer)
            raise RunError(f"The trained model cannot be written to output_dir: {reason}. {kept}") from failure
        failure.add_note(kept)
        raise failure


def what_is_left(recipe: Recipe) -> str:
    """What to say of a run that ended early: its newest whole checkpoint, and the command that goes on from it."""
    if not recipe.began:  # whatever is in output_dir is from an earlier run
        return "Training had not begun."
    for path in reversed(checkpoints_in(Path(recipe.training.output_dir))):
        if manifest.read(path) is not None:
            return f"The last checkpoint is {path}. {_how_to_resume(recipe)}"
    return f"No checkpoint was saved (save_strategy is {recipe.training.save_strategy.value!r})."


def _how_to_resume(recipe: Recipe) -> str:
    if launched_processes() > 1:
        return "To go on, launch the same command with --resume_from_checkpoint true."
    dropped, words = take_options(recipe.words, "overwrite_output_dir", "resume_from_checkpoint", "hub_token")
    hidden = " (with --hub_token, which is not shown)" if "hub_token" in dropped else ""
    words += ["--resume_from_checkpoint", "true"]
    if recipe.args.overwrite_output_dir:
        words += ["--overwrite_output_dir", "false"]
    return f"To go on{hidden}: liger-trainer train {shlex.join(words)}"


def _keep_last_step(trainer: Any, recipe: Recipe) -> str:
    """After the final save has failed, save a checkpoint of the last step, or else the model in another folder.

    Returns:
        `str`: What is saved and where, as sentences for the user.
    """
    last = _checkpoint_of(trainer)
    if not on_main_for_all(trainer.args, lambda: manifest.read(last) is not None):
        try:
            trainer._save_checkpoint(trainer.model, trial=None)
            trainer.keeper.wait()
        except _CannotSave as error:
            shutil.rmtree(last, ignore_errors=True)
            reason = _reason(error.__cause__, trainer)
            elsewhere = _keep_model(trainer, here=False)
            left = what_is_left(recipe)
            return f"A checkpoint of the last step cannot be written there either: {reason}. {elsewhere} {left}"
    return f"The last step is saved as a checkpoint: {last}. Make room on the disk. {_how_to_resume(recipe)}"


def _keep_model(trainer: Any, here: bool = True) -> str:
    """After a save has failed, save the model alone, which is smaller: in `output_dir` if `here`, or elsewhere.

    Elsewhere is the system's folder for temporary files, which may be on another disk. If an earlier run has left a
    model in `output_dir`, it stays. Checkpoints without a manifest are deleted, because their space is needed.

    Returns:
        `str`: Where the model is saved, as a sentence for the user; empty if it cannot be saved by one process.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not trainer.is_world_process_zero():
        return ""  # each process has a part of the model, and the others do not come here to save theirs
    folder = Path(trainer.args.output_dir)
    for path in checkpoints_in(folder) if here else ():
        if (path / manifest.BEGUN).exists():
            shutil.rmtree(path, ignore_errors=True)
    if here and not matches(folder, WEIGHTS):
        try:
            trainer._save(str(folder))
        except Exception:  # the disk again, which the message is about already
            _remove_half_model(folder, {})
        else:
            return f"The model of step {trainer.state.global_step} is saved in {folder}, without its optimizer."
    elsewhere = tempfile.mkdtemp(prefix="liger-trainer-")
    try:
        trainer._save(elsewhere)
    except Exception:
        shutil.rmtree(elsewhere, ignore_errors=True)
        return f"The model cannot be written to {tempfile.gettempdir()} either."
    return f"The trained model is in {elsewhere}; move it away from there."


def _remove_half_model(folder: Path, before: dict[Path, int]) -> None:
    """Delete what a failed save has written: part of a model looks like a whole one, and its space is needed."""
    for path in matches(folder, WEIGHTS):
        if path.is_file() and path.stat().st_mtime_ns != before.get(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _checkpoint_of(trainer: Any) -> Path:
    return Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Whether `error` says that a write has failed. safetensors and torch raise errors of their own, too."""
    signs = ("Error while serializing: I/O error", "inline_container.cc")
    return isinstance(error, OSError) or any(sign in str(error) for sign in signs)


def _reason(error: BaseException | None, trainer: Any) -> str:
    """Why a write into `output_dir` has failed. torch itself says only how many bytes are missing."""
    folder = trainer.args.output_dir
    if "inline_container.cc" in str(error):
        return f"no space left on {folder}, or a limit on the size of its files"
    return str(error) if getattr(error, "filename", None) else f"{error} (in {folder})"
