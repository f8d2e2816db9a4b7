"""Launches in which each process would train its own model are errors that say what to do."""

import sys
from types import SimpleNamespace

import pytest

from liger_trainer.trainers.world import launch_problem


def world(processes, kind):
    return SimpleNamespace(num_processes=processes, distributed_type=kind)


ALONE = world(1, "NO")
TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}
FOUR = world(4, "MULTI_GPU")
RAY = {"RAY_RAYLET_PID": "17", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "PET_NNODES": "4"}
PTY = {"SLURM_PTY_PORT": "41235", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}

KEPT = [
    ({}, ALONE, {}),
    (TORCHRUN, FOUR, {}),
    (TORCHRUN | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}, FOUR, {}),
    (TORCHRUN | {"PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "gpu"}, FOUR, {}),
    (TORCHRUN | {"SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, FOUR, {}),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, ALONE, {}),
    ({"SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, ALONE, {}),
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "4"}, FOUR, {}),
    ({"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "4", "ACCELERATE_USE_CPU": "True"}, world(4, "MULTI_CPU"), {}),
    (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, FOUR, {}),  # PartialState says MULTI_GPU, the accelerator FSDP
    (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, world(4, "FSDP"), {"sharding": "FSDP"}),
    (TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"}, world(4, "DEEPSPEED"), {"sharding": "DEEPSPEED"}),
    ({"MASTER_ADDR": "node1"}, ALONE, {}),  # exported in an sbatch file
    ({}, ALONE, {"sharding": "NO"}),
    # One process in an sbatch script or a salloc shell, on one machine: nothing trains apart.
    ({"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, ALONE, {}),
    (TORCHRUN | {"SLURM_NNODES": "4", "SLURM_NTASKS": "4"}, FOUR, {}),
    # Typed in the shell of `srun --ntasks 8 --pty bash`: only the first task runs.
    (PTY, ALONE, {}),
    (TORCHRUN | PTY, FOUR, {}),
    # Two torchruns on one machine, one for each socket.
    (TORCHRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2"}, FOUR, {}),
    # Ray places its workers and tasks; Slurm, Kubernetes and MPI have started Ray.
    (RAY, ALONE, {}),
    (RAY | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, world(2, "MULTI_GPU"), {}),
    # An elastic run on two machines in Slurm after one has died.
    (
        TORCHRUN
        | {"GROUP_WORLD_SIZE": "1", "PET_NNODES": "1:2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"},
        FOUR,
        {},
    ),
    (TORCHRUN | {"SKYPILOT_NUM_NODES": "2"}, FOUR, {}),
    ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, ALONE, {}),
]

BROKEN = [
    ({"PET_NNODES": "2"}, ALONE, {}, ("PET_NNODES is 2", "1 machine", "torchrun")),
    ({"PET_NNODES": "2:4"}, ALONE, {}, ("PET_NNODES is 2:4", "unset PET_NNODES")),
    (TORCHRUN | {"PET_NNODES": "4"}, FOUR, {}, ("PET_NNODES is 4", "2 machines")),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ALONE, {}, ("WORLD_SIZE is 2", "use_cpu")),
    ({"WORLD_SIZE": "2"}, ALONE, {}, ("WORLD_SIZE is 2", "torchrun")),
    (TORCHRUN, world(2, "MULTI_GPU"), {}, ("WORLD_SIZE is 4", "accelerate has 2")),
    ({"SLURM_STEP_NUM_NODES": "2"}, ALONE, {}, ("SLURM_STEP_NUM_NODES is 2", "srun --ntasks-per-node 1 torchrun")),
    (
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_NODES": "2"},
        FOUR,
        {},
        ("SLURM_STEP_NUM_NODES is 2", "PET_NNODES for an elastic run"),
    ),
    # `srun torchrun --standalone` with as many tasks as processes: each task is a run of its own.
    (
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4"},
        FOUR,
        {},
        ("SLURM_STEP_NUM_TASKS is 4", "this run has 1 torchrun"),
    ),
    (TORCHRUN | {"GROUP_WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}, FOUR, {}, ("OMPI_COMM_WORLD_SIZE is 4",)),
    # SkyPilot runs its commands on every machine, in Ray or not.
    ({"SKYPILOT_NUM_NODES": "2"}, ALONE, {}, ("SKYPILOT_NUM_NODES is 2", "torchrun")),
    (RAY | {"SKYPILOT_NUM_NODES": "2"}, ALONE, {}, ("SKYPILOT_NUM_NODES is 2",)),
    ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}, ALONE, {}, ("SLURM_STEP_NUM_TASKS is 8", "torchrun")),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, ALONE, {}, ("OMPI_COMM_WORLD_SIZE is 2", "unset")),
    ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}, world(2, "MULTI_CPU"), {}, ("FSDP", "MULTI_CPU", "GPU")),
    ({"WORLD_SIZE": "2"}, world(2, "MULTI_CPU"), {"sharding": "FSDP"}, ("FSDP", "MULTI_CPU", "accelerate_config")),
    ({}, ALONE, {"sharding": "FSDP"}, ("FSDP", "one process without a launcher", "torchrun")),
    ({}, ALONE, {"sharding": "MULTI_GPU"}, ("MULTI_GPU", "one process", "torchrun")),
    (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2"},
        world(2, "MULTI_CPU"),
        {},
        ("DEEPSPEED", "CPU"),
    ),
]


@pytest.mark.parametrize("environ, world, promise", KEPT)
def test_a_promise_that_is_kept(environ, world, promise):
    assert launch_problem(environ, world, **promise) is None


@pytest.mark.parametrize("environ, world, promise, said", BROKEN)
def test_a_promise_that_is_broken(environ, world, promise, said):
    fault = launch_problem(environ, world, **promise)
    assert fault is not None and all(word in fault for word in said), fault


def test_the_workers_of_ray_are_counted(monkeypatch):
    def outside():
        raise RuntimeError("not in a worker")

    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=outside))
    assert launch_problem({}, ALONE) is None
    context = SimpleNamespace(get_world_size=lambda: 4)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    assert launch_problem(TORCHRUN, FOUR) is None
    fault = launch_problem({}, ALONE)
    assert fault is not None and "Ray Train has 4 workers" in fault and "TorchTrainer" in fault


def test_a_trainer_of_a_script_refuses_to_train_apart(tmp_path, monkeypatch):
    """Two torchrun processes without GPU and use_cpu, for example: each is a world of one, and would go on."""
    from tiny_models import collate, ragged_rows, tiny_model

    from liger_trainer import LigerTrainer, LigerTrainingArguments

    def build(args):
        return LigerTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(4), data_collator=collate)

    options = {"output_dir": str(tmp_path), "report_to": "none", "remove_unused_columns": False}
    args = LigerTrainingArguments(**options)
    stock = LigerTrainingArguments(**options, use_liger=False)
    build(args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2.*use_cpu"):
        build(args)
    build(stock)  # it is exactly the stock trainer
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("PET_NNODES", "2")
    with pytest.raises(ValueError, match="PET_NNODES is 2"):
        build(args)
