"""The checkpoint that a run goes on from, if it goes on: named, the newest, or found by a run that is restarted."""

import os
import sys
from pathlib import Path

from liger_trainer.command.attempts import launcher_start
from liger_trainer.command.launch import is_main_process
from liger_trainer.command.recipe import Recipe
from liger_trainer.command.whole_files import checkpoints_in, fault_of_checkpoint
from liger_trainer.errors import RecipeError

# Schedulers count the restarts of a job in these: Slurm, Flyte and torchrun, which may itself be restarted by them.
_RESTARTS = ("SLURM_RESTART_COUNT", "FLYTE_ATTEMPT_NUMBER", "TORCHELASTIC_RESTART_COUNT")


def settle_restart(recipe: Recipe) -> None:
    """Let a run that its scheduler has restarted, or one with `resume_from_checkpoint: auto`, go on if it can.

    It goes on from the newest whole checkpoint in `output_dir`. If there is none, it begins as the recipe says.
    """
    training = recipe.training
    auto = str(training.resume_from_checkpoint).lower() == "auto"
    restart, launched = _restart_of_all(training)
    if not auto and restart is None:
        return
    if recipe.args.overwrite_output_dir:  # what lies there may be from an earlier run
        if not auto and is_main_process():
            print(
                f"liger-trainer: this is a restart ({restart}), and it begins anew, because overwrite_output_dir is "
                "true. Without it, a restart goes on from the last checkpoint.",
                file=sys.stderr,
            )
        return
    needs_optimizer, found = not training.save_only_model, checkpoints_in(Path(training.output_dir))
    asked = str(training.resume_from_checkpoint or "false").lower() != "false"
    if not asked and found and launched is not None and max(map(_written, found)) < launched:
        return  # the first attempt was refused or has ended early, and these are of another run
    if any(not fault_of_checkpoint(path, needs_optimizer) for path in found):
        training.resume_from_checkpoint = "true"
    elif auto:
        training.resume_from_checkpoint = None
    recipe.restarts = True


def _restart_of_all(training) -> tuple[str | None, float | None]:
    """What says that this run is a restart, and when its launch began, if it is torchrun's; None for each unknown.

    torchrun counts restarts for each machine, and not all may have counted one.
    """
    counts = [f"{name} is {os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "").strip("0").isdecimal()]
    here = (counts[0] if counts else None, launcher_start("TORCHELASTIC_RUN_ID"))
    everywhere = [here]
    if training.world_size > 1:
        from accelerate.utils import gather_object

        everywhere = gather_object([here])
    restart = next((count for count, _ in everywhere if count is not None), None)
    return restart, everywhere[0][1] if restart is not None and restart.startswith("TORCHELASTIC") else None


def _written(checkpoint: Path) -> float:
    """When `checkpoint` was written, in seconds since the epoch."""
    state = checkpoint / "trainer_state.json"
    return (state if state.is_file() else checkpoint).stat().st_mtime


def find_checkpoint_together(training) -> str | None:
    """What `find_checkpoint` finds, if all processes find the same. They would train different steps otherwise."""
    found: str | None = None
    fault: RecipeError | None = None
    try:
        found = find_checkpoint(training)
    except RecipeError as error:
        fault = error  # raised below: the others would wait for this process
    if training.world_size > 1:
        from accelerate.utils import gather_object

        everywhere = gather_object([None if found is None else Path(found).name])
        if fault is None and len(set(everywhere)) > 1:
            names = ", ".join(f"{rank}: {name or 'none'}" for rank, name in enumerate(everywhere))
            raise RecipeError(
                f"output_dir is {training.output_dir!r}, in which the processes find different checkpoints ({names}). "
                "Set it to a folder that all machines share."
            )
    if fault is not None:
        raise fault
    return found


def find_checkpoint(training) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means, where `true` is the newest whole one in `output_dir`.

    Raises:
        RecipeError: There is none, or the one that is named is not whole, or is not the newest one in `output_dir`.
    """
    wanted = training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return None
    needs_optimizer = not training.save_only_model
    if str(wanted).lower() != "true":
        path = Path(wanted).expanduser()
        if fault := fault_of_checkpoint(path, needs_optimizer):
            raise RecipeError(
                f"resume_from_checkpoint is {wanted!r}, which is not the folder of a checkpoint ({fault}). Give a path "
                "such as OUTPUT_DIR/checkpoint-100, or true for the newest checkpoint that is whole."
            )
        _check_newest(path, training, needs_optimizer)
        return str(path)
    faults: list[str] = []
    for path in reversed(checkpoints_in(Path(training.output_dir))):
        if not (fault := fault_of_checkpoint(path, needs_optimizer)):
            if faults and is_main_process():
                print(f"liger-trainer: {'; '.join(faults)}. Resuming from {path.name}.", file=sys.stderr)
            return str(path)
        faults.append(f"{path.name} is not whole ({fault})")
    found = f" that is whole: {'; '.join(faults)}" if faults else ""
    raise RecipeError(
        f"resume_from_checkpoint is true, but output_dir {training.output_dir!r} has no checkpoint{found}. Train "
        "without it first, or give the path of a checkpoint."
    )


def _check_newest(checkpoint: Path, training, needs_optimizer: bool) -> None:
    """RecipeError if `output_dir` already holds steps after `checkpoint`, which this run would train once more.

    A later run with `resume_from_checkpoint: true` would go on from the highest step, whichever run that step is from.
    """
    here = [
        path for path in checkpoints_in(Path(training.output_dir)) if not fault_of_checkpoint(path, needs_optimizer)
    ]
    places = [path.resolve() for path in here]
    if checkpoint.resolve() not in places:
        return
    if newer := [path.name for path in here[places.index(checkpoint.resolve()) + 1 :]]:
        raise RecipeError(
            f"resume_from_checkpoint is {training.resume_from_checkpoint!r}, but output_dir "
            f"{training.output_dir!r} holds later checkpoints too ({', '.join(newer)}), so two runs would be mixed "
            "there. Set another output_dir, or delete those checkpoints, or go on from the newest one with "
            "resume_from_checkpoint: true."
        )
