"""What launchers promise and accelerate does not have: each way to train apart is an error with its mend."""

import os
import pty
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from liger_trainer.world import Surroundings, World, fault_of_world, idle_machines

ALONE = World(1, "NO")
TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}
FOUR = World(4, "MULTI_GPU")
SIMPLE = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
RAY = {"RAY_RAYLET_PID": "17", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "PET_NNODES": "4"}
PTY = {"SLURM_PTY_PORT": "41235", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}
TYPED = {"around": Surroundings(terminal=True)}
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "4"}

KEPT = [
    ({}, ALONE, {}),
    (TORCHRUN, FOUR, {}),
    (TORCHRUN | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}, FOUR, {}),
    (TORCHRUN | {"PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "gpu"}, FOUR, {}),
    (TORCHRUN | {"SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, FOUR, {}),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, ALONE, {}),
    ({"SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, ALONE, {}),
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "4"}, FOUR, {}),
    ({"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "4", "ACCELERATE_USE_CPU": "True"}, World(4, "MULTI_CPU"), {}),
    (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, FOUR, {}),  # PartialState says MULTI_GPU, the accelerator FSDP
    (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, World(4, "FSDP"), {"sharding": "FSDP"}),
    (TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"}, World(4, "DEEPSPEED"), {"sharding": "DEEPSPEED"}),
    (TORCHRUN | MESH, FOUR, {"sharding": "FSDP"}),
    ({"MASTER_ADDR": "node1"}, ALONE, {}),  # exported in an sbatch file
    (SIMPLE | {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ALONE, {}),
    (TORCHRUN, FOUR, {"around": Surroundings(ray_processes=4)}),
    ({}, ALONE, {"sharding": "NO"}),
    # One process in a script of sbatch or a shell of salloc, which run on one machine: nothing trains apart.
    ({"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, ALONE, {}),
    (TORCHRUN | {"SLURM_NNODES": "4", "SLURM_NTASKS": "4"}, FOUR, {}),
    # Typed in the shell of `srun --ntasks 8 --pty bash`, of which only the first task runs.
    (PTY, ALONE, TYPED),
    (TORCHRUN | PTY, FOUR, TYPED),
    # Two torchruns on one machine, one for each socket.
    (TORCHRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2"}, FOUR, {}),
    # Ray places its workers and tasks; Slurm, Kubernetes and MPI have started Ray.
    (RAY, ALONE, {}),
    (RAY | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, World(2, "MULTI_GPU"), {"around": Surroundings(2)}),
    # An elastic run of two machines in Slurm, one of which has died.
    (
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "PET_NNODES": "1:2", "SLURM_STEP_NUM_NODES": "2",
                    "SLURM_STEP_NUM_TASKS": "2"}, FOUR, {},
    ),
    # An address that was exported before `accelerate launch --num_processes 1`, or before python with use_cpu.
    (SIMPLE, ALONE, {"around": Surroundings(parent={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})}),
    (SIMPLE | {"ACCELERATE_USE_CPU": "true"}, ALONE, {}),
    (TORCHRUN | {"SKYPILOT_NUM_NODES": "2"}, FOUR, {}),
    ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, ALONE, {}),
]  # fmt: skip

BROKEN = [
    ({"PET_NNODES": "2"}, ALONE, {}, ("PET_NNODES is 2", "1 machine", "torchrun")),
    ({"PET_NNODES": "2:4"}, ALONE, {}, ("PET_NNODES is 2:4", "unset PET_NNODES")),
    (TORCHRUN | {"PET_NNODES": "4"}, FOUR, {}, ("PET_NNODES is 4", "2 machines")),
    ({"PET_NPROC_PER_NODE": "8"}, ALONE, {}, ("PET_NPROC_PER_NODE is 8", "torchrun")),
    (TORCHRUN | {"PET_NPROC_PER_NODE": "8"}, FOUR, {}, ("PET_NPROC_PER_NODE is 8", "2 processes")),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ALONE, {}, ("WORLD_SIZE is 2", "use_cpu")),
    ({"WORLD_SIZE": "2"}, ALONE, {}, ("WORLD_SIZE is 2", "torchrun")),
    (TORCHRUN, World(2, "MULTI_GPU"), {}, ("WORLD_SIZE is 4", "it has 2")),
    (SIMPLE, ALONE, {}, ("MULTI_CPU", "mpirun", "torchrun --nproc_per_node")),
    (SIMPLE | {"ACCELERATE_USE_CPU": "False"}, ALONE, {}, ("started one", "MULTI_GPU")),
    ({"SLURM_STEP_NUM_NODES": "2"}, ALONE, {}, ("SLURM_STEP_NUM_NODES is 2", "srun --ntasks-per-node 1 torchrun")),
    (
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_NODES": "2"}, FOUR, {},
        ("SLURM_STEP_NUM_NODES is 2", "PET_NNODES=1:2 in place of --nnodes 1:2"),
    ),
    # `srun torchrun --standalone` with as many tasks as processes: each task has a run of its own.
    (
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4"}, FOUR, {},
        ("SLURM_STEP_NUM_TASKS is 4", "4 processes of 1 torchrun"),
    ),
    (TORCHRUN | {"GROUP_WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}, FOUR, {}, ("OMPI_COMM_WORLD_SIZE is 4",)),
    # A step that was started from an interactive shell inherits its variables, and has no terminal.
    (PTY, ALONE, {}, ("SLURM_STEP_NUM_NODES is 2",)),
    # SkyPilot runs its commands on every machine, in Ray or not.
    ({"SKYPILOT_NUM_NODES": "2"}, ALONE, {}, ("SKYPILOT_NUM_NODES is 2", "torchrun --nnodes 2")),
    (RAY | {"SKYPILOT_NUM_NODES": "2"}, ALONE, {}, ("SKYPILOT_NUM_NODES is 2",)),
    (SIMPLE, ALONE, {"around": Surroundings(parent={"MASTER_ADDR": "node1"})}, ("started one", "MULTI_CPU")),
    ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}, ALONE, {}, ("SLURM_STEP_NUM_TASKS is 8", "torchrun")),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, ALONE, {}, ("OMPI_COMM_WORLD_SIZE is 2", "unset")),
    ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}, World(2, "MULTI_CPU"), {}, ("FSDP", "DDP", "GPU")),
    ({"WORLD_SIZE": "2"}, World(2, "MULTI_CPU"), {"sharding": "FSDP"}, ("FSDP", "DDP", "accelerate_config")),
    ({}, ALONE, {"sharding": "FSDP"}, ("FSDP", "one process without a launcher", "torchrun")),
    ({}, ALONE, {"sharding": "MULTI_GPU"}, ("MULTI_GPU", "single one", "torchrun")),
    (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2"},
        World(2, "MULTI_CPU"), {}, ("DeepSpeed", "CPU"),
    ),
    (TORCHRUN | MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, FOUR, {}, ("8 processes", "size 2 x cp_size 4")),
    ({}, ALONE, {"around": Surroundings(ray_processes=2)}, ("Ray Train has 2 workers", "TorchTrainer")),
]  # fmt: skip


@pytest.mark.parametrize("environ, world, promise", KEPT)
def test_a_promise_that_is_kept(environ, world, promise):
    assert fault_of_world(environ, world, **promise) is None


@pytest.mark.parametrize("environ, world, promise, said", BROKEN)
def test_a_promise_that_is_broken(environ, world, promise, said):
    fault = fault_of_world(environ, world, **promise)
    assert fault is not None and all(word in fault for word in said), fault


def test_ray_is_asked_only_where_it_runs(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    assert Surroundings.here().ray_processes is None
    context = SimpleNamespace(get_world_size=lambda: 3)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    assert Surroundings.here().ray_processes == 3

    def outside():
        raise RuntimeError("not in a worker")

    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=outside))
    assert Surroundings.here().ray_processes is None


def test_the_environment_of_the_parent_is_read(monkeypatch):
    """As it was when that process began: what it has set since, for this one alone, is not in it."""
    code = "from liger_trainer.world import Surroundings; print(Surroundings.here().parent.get('GIVEN'))"
    shell = f'GIVEN=later {sys.executable} -c "{code}"; true'
    done = subprocess.run(["sh", "-c", shell], env=os.environ | {"GIVEN": "early"}, capture_output=True, text=True)
    assert done.stdout == "early\n", done.stderr


def test_a_terminal_is_seen_behind_redirected_streams():
    """A process without a controlling terminal, and one that has none but this, with its streams in files."""
    code = "from liger_trainer.world import Surroundings as S; open({!r}, 'w').write(str(S.here().terminal))"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "said")
        subprocess.run([sys.executable, "-c", code.format(path)], start_new_session=True, check=True)
        assert open(path).read() == "False"
        command = [sys.executable, "-c", code.format(path)]
        pid, _ = pty.fork()
        if pid == 0:  # in a session with a terminal of its own
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
            os._exit(done.returncode)
        assert os.waitpid(pid, 0)[1] == 0
        assert open(path).read() == "True"


@pytest.mark.parametrize(
    "environ, world, terminal, said",
    [
        ({"SLURM_NNODES": "2"}, ALONE, False, "SLURM_NNODES is 2, and this run uses 1 machine."),
        (PTY | {"SLURM_NNODES": "3"}, ALONE, True, "torchrun --nnodes 3"),
        (TORCHRUN | {"SLURM_NNODES": "2"}, FOUR, False, None),
        ({"SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"}, ALONE, False, None),  # one of several steps of a job
        ({"SLURM_NNODES": "4"} | RAY, ALONE, False, None),
        ({}, ALONE, False, None),
    ],
)
def test_machines_that_are_left_alone_are_told(environ, world, terminal, said):
    line = idle_machines(environ, world, terminal)
    assert line is None if said is None else said in line


def test_a_trainer_of_a_script_refuses_to_train_apart(tmp_path, monkeypatch):
    """As two processes of torchrun do that have no GPU and no use_cpu: each is a world of one, and would go ahead."""
    from tiny_models import collate, ragged_rows, tiny_model

    from liger_trainer import LigerTrainer, LigerTrainingArguments

    def build(args):
        return LigerTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(4), data_collator=collate)

    options = {"output_dir": str(tmp_path), "report_to": "none", "remove_unused_columns": False}
    args, stock = LigerTrainingArguments(**options), LigerTrainingArguments(**options, use_liger=False)
    build(args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2.*use_cpu"):
        build(args)
    build(stock)  # which is exactly the stock trainer
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("PET_NNODES", "2")
    with pytest.raises(ValueError, match="PET_NNODES is 2"):
        build(args)
