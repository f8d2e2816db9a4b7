"""What a launcher such as torchrun or `accelerate launch` says through the environment, settled with the recipe."""

import os
import sys
from typing import Any

from liger_trainer.errors import RecipeError


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes_without_gpu() -> None:
    """Let launched processes on a host without an accelerator find each other, over gloo. Call this before parsing.

    accelerate makes one group of CPU processes only if a variable says that the CPU is meant, which `accelerate launch
    --cpu` sets. Without it, each process believes that it is alone, and trains on all the rows by itself.
    """
    if launched_processes() == 1 or "LOCAL_RANK" not in os.environ:
        return
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def check_processes(training: Any) -> None:
    """RecipeError if several processes were launched and each would train by itself."""
    launched = launched_processes()
    if launched > 1 and training.world_size == 1:
        raise RecipeError(
            f"WORLD_SIZE is {launched}, but accelerate does not make one run of these processes, so each would train "
            "by itself, into the same output_dir. Launch them with torchrun or accelerate launch, add --use_cpu true "
            "if there is no GPU for each of them, or unset WORLD_SIZE for a run in one process."
        )


def settle_precision(bf16: bool | None, fp16: bool | None) -> None:
    """Let the recipe decide the precision, and say so where accelerate's config has another one. Call before parsing.

    `accelerate launch` passes its `mixed_precision` on in a variable. The trainer and its DeepSpeed and FSDP plugins
    use that variable wherever `bf16` and `fp16` are both false, so a recipe that asks for fp32 would train in 16 bits.
    """
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = "fp16" if fp16 else "no" if bf16 is False else "bf16"  # bf16 is the default of TRL's configs
    if configured in ("no", wanted):
        return
    if wanted == "no":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    if is_main_process():
        keys = f"bf16: {bf16}, fp16: {fp16}".replace("None", "unset").lower()
        print(
            f"liger-trainer: the recipe ({keys}) decides the precision, which is {wanted}. The mixed_precision: "
            f"{configured} of accelerate's config has no effect.",
            file=sys.stderr,
        )
