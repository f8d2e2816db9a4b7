"""Detects launches where each process would silently train its own model.

torchrun, `accelerate launch`, Slurm, MPI, Kubeflow and Ray set environment variables with the number of processes and
machines. accelerate reads only some of them, and silently ignores the others.
"""

import sys
from collections.abc import Mapping
from typing import Any

# Variables with the number of machines or tasks that were started.
_STARTS = {
    "PET_NNODES": "machine",
    "SLURM_STEP_NUM_NODES": "machine",
    "SKYPILOT_NUM_NODES": "machine",
    "SLURM_STEP_NUM_TASKS": "task",
    "PMI_SIZE": "task",
    "OMPI_COMM_WORLD_SIZE": "task",
    "MV2_COMM_WORLD_SIZE": "task",
}


def launch_problem(environ: Mapping[str, str], world: Any, sharding: str | None = None) -> str | None:
    """Return an error message if `world` has fewer processes or less sharding than the launch asks for, else None.

    Args:
        environ (`Mapping[str, str]`): The environment variables that the launcher set.
        world (`accelerate.PartialState` or `accelerate.Accelerator`): The processes as accelerate sees them.
        sharding (`str`, *optional*): The accelerate `distributed_type`, such as `FSDP`, that the recipe or the
            arguments ask for. `accelerate launch` asks for one in `environ`.
    """
    launched = _number(environ, "WORLD_SIZE")
    workers = _ray_workers()
    processes = world.num_processes
    if launched not in (None, processes):
        return (
            f"WORLD_SIZE is {launched}, but accelerate has {_count(processes, 'process')}, so each would train by "
            "itself. Launch them with torchrun or accelerate launch. If there are fewer GPUs than processes, set "
            "use_cpu (--use_cpu true). For a run in one process, unset WORLD_SIZE."
        )
    if workers not in (None, processes):
        return (
            f"Ray Train has {workers} workers, but accelerate has {_count(processes, 'process')}, so each would train "
            "by itself. Start with ray.train.torch.TorchTrainer, and on machines without GPUs set use_cpu=True."
        )
    return _fault_of_starts(environ, processes) or _fault_of_sharding(environ, world, sharding)


def _fault_of_starts(environ: Mapping[str, str], processes: int) -> str | None:
    agents = _number(environ, "GROUP_WORLD_SIZE")  # one torchrun agent runs on each machine
    local = _number(environ, "LOCAL_WORLD_SIZE")
    machines = agents or None
    if processes == 1:
        machines = 1
    elif not agents and local:
        machines = -(-processes // local)

    # Ray places its workers itself. In a terminal that Slurm opened (`srun --pty`) only the first task runs, and an
    # elastic run continues with fewer machines.
    variables = ["SKYPILOT_NUM_NODES"] if "RAY_RAYLET_PID" in environ else list(_STARTS)
    if "SLURM_PTY_PORT" in environ or ":" in environ.get("PET_NNODES", ""):
        variables = [name for name in variables if name in ("PET_NNODES", "SKYPILOT_NUM_NODES")]

    for name in variables:
        unit = _STARTS[name]
        expected = _number(environ, name)
        if unit == "machine":
            actual = machines
            actual_unit = "machine"
        else:
            actual = agents or processes
            actual_unit = "process" if agents is None else "torchrun"
        if expected is not None and actual is not None and actual < expected:
            return (
                f"{name} is {environ[name]}, but this run has {_count(actual, actual_unit)}, so each {unit} would "
                "train its own model. Start one torchrun on each machine, and tell it the number of machines "
                "(--nnodes, or PET_NNODES for an elastic run; srun --ntasks-per-node 1 torchrun). For separate runs, "
                f"unset {name}."
            )
    return None


def _fault_of_sharding(environ: Mapping[str, str], world: Any, sharding: str | None) -> str | None:
    for library in ("FSDP", "DEEPSPEED"):
        if environ.get(f"ACCELERATE_USE_{library}", "").lower() in ("1", "true", "yes", "on", "y", "t"):
            sharding = library
    if sharding in (None, "NO"):
        return None
    kind = getattr(world.distributed_type, "value", world.distributed_type)
    if world.num_processes == 1 and "WORLD_SIZE" not in environ:
        why = "this is one process without a launcher"
        remedy = "Start with torchrun or accelerate launch"
    elif sharding in ("FSDP", "DEEPSPEED") and kind == "MULTI_CPU":
        why = "it only shards on GPUs, and this machine has none"
        remedy = "Run on a machine with a GPU for each process"
    else:
        return None
    return (
        f"accelerate_config, fsdp, deepspeed or the launcher asks for {sharding}, but accelerate has {kind}: "
        f"{why}. {remedy}, or take {sharding} out of the recipe and of accelerate's config."
    )


def _ray_workers() -> int | None:
    """Return the number of workers of this Ray Train run, or None outside of Ray Train."""
    train = sys.modules.get("ray.train")  # every Ray Train worker has imported it
    try:
        return None if train is None else train.get_context().get_world_size()
    except Exception:  # outside of a worker Ray raises one of several errors, depending on its version
        return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "").partition(":")[0]  # PET_NNODES may be a range
    return int(value) if value.isdecimal() else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"
