"""What a launcher such as torchrun or `accelerate launch` says through the environment, beside what the recipe says."""

import os

from liger_trainer.recipe_values import RecipeError


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes_without_gpu() -> None:
    """Let launched processes on a host without an accelerator find each other, over gloo. Call before parsing.

    accelerate makes a group of CPU processes only where it is told that the CPU is meant, as `accelerate launch --cpu`
    does with this variable. Without it, each process believes that it is alone, and trains all the rows by itself.
    """
    import torch

    if launched_processes() > 1 and "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def check_processes(training) -> None:
    """RecipeError where several processes were launched that would each train by themselves."""
    launched = launched_processes()
    if launched > 1 and training.world_size == 1:
        raise RecipeError(
            f"WORLD_SIZE is {launched}, but accelerate does not make one run of these processes: each would train "
            "by itself, into the same output_dir. Launch them with torchrun or accelerate launch, add --use_cpu true "
            "where there is no GPU for each, or unset WORLD_SIZE for a run in one process."
        )
