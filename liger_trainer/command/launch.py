"""What a launcher such as torchrun or `accelerate launch` says through the environment, settled with the recipe."""

import os
import sys
from datetime import timedelta
from typing import Any

from liger_trainer.errors import RecipeError
from liger_trainer.world import World, fault_of_world, ray_workers


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


def check_world(recipe: Any) -> None:
    """RecipeError if accelerate has not made of the processes what the launcher, the environment or the recipe say."""
    world = World.of(recipe.training.distributed_state)
    if fault := fault_of_world(os.environ, world, recipe.sharding, ray_workers()):
        raise RecipeError(f"{recipe.path}: {fault}")


def join_after_restart(timeout: float | None = None) -> None:
    """Let processes that torchrun has started again find each other, and not those that have died. Call before parsing.

    torchrun keeps one store of addresses for all attempts (seen in torch 2.13), in which a process may find the address
    that a process of the last attempt has left. accelerate takes a group that is there already.

    Args:
        timeout (`float`, *optional*): How many seconds a collective may take, `ddp_timeout`; half an hour if unset.
    """
    attempt, shared = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if attempt == "0" or shared != "True" or launched_processes() == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        return
    limit = timedelta(seconds=1800 if timeout is None else timeout)
    store, rank, processes = next(dist.rendezvous("env://", timeout=limit))
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(store=store, rank=rank, world_size=processes, timeout=limit)


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
