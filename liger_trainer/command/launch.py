"""Reads what torchrun, `accelerate launch` or another launcher put into the environment."""

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from liger_trainer.errors import RecipeError, without_tokens

_ATTEMPT = "liger_trainer/attempt"  # a key in the store of torchrun


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes_without_gpu() -> None:
    """Let launched processes on a host without an accelerator find each other, over gloo. Call this before parsing.

    accelerate makes one group of CPU processes only if this variable is set, as `accelerate launch --cpu` does.
    """
    if launched_processes() == 1 or "LOCAL_RANK" not in os.environ:
        return
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def say(line: str) -> None:
    """Print a line of this command on stderr, on the main process."""
    if is_main_process():
        print(f"liger-trainer: {without_tokens(line)}", file=sys.stderr)


def on_all(training: Any, value: Any) -> list[Any]:
    """The `value` of each process, on all of them. They wait for each other here."""
    if training.world_size == 1:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def on_main_for_all(training: Any, compute: Callable[[], Any]) -> Any:
    """What `compute` returns on the main process, on all of them. All raise its RecipeError."""
    found = error = None
    if training.process_index == 0:
        try:
            found = compute()
        except RecipeError as raised:
            error = raised
    found, error = on_all(training, (found, error))[0]
    if error is not None:
        raise error
    return found


def say_error(line: str) -> None:
    """Print an error of this process."""
    print(f"liger-trainer: error: {without_tokens(line)}", file=sys.stderr)


def end_with_launcher() -> None:
    """Get SIGTERM when `accelerate launch` ends that has started this process alone, and does not hand signals on."""
    alone = os.environ.get("ACCELERATE_USE_CPU") in ("True", "False") and "LOCAL_RANK" not in os.environ
    if alone and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def settle_precision(bf16: bool | None, fp16: bool | None) -> None:
    """Let the recipe decide the precision, and say so where accelerate's config has another one. Call before parsing.

    `accelerate launch` passes its `mixed_precision` on in a variable. The trainer and its DeepSpeed and FSDP plugins
    use that variable wherever `bf16` and `fp16` are both false, so a recipe that asks for fp32 would train in 16 bits.
    """
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = "fp16" if fp16 else "no" if bf16 is False else "bf16"  # bf16 is the default of TRL's configs
    if configured in ("no", wanted) or (configured == "fp8" and bf16 is None and not fp16):  # see `fp8/feature.py`
        return
    if wanted == "no":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    keys = f"bf16: {bf16}, fp16: {fp16}".replace("None", "unset").lower()
    say(
        f"the recipe ({keys}) decides the precision, which is {wanted}. The mixed_precision: {configured} of "
        "accelerate's config has no effect."
    )


def read_on_every_process(fp8: bool | None, bf16: bool | None, fp16: bool | None) -> None:
    """With fp8 under FSDP2, have every process read the model. Call this after `settle_precision`, before parsing.

    accelerate 1.15 does not go on if one process is to read it for all (`fsdp_cpu_ram_efficient_loading`, as in the
    configs that come with this package), since weights that are wrapped for fp8 cannot be sent around.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "fp8" and bf16 is None and not fp16
    variables = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    if (fp8 or launched) and all(os.environ.get(name, "").lower() in ("true", "1") for name in variables):
        os.environ[variables[1]] = "false"
        say("with fp8 every process reads the whole model. fsdp_cpu_ram_efficient_loading: true has no effect.")


def join_this_attempt(timeout: float | None = None, backend: str | None = None) -> None:
    """Let processes that torchrun may start again find each other, and not those that have died. Call before parsing.

    torchrun keeps one store of addresses for all attempts (seen in torch 2.11 and 2.13), in which a process may find
    what one of the last attempt has left. Each attempt gets a part of the store for itself. accelerate takes a group
    that is there already.

    Args:
        timeout (`float`, *optional*): How many seconds a collective may take, `ddp_timeout`; half an hour if unset.
        backend (`str`, *optional*): `ddp_backend`; torch's own choice for the device if unset.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or launched_processes() == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        return
    limit = timedelta(seconds=1800 if timeout is None else timeout)
    store, rank, processes = next(dist.rendezvous("env://", timeout=limit))
    store = dist.PrefixStore(name_of_attempt(store, rank, processes, limit.total_seconds()), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=limit)


def name_of_attempt(store: Any, rank: int, processes: int, limit: float) -> str:
    """A name for this attempt that rank 0 makes up, because machines may count the restarts differently.

    Other ranks may first find the name of an earlier attempt. They use one once rank 0 has answered them under it.

    Raises:
        TimeoutError: A process does not come within `limit` seconds.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        name = f"{_ATTEMPT}/{own}"
        store.set(_ATTEMPT, name)
        store.set(f"{name}/all", b" ".join(store.get(f"{name}/{other}") for other in range(1, processes)))
        return name
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        name = store.get(_ATTEMPT).decode()
        store.set(f"{name}/{rank}", own)
        if store.check([f"{name}/all"]) and own.encode() in store.get(f"{name}/all").split():
            return name
        time.sleep(0.1)
    raise TimeoutError(f"The process of rank 0 has not answered within {limit:g} seconds.")
