"""Killed, preempted or restarted runs resume from the last whole checkpoint as if nothing had happened."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import PROCESSES, in_processes
from preempted_cli import Hit
from recipe_fixtures import (
    command,
    losses,
    run_elsewhere,
    status_lines,
    status_of_a_run,
    write_model,
    write_recipe,
    write_rows,
)
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import trainer

from liger_trainer.command.run import manifest

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}


def torchrun(folder, recipe, *options, restarts=0, **env):
    return run_elsewhere(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        restarts,
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
        PROCESSES / "preempted_cli.py",
        "train",
        recipe,
        "--use_cpu",
        "true",
        *options,
        cwd=folder,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        **env,
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_dropping(folder):
    """Write a model with attention dropout, and rows for two epochs, so that any change of order shows."""
    tiny_model("llama", attention_dropout=0.3).save_pretrained(folder / "model")
    write_rows(folder / "rows.jsonl", 22)
    return folder


@pytest.fixture
def dropping(folder):
    return write_dropping(folder)


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory):
    """Return the output folder of an uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("unstopped")
    write_model(folder / "model")
    recipe = write_recipe(write_dropping(folder), **SAVING, output_dir=str(folder / "whole"))
    in_processes("preempted_cli.py", "train", recipe, "--use_cpu", "true")
    return folder / "whole"


@pytest.fixture
def whole(dropping, unstopped):
    """Return the losses of an uninterrupted run of two processes, from its folder `whole`."""
    return losses(shutil.copytree(unstopped, dropping / "whole"))


def assert_goes_on(out, whole, resumed, done):
    assert done.returncode == 0, done.stderr
    assert f"resumed at step {resumed}" in done.stdout, done.stdout
    assert losses(out) == whole, "to the last digit"


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_the_run_is_the_same(dropping, whole):
    done = torchrun(dropping, write_recipe(dropping, **SAVING), restarts=1, HIT="1:5:9")
    assert_goes_on(dropping / "out", whole, 4, done)


@pytest.mark.slow
def test_sigterm_of_one_rank_saves_that_step_on_all(dropping, whole):
    """Rank 1 gets the signal in its sixth step. Both ranks save and exit with 143, and a later job resumes."""
    recipe = write_recipe(dropping, **SAVING | {"save_steps": 100}, resume_from_checkpoint="auto")
    done = torchrun(dropping, recipe, HIT="1:5:15")
    assert done.returncode != 0 and "Summary" not in done.stdout
    assert re.search(r"exitcode\s*: 143", done.stderr), done.stderr
    assert done.stderr.count("liger-trainer: terminated. ") == 1
    out = dropping / "out"
    (checkpoint,) = out.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-6" and manifest.find_damage(checkpoint, manifest.read(checkpoint)) is None
    assert not (out / "model.safetensors").exists(), "what a finished run leaves"
    assert_goes_on(out, whole, 6, torchrun(dropping, recipe))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(dropping, whole):
    """The main process has saved its part, and must not delete anything before the other has saved too."""
    keys = SAVING | {"save_total_limit": 1}
    done = torchrun(dropping, write_recipe(dropping, **keys), HIT_SAVE="1:4:9")
    assert done.returncode != 0
    assert manifest.read(dropping / "out" / "checkpoint-2") and not manifest.read(dropping / "out" / "checkpoint-4")
    recipe = write_recipe(dropping, **keys, resume_from_checkpoint="auto")
    done = torchrun(dropping, recipe)
    assert_goes_on(dropping / "out", whole, 2, done)
    assert "checkpoint-4 was cut off" in done.stderr


@pytest.mark.slow
def test_fewer_processes_than_before_are_told(dropping, whole, capsys):
    (dropping / "whole" / "model.safetensors").unlink()
    shutil.rmtree(dropping / "whole" / "checkpoint-8")
    recipe = write_recipe(dropping, **SAVING, output_dir=str(dropping / "whole"), resume_from_checkpoint="auto")
    code, out, err = command(capsys, "train", recipe)
    assert code == 0 and "resumed at step 6" in out, err
    assert "saved with 2 processes, and this run has 1" in err and "gradient_accumulation_steps" in err


def test_sigterm_saves_whatever_save_strategy_says(dropping, capsys, monkeypatch):
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, Hit])
    monkeypatch.setenv("HIT", "0:3:15")
    code, _, err = command(capsys, "train", write_recipe(dropping, max_steps=8))
    assert code == 143, err
    (line,) = (line for line in err.splitlines() if line.startswith("liger-trainer: terminated. "))
    assert str(dropping / "out" / "checkpoint-4") in line and "--resume_from_checkpoint true" in line


def test_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(folder, capsys):
    recipe = write_recipe(folder, **SAVING | {"max_steps": 4}, resume_from_checkpoint="auto")
    code, out, err = command(capsys, "train", recipe)
    assert code == 0 and "resumed" not in out, err
    assert status_lines(err) == status_of_a_run(folder, steps=4), "nothing about resuming"
    code, out, err = command(capsys, "train", recipe)
    assert code == 0 and "resumed at step 4" in out, err


@pytest.mark.parametrize("counter", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "FLYTE_ATTEMPT_NUMBER"])
def test_a_restart_goes_on_by_itself(counter, folder, capsys, monkeypatch):
    recipe = write_recipe(folder, **SAVING | {"max_steps": 4})
    monkeypatch.setenv(counter, "0")
    assert command(capsys, "train", recipe)[0] == 0
    code, _, err = command(capsys, "train", recipe)
    assert code == 2 and "holds an earlier run" in err
    monkeypatch.setenv(counter, "1")
    code, out, err = command(capsys, "train", recipe)
    assert code == 0 and "resumed at step 4" in out, err


def test_restarts_that_torchrun_would_send_to_dead_processes(folder, capsys, monkeypatch):
    for name, value in {"USE_AGENT_STORE": "True", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = command(capsys, "train", write_recipe(folder))
    assert code == 2 and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in err


@pytest.mark.slow
def test_a_killed_rank_of_one_of_two_machines(dropping, whole):
    """The torchrun of the killed process counts a restart. The other is told to restart, and must not count one."""
    recipe, port = write_recipe(dropping, **SAVING, use_cpu=True), free_port()

    def machine(i):
        return run_elsewhere(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            2,
            "--nproc_per_node",
            1,
            "--max-restarts",
            1,
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            f"127.0.0.1:{port}",
            "--rdzv_conf",
            f"is_host={1 - i}",
            "--local_addr",
            "127.0.0.1",
            PROCESSES / "preempted_cli.py",
            "train",
            recipe,
            cwd=dropping,
            HIT="1:5:9",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(machine, range(2))
    assert second.returncode == 0, second.stderr
    assert_goes_on(dropping / "out", whole, 4, first)


def test_sigterm_after_the_last_step_lets_the_model_be_saved(folder, capsys, monkeypatch):
    """Ending a run after its last step would leave only half a model."""
    plain = trainer.Trainer._save

    def hit(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        plain(self, *args, **kwargs)

    monkeypatch.setattr(trainer.Trainer, "_save", hit)
    code, out, err = command(capsys, "train", write_recipe(folder))
    assert code == 0 and "Summary" in out, err
    load_file(folder / "out" / "model.safetensors")


def test_the_handler_of_transformers_is_refused(folder, capsys):
    """It replaces ours, and the process that gets the signal stops without the others."""
    code, _, err = command(capsys, "train", write_recipe(folder, enable_jit_checkpoint=True))
    assert code == 2 and "enable_jit_checkpoint is true" in err and "Remove it" in err


def test_sigterm_before_training_ends_at_once(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "liger_trainer.command.rows.sources.load_rows", lambda *args: os.kill(os.getpid(), signal.SIGTERM)
    )
    code, _, err = command(capsys, "train", write_recipe(folder))
    assert code == 143 and "terminated. Training had not begun." in err, err
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_sigterm_of_accelerate_launch_with_one_process(dropping):
    """accelerate starts the process, waits for it, and does not forward signals."""
    recipe = write_recipe(dropping, **SAVING | {"max_steps": 100000, "lr_scheduler_type": "constant"})
    paths = os.pathsep.join(sys.path)
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_processes",
            "1",
            "-m",
            "liger_trainer",
            "train",
            str(recipe),
        ],
        cwd=dropping,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.time() + 120
    while not (dropping / "out" / "checkpoint-6").exists() and time.time() < deadline:
        time.sleep(0.05)
    launcher.terminate()
    _, err = launcher.communicate(timeout=60)  # it ends once the process has closed the pipe too
    assert "liger-trainer: terminated. The last checkpoint is" in err, err


@pytest.mark.slow
def test_a_finished_run_of_fsdp2_is_not_trained_on(folder):
    from launching import accelerate_fsdp2

    recipe = write_recipe(folder, **SAVING, resume_from_checkpoint="auto", use_cpu=True)
    command = (PROCESSES / "launched_cli.py", "train", recipe)
    accelerate_fsdp2(folder, *command)
    first = losses(folder / "out")
    done = accelerate_fsdp2(folder, *command)
    assert re.search("steps +0, resumed at step 8", done.stdout), done.stdout
    assert losses(folder / "out") == first
