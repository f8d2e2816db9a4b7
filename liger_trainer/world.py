"""Whether the processes that a launcher has promised have become one run. Where they have not, each trains by itself.

torchrun, `accelerate launch`, Slurm, MPI, Kubeflow and Ray each say in variables of the environment how many processes
and machines there are. accelerate reads only some of them, and says nothing of the others.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

_TRUE = ("1", "true", "yes", "on", "y", "t")
_MPI_TASKS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_SIZES = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
_UNLAUNCHED = ("NO", "MULTI_CPU")  # the types that accelerate falls back to


@dataclass(frozen=True)
class World:
    """What accelerate has: the number of processes that share a run, and its `distributed_type`, such as `FSDP`."""

    processes: int
    kind: str

    @classmethod
    def of(cls, state) -> "World":
        """The world of accelerate's `PartialState` or `Accelerator`."""
        return cls(state.num_processes, str(getattr(state.distributed_type, "value", state.distributed_type)))


@dataclass(frozen=True)
class Surroundings:
    """What a process can tell of its launcher beside the environment.

    Attributes:
        ray_processes (`int`, *optional*): The number of workers, inside a worker of Ray Train.
        parent (`Mapping`): The environment of the process that has started this one.
        terminal (`bool`): Whether somebody may be typing at it.
    """

    ray_processes: int | None = None
    parent: Mapping[str, str] = field(default_factory=dict)
    terminal: bool = False

    @classmethod
    def here(cls) -> "Surroundings":
        return cls(_ray_workers(), _environment_of_parent(), _has_terminal())


def fault_of_world(
    environ: Mapping[str, str], world: World, sharding: str | None = None, around: Surroundings | None = None
) -> str | None:
    """What `world` lacks of what was promised, and how to mend it, as a message; None if it keeps all promises.

    Args:
        environ (`Mapping[str, str]`): The environment, as the launcher has left it.
        world (`World`): What accelerate has made of it.
        sharding (`str`, *optional*): What the recipe or the arguments promise themselves: an accelerate
            `distributed_type` such as `FSDP`. What `accelerate launch` promises is in `environ`.
        around (`Surroundings`, *optional*): What else is known of the launcher.
    """
    around = around or Surroundings()
    checks = (
        _fault_of_processes(environ, world, around.ray_processes),
        _fault_of_single_launch(environ, world, around.parent),
        _fault_of_machines(environ, world, around.terminal),
        _fault_of_tasks(environ, world, around.terminal),
        _fault_of_sharding(environ, world, sharding),
        _fault_of_mesh(environ, world),
    )
    return next((fault for fault in checks if fault is not None), None)


def idle_machines(environ: Mapping[str, str], world: World, terminal: bool = False) -> str | None:
    """What to say where a job of Slurm has machines that a run leaves alone, which is no fault: nothing runs on them.

    A script of sbatch and a shell of salloc run on one machine, whatever the job has.
    """
    machines, given = _machines(environ, world), _number(environ, "SLURM_NNODES")
    if machines is None or given is None or given <= machines or "RAY_RAYLET_PID" in environ:
        return None
    if "SLURM_STEP_NUM_NODES" in environ and not _in_shell(environ, terminal):
        return None  # the step has the machines that somebody has given it
    return (
        f"SLURM_NNODES is {given}, and this run uses {machines} machine{'' if machines == 1 else 's'}. Launch it with "
        f"`srun --ntasks-per-node 1 torchrun --nnodes {given} ...` to use all of them."
    )


def _ray_workers() -> int | None:
    """The number of workers of Ray Train that this process is one of; None outside of Ray Train."""
    train = sys.modules.get("ray.train")  # whoever is one of its workers has imported it
    if train is None:
        return None
    try:
        return train.get_context().get_world_size()
    except Exception:  # Ray has several errors for a process that is no worker, and they differ by version
        return None


def _environment_of_parent() -> Mapping[str, str]:
    import psutil  # type: ignore[import-untyped]  # accelerate needs it

    try:
        return psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return {}


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal, even if its input and output are files."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except (OSError, AttributeError):
        return False
    return True


def _in_shell(environ: Mapping[str, str], terminal: bool) -> bool:
    """Whether this was typed in the shell of a Slurm step (`srun --pty`, salloc), of which only the first task runs.

    A step that is started from there inherits the variable, but no terminal.
    """
    return terminal and "SLURM_PTY_PORT" in environ


def _is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether the number of machines was said to be a range. Then that is the promise, and not what the job has."""
    return ":" in environ.get("PET_NNODES", "")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE


def _count(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"


def _machines(environ: Mapping[str, str], world: World) -> int | None:
    """The number of machines that the processes of `world` are spread over; None if nothing says it."""
    if world.processes == 1:
        return 1
    if (groups := _number(environ, "GROUP_WORLD_SIZE")) is not None:  # torchrun's
        return groups
    local = _number(environ, "LOCAL_WORLD_SIZE")
    return None if not local else -(-world.processes // local)


def _fault_of_processes(environ: Mapping[str, str], world: World, ray_processes: int | None) -> str | None:
    launched = _number(environ, "WORLD_SIZE")
    if launched is not None and launched != world.processes:
        return (
            f"WORLD_SIZE is {launched}, but accelerate does not make one run of these processes"
            f"{'' if world.processes == 1 else f' (it has {world.processes})'}, so each would train by itself, into "
            "the same output_dir. Launch them with torchrun or accelerate launch, set use_cpu (--use_cpu true) if "
            "there is no GPU for each of them, or unset WORLD_SIZE for a run in one process."
        )
    if ray_processes is not None and ray_processes != world.processes:
        return (
            f"Ray Train has {ray_processes} workers, but accelerate has {_count(world.processes)}, "
            "so each worker would train by itself. Start with ray.train.torch."
            "TorchTrainer, whose workers torch.distributed knows, and set use_cpu=True if they have no GPU."
        )
    return None


def _fault_of_single_launch(environ: Mapping[str, str], world: World, parent: Mapping[str, str]) -> str | None:
    """`accelerate launch` starts one process where its file has no type that it starts several for.

    It then sets the address of a main process, which it does for several processes only, and no number of them. An
    address that `accelerate launch` itself was started with says nothing.
    """
    if world.processes > 1 or "MASTER_ADDR" not in environ:
        return None
    if environ.get("ACCELERATE_USE_CPU") not in ("True", "False"):  # as only accelerate launch writes it
        return None
    if any(name in environ for name in ("WORLD_SIZE", "LOCAL_RANK", *_MPI_TASKS)):
        return None
    if all(parent.get(name) == environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        return None
    return (
        "accelerate launch was asked for several processes and has started one on this machine, because its "
        "distributed_type is MULTI_CPU without mpirun, or NO. Launch without a GPU with `torchrun --nproc_per_node N "
        "-m liger_trainer train RECIPE`, and with GPUs set distributed_type: MULTI_GPU; for a single process set "
        "num_processes: 1 and num_machines: 1."
    )


# Who says how many machines there are, and how to start on all of them.
_MACHINES = {
    "PET_NNODES": "torchrun, which reads it",
    "SLURM_STEP_NUM_NODES": "srun --ntasks-per-node 1 torchrun --nnodes {}",
    "SKYPILOT_NUM_NODES": "torchrun --nnodes {}",
}


def _fault_of_machines(environ: Mapping[str, str], world: World, terminal: bool) -> str | None:
    machines = _machines(environ, world)
    ray = "RAY_RAYLET_PID" in environ  # Ray places its workers, and its own launcher is what the variables are about
    for name, how in _MACHINES.items():
        least = environ.get(name, "").partition(":")[0]
        if machines is None or not least.isdecimal() or (ray and name != "SKYPILOT_NUM_NODES"):
            continue
        if name.startswith("SLURM") and (_is_elastic(environ) or _in_shell(environ, terminal)):
            continue
        if machines < int(least):
            elastic = ", set PET_NNODES=1:2 in place of --nnodes 1:2 for an elastic run"
            return (
                f"{name} is {environ[name]}, but this run has {machines} machine{'' if machines == 1 else 's'}, so "
                f"each machine would train a model of its own. Launch with {how.format(least)} (accelerate launch does "
                f"not, unless it has --num_machines){elastic if name.startswith('SLURM') else ''}, or unset {name} for "
                "a run without the others."
            )
    local = 1 if world.processes == 1 else _number(environ, "LOCAL_WORLD_SIZE")
    promised = _number(environ, "PET_NPROC_PER_NODE")  # it may also be a word, such as gpu
    if promised is not None and local is not None and promised != local and not ray:
        return (
            f"PET_NPROC_PER_NODE is {promised}, but this machine has {_count(local)} of the run. Launch with torchrun, "
            "which reads it, or unset PET_NPROC_PER_NODE."
        )
    return None


def _fault_of_tasks(environ: Mapping[str, str], world: World, terminal: bool) -> str | None:
    """Tasks of Slurm or MPI are the processes, or one launcher on each machine. Each torchrun is a task."""
    if "RAY_RAYLET_PID" in environ or _is_elastic(environ) or _in_shell(environ, terminal):
        return None
    agents, machines = _number(environ, "GROUP_WORLD_SIZE"), _machines(environ, world)
    for name in ("SLURM_STEP_NUM_TASKS", *_MPI_TASKS):
        tasks = _number(environ, name) or 1
        if world.processes > 1 and agents is not None:
            apart = tasks > agents
        else:
            apart = tasks != world.processes and tasks > (machines or world.processes)
        if apart:
            return (
                f"{name} is {tasks}, but this run has {_count(world.processes)}"
                f"{'' if agents is None else f' of {agents} torchrun'}, so each task would train by itself. Start one "
                f"torchrun on each machine (`srun --ntasks-per-node 1 torchrun ...`), or unset {name} for runs that "
                "are meant to be apart."
            )
    return None


def _fault_of_sharding(environ: Mapping[str, str], world: World, sharding: str | None) -> str | None:
    alone = world.processes == 1 and "WORLD_SIZE" not in environ
    if (sharding == "FSDP" or _is_true(environ, "ACCELERATE_USE_FSDP")) and world.kind in _UNLAUNCHED:
        made = "does not shard at all" if alone else "makes DDP of it, whose every process holds the whole model"
        return (
            f"The model is to be sharded with FSDP, but accelerate {made} ({_why(alone)}). {_mend(alone)}, or take "
            "FSDP out of the accelerate config and of the keys fsdp and accelerate_config."
        )
    deepspeed = sharding == "DEEPSPEED" or _is_true(environ, "ACCELERATE_USE_DEEPSPEED")
    if deepspeed and world.kind != "DEEPSPEED" and _is_true(environ, "ACCELERATE_USE_CPU"):
        return (
            "DeepSpeed is to shard the model, but accelerate leaves it out, because it is to use the CPU. Run on GPUs, "
            "or take DeepSpeed out of the accelerate config."
        )
    if sharding not in (None, "NO") and alone:
        return (
            f"accelerate_config promises several processes (distributed_type: {sharding}), but this is a single one, "
            "started without a launcher. Start with `torchrun --nproc_per_node N -m liger_trainer train RECIPE`, or "
            "remove accelerate_config."
        )
    return None


def _why(alone: bool) -> str:
    return "this is one process without a launcher" if alone else "it shards on GPUs only, and has none here"


def _mend(alone: bool) -> str:
    return "Start with torchrun or accelerate launch" if alone else "Run on a machine with a GPU for each process"


def _fault_of_mesh(environ: Mapping[str, str], world: World) -> str | None:
    if not _is_true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    sizes = {name.lower(): _number(environ, f"PARALLELISM_CONFIG_{name}_SIZE") or 1 for name in _SIZES}
    total = 1
    for size in sizes.values():
        total *= size
    if sizes["sp"] > 1 or total in (1, world.processes):
        return None
    product = " x ".join(f"{name}_size {size}" for name, size in sizes.items() if size > 1)
    return (
        f"The accelerate config's parallelism_config is for {total} processes ({product}), and this run has "
        f"{world.processes}. Launch {total}, or change its sizes so that their product is {world.processes}."
    )
