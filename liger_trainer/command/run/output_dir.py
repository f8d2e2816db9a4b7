"""Checks and locks the output_dir of a run, and finds the checkpoint to resume from."""

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_trainer.command.processes import gather_from_all, print_status, run_on_main
from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.run import manifest
from liger_trainer.command.run.manifest import checkpoints_in
from liger_trainer.errors import RecipeError

# The model that a finished run leaves next to its checkpoints, as glob patterns
WEIGHTS = (
    "model*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.*",
    "medusa_heads",
    "eagle_drafter",
    "mtp.safetensors",
)
_LOCK = "_liger_trainer.lock"  # push_to_hub leaves out names that begin with _
# Slurm, Flyte and torchrun count the restarts of a job in these. One may restart another.
_RESTARTS = ("SLURM_RESTART_COUNT", "FLYTE_ATTEMPT_NUMBER", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts: at `checkpoint`, or at step 0. `known` is False for a checkpoint without a manifest."""

    checkpoint: str | None = None
    run: str | None = None
    known: bool = True


def matches(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the paths in `folder` that match at least one of the glob patterns, sorted."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


@contextlib.contextmanager
def lock_output_dir(recipe: Recipe) -> Iterator[str]:
    """Context manager: lock `output_dir` for this run. Yields what to resume from: false, true, auto or a path."""
    if not recipe.training.output_dir:
        raise RecipeError("output_dir is empty. Set it to a folder for the model.")
    folder = Path(recipe.training.output_dir)
    wanted = _resume_request(recipe)
    locks: list[Any] = []

    def prepare() -> None:
        locks.append(_lock(folder, recipe))
        _check_is_not_model(folder, recipe.model.model_name_or_path)
        _check_folder(folder, wanted)

    try:
        run_on_main(recipe.training, prepare)
        yield wanted
    finally:
        for lock in locks:
            with contextlib.suppress(OSError):  # an error here must not hide how the run ended
                (folder / _LOCK).unlink()
                folder.rmdir()  # fails, as it should, unless nothing was saved
            lock.close()


def _resume_request(recipe: Recipe) -> str:
    """Return what to resume from. After a restart by a scheduler that is `auto`, unless the recipe says otherwise."""
    training = recipe.training
    wanted = str(training.resume_from_checkpoint or "false")
    wanted = wanted.lower() if wanted.lower() in ("false", "true", "auto") else wanted
    restarted = any(os.environ.get(name, "").strip("0").isdecimal() for name in _RESTARTS)
    if not any(gather_from_all(training, restarted)):  # torchrun counts for each machine
        return wanted
    saved = any(manifest.read(path) for path in checkpoints_in(Path(training.output_dir)))
    return "auto" if saved or wanted == "false" else wanted


def _check_is_not_model(folder: Path, model: str | None) -> None:
    """RecipeError if a run in `folder` would write over the model that it starts from."""
    starts_from = Path(model or "").expanduser()
    if model and folder.is_dir() and starts_from.is_dir() and folder.samefile(starts_from):
        if not checkpoints_in(folder):
            raise RecipeError(
                f"output_dir is {str(folder)!r}, the folder of model_name_or_path, which would be written over. Set "
                "another output_dir."
            )


def _check_folder(folder: Path, wanted: str) -> None:
    """RecipeError if `folder` holds a run other than the one to resume."""
    if wanted in ("true", "auto") or Path(wanted).expanduser().resolve().is_relative_to(folder.resolve()):
        return
    earlier_files = checkpoints_in(folder) + matches(folder, (*WEIGHTS, "trainer_state.json"))
    if earlier_files:
        names = ", ".join(path.name for path in earlier_files)
        raise RecipeError(
            f"output_dir is {str(folder)!r}, which holds an earlier run ({names}). Set another output_dir, or "
            "resume_from_checkpoint: true to go on, or delete that run."
        )


def _lock(folder: Path, recipe: Recipe) -> Any:
    """Lock a file in `folder` until this process ends, and return the open file. RecipeError if another run holds it.

    The lock belongs to the kernel or the file server, so a killed process leaves no lock behind.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / _LOCK, "a+b", buffering=0)
        if _is_held(file):
            file.seek(0)
            owner = file.read().decode(errors="replace")
            file.close()
            raise RecipeError(f"output_dir is {str(folder)!r}, and another run is using it ({owner}). Wait for it.")
        if not (folder / _LOCK).exists() or not os.path.samestat(os.fstat(file.fileno()), (folder / _LOCK).stat()):
            file.close()  # its owner has just ended and deleted it: try again
            return _lock(folder, recipe)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:
        raise RecipeError(f"output_dir is {str(folder)!r}, which cannot be written: {error.strerror}.") from error
    return file


def _is_held(file: Any) -> bool:
    """Lock `file` if the system can. Return whether another process holds the lock."""
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: workers of a data loader would inherit its lock
    except ImportError:  # Windows
        return False
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return True
        print_status(f"{file.name} cannot be locked ({error.strerror}). Start no second run in this folder.")
    return False


def find_resume_point(recipe: Recipe, wanted: str, fingerprint: dict[str, Any]) -> ResumePoint:
    """Return where a run with `fingerprint` starts, on all processes. RecipeError if it cannot resume as asked."""
    if wanted == "false":
        return ResumePoint()
    choose = _resume_newest if wanted in ("true", "auto") else _resume_named
    return run_on_main(recipe.training, lambda: choose(recipe, wanted, fingerprint))


def _resume_newest(recipe: Recipe, wanted: str, fingerprint: dict[str, Any]) -> ResumePoint:
    folder, faults = Path(recipe.training.output_dir), list[str]()
    for path in reversed(checkpoints_in(folder)):
        saved = manifest.read(path)
        if saved is None and not manifest.was_begun(path):  # of the stock trainer, or of an earlier release
            raise RecipeError(f"{path} has no {manifest.NAME}. Move it away, or set resume_from_checkpoint: {path}")
        fault = _resume_problem(path, saved, recipe, fingerprint)
        if saved is not None and fault is None:
            if faults:
                print_status(f"{'; '.join(faults)}. Resuming from {path.name}.")
            return _resume_from(path, saved, recipe, fingerprint)
        faults.append(f"{path.name} {fault}")
    if wanted == "true" or matches(folder, (*WEIGHTS, "trainer_state.json")):
        why = f" ({'; '.join(faults)})" if faults else ""
        raise RecipeError(
            f"resume_from_checkpoint is {wanted}, but output_dir {str(folder)!r} has no whole checkpoint{why}. "
            "Leave it out to start from step 0. If a run is there, set another output_dir."
        )
    if faults:
        print_status(f"{'; '.join(faults)}. The run starts from step 0.")
    return ResumePoint()


def _resume_named(recipe: Recipe, wanted: str, fingerprint: dict[str, Any]) -> ResumePoint:
    path, folder = Path(wanted).expanduser(), Path(recipe.training.output_dir)
    saved = manifest.read(path)
    fault = _resume_problem(path, saved, recipe, fingerprint)
    if fault:
        raise RecipeError(f"resume_from_checkpoint is {wanted!r}, which is not a whole checkpoint: it {fault}.")
    places = [other.resolve() for other in checkpoints_in(folder)]
    newer = places[places.index(path.resolve()) + 1 :] if path.resolve() in places else []
    if newer:  # with resume_from_checkpoint: true, a later run would go on from the highest step of either
        names = ", ".join(other.name for other in newer)
        raise RecipeError(f"output_dir holds {names}, later than {wanted!r}. Set another output_dir, or delete them.")
    if saved is not None:
        return _resume_from(path, saved, recipe, fingerprint)
    print_status(f"{path} has no {manifest.NAME}, so nothing could be checked.")
    return ResumePoint(str(path), known=False)


def _resume_problem(
    path: Path, saved: dict[str, Any] | None, recipe: Recipe, fingerprint: dict[str, Any]
) -> str | None:
    """Return why a run cannot resume from `path` with the manifest `saved`, or None. RecipeError for another run."""
    if saved is None:
        if manifest.was_begun(path):
            return "was cut off while it was saved"
        needed = ["trainer_state.json"]
        if not recipe.training.save_only_model and not matches(path, ("global_step*",)):  # DeepSpeed's states
            needed += ["optimizer*", "scheduler.pt"]  # transformers loads both or neither
        return next((f"has no {name}" for name in needed if not matches(path, (name,))), None)
    manifest.refuse_another_run(path, saved, fingerprint)
    if not manifest.has_optimizer(saved) and not recipe.training.save_only_model:
        raise RecipeError(f"{path} was saved without its optimizer. Set save_only_model: true to begin with a new one.")
    fault = manifest.find_damage(path, saved)
    return None if fault is None else f"is not whole ({fault})"


def _resume_from(path: Path, saved: dict[str, Any], recipe: Recipe, fingerprint: dict[str, Any]) -> ResumePoint:
    """Return `path` as the resume point. RecipeError if the best checkpoint, which is loaded at the end, is damaged."""
    state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    best = path.with_name(f"checkpoint-{state['best_global_step']}")
    known = manifest.read(best) if recipe.training.load_best_model_at_end else None
    fault = None if known is None else manifest.find_damage(best, known)
    if fault is not None:
        raise RecipeError(f"The best checkpoint {best} is not whole ({fault}). Set load_best_model_at_end: false.")
    for line in manifest.describe_changes(path, saved, fingerprint):
        print_status(line)
    return ResumePoint(str(path), saved["run"])
