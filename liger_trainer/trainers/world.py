"""Checks that the processes that a launcher has promised have become one run. Otherwise each trains by itself.

torchrun, `accelerate launch`, Slurm, MPI, Kubeflow and Ray each say in variables of the environment how many processes
and machines there are. accelerate reads only some of them, and says nothing of the others.
"""

import sys
from collections.abc import Mapping
from typing import Any

# What counts machines or tasks, on each of which something was started.
_STARTS = {
    "PET_NNODES": "machine", "SLURM_STEP_NUM_NODES": "machine", "SKYPILOT_NUM_NODES": "machine",
    "SLURM_STEP_NUM_TASKS": "task", "PMI_SIZE": "task", "OMPI_COMM_WORLD_SIZE": "task", "MV2_COMM_WORLD_SIZE": "task",
}  # fmt: skip


def fault_of_world(environ: Mapping[str, str], world: Any, sharding: str | None = None) -> str | None:
    """Tell what `world` lacks of what was promised, and how to mend it; None if it keeps all promises.

    Args:
        environ (`Mapping[str, str]`): The environment, as the launcher has left it.
        world (`accelerate.PartialState` or `accelerate.Accelerator`): What accelerate has made of it.
        sharding (`str`, *optional*): What the recipe or the arguments promise themselves: an accelerate
            `distributed_type` such as `FSDP`. What `accelerate launch` promises is in `environ`.
    """
    launched, workers, processes = _number(environ, "WORLD_SIZE"), _ray_workers(), world.num_processes
    if launched not in (None, processes):
        return (
            f"WORLD_SIZE is {launched}, but accelerate has {_count(processes, 'process')}, so each would train by "
            "itself. Launch them with torchrun or accelerate launch, or set use_cpu (--use_cpu true) if there is no "
            "GPU for each of them, or unset WORLD_SIZE for a run in one process."
        )
    if workers not in (None, processes):
        return (
            f"Ray Train has {workers} workers, but accelerate has {_count(processes, 'process')}, so each would train "
            "by itself. Start with ray.train.torch.TorchTrainer, and set use_cpu=True if there are no GPUs."
        )
    return _fault_of_starts(environ, processes) or _fault_of_sharding(environ, world, sharding)


def _fault_of_starts(environ: Mapping[str, str], processes: int) -> str | None:
    agents, local = _number(environ, "GROUP_WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    machines = 1 if processes == 1 else agents or (-(-processes // local) if local else None)
    # Ray places its workers by itself. Of a shell that Slurm has opened with a terminal only the first task runs, and
    # an elastic run goes on with fewer machines.
    counted = ["SKYPILOT_NUM_NODES"] if "RAY_RAYLET_PID" in environ else list(_STARTS)
    if "SLURM_PTY_PORT" in environ or ":" in environ.get("PET_NNODES", ""):
        counted = [name for name in counted if name in ("PET_NNODES", "SKYPILOT_NUM_NODES")]
    for name in counted:
        what, promised = _STARTS[name], _number(environ, name)
        here = machines if what == "machine" else agents or processes
        if promised is not None and here is not None and here < promised:
            has = _count(here, what) if what == "machine" else _count(here, "process" if agents is None else "torchrun")
            return (
                f"{name} is {environ[name]}, but this run has {has}, so each {what} would train a model of its own. "
                "Start one torchrun on each machine, which knows of the others (--nnodes, or PET_NNODES for an elastic "
                f"run; srun --ntasks-per-node 1 torchrun), or unset {name} for runs that are meant to be apart."
            )
    return None


def _fault_of_sharding(environ: Mapping[str, str], world: Any, sharding: str | None) -> str | None:
    for asked in ("FSDP", "DEEPSPEED"):
        if environ.get(f"ACCELERATE_USE_{asked}", "").lower() in ("1", "true", "yes", "on", "y", "t"):
            sharding = asked
    alone = world.num_processes == 1 and "WORLD_SIZE" not in environ
    kind = getattr(world.distributed_type, "value", world.distributed_type)
    if sharding in (None, "NO") or not (alone or (sharding in ("FSDP", "DEEPSPEED") and kind == "MULTI_CPU")):
        return None
    why = "this is one process without a launcher" if alone else "it shards on GPUs only, and has none here"
    mend = "Start with torchrun or accelerate launch" if alone else "Run on a machine with a GPU for each process"
    return (
        f"accelerate_config, fsdp, deepspeed or the launcher asks for {sharding}, but accelerate has {kind}: "
        f"{why}. {mend}, or take {sharding} out of the recipe and of accelerate's config."
    )


def _ray_workers() -> int | None:
    """The number of workers of Ray Train that this process is one of; None outside of Ray Train."""
    train = sys.modules.get("ray.train")  # each of its workers has imported it
    try:
        return None if train is None else train.get_context().get_world_size()
    except Exception:  # Ray has several errors for a process that is no worker, and they differ by version
        return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "").partition(":")[0]  # PET_NNODES may be a range
    return int(value) if value.isdecimal() else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"
