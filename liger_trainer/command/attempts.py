"""Counts the attempts of one launch: torchrun restarts all processes of a run when one of them dies."""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from liger_trainer.command.launch import launched_processes

_OURS = "liger_trainer/attempt"


def join_this_attempt(timeout: float | None = None, backend: str | None = None) -> None:
    """Let processes that torchrun may start again find each other, and not those that have died. Call before parsing.

    torchrun keeps one store of addresses for all attempts (seen in torch 2.11 and 2.13), in which a process may find
    what one of the last attempt has left. So each attempt gets a part of the store for itself. accelerate takes a
    group that is there already.

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
    """A name that the processes of this attempt agree on, and that no other attempt has.

    The number of restarts cannot be that name. torchrun counts them per machine: the machine whose process died counts
    one, and another, which restarts only because the first one does, may count none. So rank 0 makes a name up. Other
    ranks may first find the name of an earlier attempt. They use a name once rank 0 has answered them under it.

    Raises:
        TimeoutError: A process does not come within `limit` seconds.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        name = f"{_OURS}/{own}"
        store.set(_OURS, name)
        callers = [store.get(f"{name}/{other}") for other in range(1, processes)]
        store.set(f"{name}/all", b" ".join(callers))
        return name
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        name = store.get(_OURS).decode()
        store.set(f"{name}/{rank}", own)
        if store.check([f"{name}/all"]) and own.encode() in store.get(f"{name}/all").split():
            return name
        time.sleep(0.1)
    raise TimeoutError(f"The process of rank 0 has not answered within {limit:g} seconds.")
