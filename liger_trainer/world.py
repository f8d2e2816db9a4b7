"""Whether the processes that a launcher has promised have become one run. Where they have not, each trains by itself.

torchrun, `accelerate launch`, Slurm, MPI, Kubeflow and Ray each say in variables of the environment how many processes
and machines there are. accelerate reads only some of them, and says nothing of the others.
"""

import sys
from collections.abc import Mapping
from typing import Any

# Who counts machines, and how to start on all of them.
_MACHINES = {
    "PET_NNODES": "torchrun, which reads it",
    "SLURM_STEP_NUM_NODES": "srun --ntasks-per-node 1 torchrun --nnodes {}",
    "SKYPILOT_NUM_NODES": "torchrun --nnodes {}",
}
_TASKS = ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def fault_of_world(environ: Mapping[str, str], world: Any, sharding: str | None = None) -> str | None:
    """What `world` lacks of what was promised, and how to mend it, as a message; None if it keeps all promises.

    Args:
        environ (`Mapping[str, str]`): The environment, as the launcher has left it.
        world (`accelerate.PartialState` or `accelerate.Accelerator`): What accelerate has made of it.
        sharding (`str`, *optional*): What the recipe or the arguments promise themselves: an accelerate
            `distributed_type` such as `FSDP`. What `accelerate launch` promises is in `environ`.
    """
    fault = _fault_of_processes(environ, world) or _fault_of_starts(environ, world)
    return fault or _fault_of_sharding(environ, world, sharding)


def _fault_of_processes(environ: Mapping[str, str], world: Any) -> str | None:
    launched, workers, processes = _number(environ, "WORLD_SIZE"), _ray_workers(), world.num_processes
    if launched is not None and launched != processes:
        return (
            f"WORLD_SIZE is {launched}, but accelerate does not make one run of these processes"
            f"{'' if processes == 1 else f' (it has {processes})'}, so each would train by itself, into the same "
            "output_dir. Launch them with torchrun or accelerate launch, set use_cpu (--use_cpu true) if there is no "
            "GPU for each of them, or unset WORLD_SIZE for a run in one process."
        )
    if workers is not None and workers != processes:
        return (
            f"Ray Train has {workers} workers, but accelerate has {_count(processes, 'process')}, so each worker would "
            "train by itself. Start with ray.train.torch.TorchTrainer, whose workers torch.distributed knows, and set "
            "use_cpu=True if they have no GPU."
        )
    return None


def _fault_of_starts(environ: Mapping[str, str], world: Any) -> str | None:
    """The machines and tasks on which something was started, which is a torchrun or a process of the run.

    The counts are about something else where Ray places its workers, in a shell that Slurm has opened with a terminal,
    and in an elastic run, which goes on with fewer machines.
    """
    agents, local = _number(environ, "GROUP_WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    machines = 1 if world.num_processes == 1 else agents or (-(-world.num_processes // local) if local else None)
    ray, shell = "RAY_RAYLET_PID" in environ, "SLURM_PTY_PORT" in environ
    elastic = ":" in environ.get("PET_NNODES", "")
    for name, how in _MACHINES.items():
        least = environ.get(name, "").partition(":")[0]
        elsewhere = (ray and name != "SKYPILOT_NUM_NODES") or (name.startswith("SLURM") and (shell or elastic))
        if elsewhere or not least.isdecimal() or machines is None or machines >= int(least):
            continue
        said = ", set PET_NNODES=1:2 in place of --nnodes 1:2 for an elastic run" if name.startswith("SLURM") else ""
        return (
            f"{name} is {environ[name]}, but this run has {_count(machines, 'machine')}, so each machine would train a "
            f"model of its own. Launch with {how.format(least)} (accelerate launch does not, unless it has "
            f"--num_machines){said}, or unset {name} for a run without the others."
        )
    for name in () if ray or shell or elastic else _TASKS:
        tasks = _number(environ, name) or 1
        if tasks > (agents or world.num_processes):
            return (
                f"{name} is {tasks}, but this run has {_count(world.num_processes, 'process')}"
                f"{'' if agents is None else f' of {agents} torchrun'}, so each task would train by itself. Start one "
                f"torchrun on each machine (`srun --ntasks-per-node 1 torchrun ...`), or unset {name} for runs that "
                "are meant to be apart."
            )
    return None


def _fault_of_sharding(environ: Mapping[str, str], world: Any, sharding: str | None) -> str | None:
    wanted = sharding
    for asked in ("FSDP", "DEEPSPEED"):
        if environ.get(f"ACCELERATE_USE_{asked}", "").lower() in ("1", "true", "yes", "on", "y", "t"):
            wanted = asked
    alone = world.num_processes == 1 and "WORLD_SIZE" not in environ
    kind = getattr(world.distributed_type, "value", world.distributed_type)
    if wanted in (None, "NO") or not (alone or (wanted in ("FSDP", "DEEPSPEED") and kind == "MULTI_CPU")):
        return None
    why = "this is one process without a launcher" if alone else "it shards on GPUs only, and has none here"
    mend = "Start with torchrun or accelerate launch" if alone else "Run on a machine with a GPU for each process"
    return (
        f"accelerate_config, fsdp, deepspeed or the launcher asks for {wanted}, but accelerate has {kind}: "
        f"{why}. {mend}, or take {wanted} out of the recipe and of accelerate's config."
    )


def _ray_workers() -> int | None:
    """The number of workers of Ray Train that this process is one of; None outside of Ray Train."""
    train = sys.modules.get("ray.train")  # each of its workers has imported it
    if train is None:
        return None
    try:
        return train.get_context().get_world_size()
    except Exception:  # Ray has several errors for a process that is no worker, and they differ by version
        return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"
