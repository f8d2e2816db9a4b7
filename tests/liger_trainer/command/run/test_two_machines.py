"""Two machines train one model however they are launched, and one goes on if the other dies."""

import os
import signal
import time

import pytest
import yaml
from launching import ADDRESSES, on_both, start, two_machines
from recipe_fixtures import command, losses, write_recipe, write_rows

from liger_trainer.paths import shipped

pytestmark = pytest.mark.slow
ENTRY = ("-m", "liger_trainer", "train")
TORCHRUN = ("-m", "torch.distributed.run")
PORT = "29517"


@pytest.fixture(scope="module", autouse=True)
def machines():
    with two_machines():
        yield


@pytest.fixture
def alone(folder, capsys):
    """The losses of one process with all rows of a step."""
    recipe = write_recipe(folder, max_steps=3, per_device_train_batch_size=4, output_dir=str(folder / "alone"))
    code, _, err = command(capsys, "train", recipe)
    assert code == 0, err
    return losses(folder / "alone")


def static(machine, entry):
    place = ("--nnodes", 2, "--node_rank", machine, "--master_addr", ADDRESSES[0], "--master_port", PORT)
    return (*TORCHRUN, *place, *entry)


def pet_only(machine, entry):
    return (*TORCHRUN, *entry)


def variables_of(machine):
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(machine),
        "PET_MASTER_ADDR": ADDRESSES[0],
        "PET_MASTER_PORT": PORT,
    }


def elastic(machine, entry):
    rdzv = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv_id", "liger")
    # torchrun compares the endpoint with the host's name, which both machines share here.
    place = ("--local_addr", ADDRESSES[machine], "--rdzv_conf", f"last_call_timeout=2,is_host={1 - machine}")
    return (*TORCHRUN, "--nnodes", "1:2", "--nproc_per_node", 1, "--max_restarts", 3, *rdzv, *place, *entry)


@pytest.mark.parametrize("how", ["torchrun", "PET_* only", "accelerate launch"])
def test_two_machines_are_one_training(how, folder, alone):
    recipe = write_recipe(folder, max_steps=3, use_cpu=True)

    def accelerate(machine, entry):
        config = yaml.safe_load((shipped("configs") / "ddp.yaml").read_text()) | {"mixed_precision": "no"}
        (folder / "ddp.yaml").write_text(yaml.safe_dump(config))
        place = ("--machine_rank", machine, "--main_process_ip", ADDRESSES[0], "--main_process_port", PORT)
        launch = ("-m", "accelerate.commands.launch", "--config_file", folder / "ddp.yaml", "--num_machines", 2)
        return (*launch, "--num_processes", 2, *place, *entry)

    launched = {"torchrun": static, "PET_* only": pet_only, "accelerate launch": accelerate}[how]
    env = variables_of if how == "PET_* only" else lambda machine: {}
    out, _ = on_both(*ENTRY, recipe, cwd=folder, per_machine=launched, env=env)
    assert out.count("Summary") == 1
    together = losses(folder / "out")
    assert together.keys() == alone.keys()
    for step, loss in alone.items():
        assert together[step] == pytest.approx(loss, rel=1e-4)


def test_a_machine_of_an_elastic_run_dies(folder):
    """The other machine restarts by itself from the last checkpoint, and says what has changed."""
    write_rows(folder / "rows.jsonl", 22)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 60, "resume_from_checkpoint": "auto"}
    recipe = write_recipe(folder, use_cpu=True, **saving)
    processes = [
        start(i, *elastic(i, (*ENTRY, recipe)), cwd=folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") for i in range(2)
    ]
    deadline = time.time() + 120
    while not (folder / "out" / "checkpoint-6" / "trainer_state.json").exists() and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(processes[1].pid, signal.SIGKILL)
    workers = [int(pid) for pid in os.popen("ip netns pids liger-b").read().split()]
    for pid in workers:  # a worker has its own process group; a machine that dies takes all of them with it
        os.kill(pid, signal.SIGKILL)
    out, err = processes[0].communicate(timeout=240)
    processes[1].communicate()
    assert processes[0].returncode == 0, out + err
    assert "resumed at step" in out and "saved with 2 processes, and this run has 1" in err, out + err
    assert sorted(losses(folder / "out")) == list(range(1, 61))
