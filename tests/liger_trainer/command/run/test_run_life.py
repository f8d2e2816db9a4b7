"""The life of a run: two processes without a GPU, a used folder, incomplete checkpoints, a full disk, a stop."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import in_processes
from recipe_fixtures import SAVING, command, status_lines, status_of_a_run, steps_of, write_recipe


def test_two_processes_without_a_gpu_are_one_training(folder):
    recipe = write_recipe(folder, max_steps=None, num_train_epochs=1)
    done = in_processes("launched_cli.py", "train", recipe, "--use_cpu", "true")
    assert done.stdout.count("Summary") == 1, done.stdout
    assert done.stderr.count("[liger_trainer] LlamaForCausalLM:") == 1, done.stderr
    assert re.search(r"^  steps +3$", done.stdout, re.M), "12 rows, 2 at a time, in 2 processes"


def test_processes_that_would_train_apart_are_refused(folder, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # without LOCAL_RANK, so no launcher that accelerate knows
    code, _, err = command(capsys, "train", write_recipe(folder))
    assert code == 2 and "WORLD_SIZE is 2" in err and "torchrun" in err
    assert not (folder / "out").exists()


def test_an_output_dir_that_is_taken_is_refused(folder, capsys):
    path = write_recipe(folder, **SAVING)
    assert command(capsys, "train", path)[0] == 0
    before = (folder / "out" / "model.safetensors").stat().st_mtime_ns
    code, _, err = command(capsys, "train", path, "--max_steps", "2")
    assert code == 2
    for way_out in ("output_dir", "checkpoint-4", "resume_from_checkpoint: true", "delete that run"):
        assert way_out in err
    assert (folder / "out" / "model.safetensors").stat().st_mtime_ns == before
    shutil.rmtree(folder / "out" / "checkpoint-2")
    shutil.rmtree(folder / "out" / "checkpoint-4")
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "model.safetensors" in err, "a finished model counts too"


def test_the_model_s_folder_is_refused_as_output_dir(folder, capsys):
    code, _, err = command(capsys, "train", write_recipe(folder, output_dir=str(folder / "model")))
    assert code == 2 and "/model', the folder of model_name_or_path, which would be written over" in err
    assert "Set another output_dir" in err
    assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("saving", [{}, SAVING], ids=["no checkpoints", "checkpoints"])
def test_a_final_save_that_fails_keeps_the_last_step(saving, folder, capsys, monkeypatch):
    """It is kept as a checkpoint if that step has one, or else as a model in another folder."""
    from transformers import AutoModelForCausalLM, Trainer

    plain = Trainer._save

    def save(self, output_dir=None, state_dict=None):
        if Path(output_dir or self.args.output_dir) == folder / "out":
            (folder / "out").mkdir(exist_ok=True)
            (folder / "out" / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return plain(self, output_dir, state_dict)

    monkeypatch.setattr(Trainer, "_save", save)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    code, out, err = command(capsys, "train", write_recipe(folder, **saving))
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("liger-trainer: error: The trained model cannot be written: [Errno 28] No space left")
    assert not (folder / "out" / "model.safetensors").exists(), "half a model would look like one"
    if not saving:
        kept = re.search(r"The model of step 4 is saved in (\S+), without its optimizer.", last)
        AutoModelForCausalLM.from_pretrained(kept[1])
        return
    assert str(folder / "out" / "checkpoint-4") in last and "--resume_from_checkpoint true" in last
    monkeypatch.undo()
    code, out, err = command(capsys, "train", write_recipe(folder, **saving), "--resume_from_checkpoint", "true")
    assert code == 0, err
    assert re.search(r"steps +0, resumed at step 4$", out, re.M)
    assert (folder / "out" / "model.safetensors").is_file()


@pytest.fixture
def run_with_files_up_to(folder, capsys, monkeypatch):
    """Limit the size of files to simulate a full disk: safetensors and torch raise their own errors for it."""

    def run(limit, **keys):
        recipe = write_recipe(folder, **keys)
        (before, hard) = resource.getrlimit(resource.RLIMIT_FSIZE)
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            code, _, err = command(capsys, "train", recipe)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        assert code == 1, err
        (last,) = (line for line in err.splitlines() if line.startswith("liger-trainer: error: "))
        assert last.startswith("liger-trainer: error: A checkpoint cannot be written")
        assert "No checkpoint was saved" in last and "inline_container" not in last and str(folder / "out") in last
        assert not steps_of(folder / "out"), "half a checkpoint fills the disk"
        return last

    return run


def test_a_disk_that_takes_neither_checkpoint_nor_model(saved_run, folder, run_with_files_up_to):
    limit = (saved_run / "checkpoint-2" / "model.safetensors").stat().st_size // 2
    last = run_with_files_up_to(limit, **SAVING)
    assert f"The model cannot be written to {folder} either" in last
    assert not (folder / "out" / "model.safetensors").exists() and not list(folder.glob("liger-trainer-*"))


@pytest.mark.parametrize("saving", [SAVING, {"save_strategy": None}], ids=["every two steps", "by default"])
def test_a_disk_that_takes_the_model_without_its_optimizer(saving, saved_run, folder, run_with_files_up_to):
    from transformers import AutoModelForCausalLM

    sizes = [(saved_run / "checkpoint-2" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")]
    last = run_with_files_up_to(sum(sizes) // 2, **saving)
    assert f"The model of step {2 if saving == SAVING else 4} is saved in {folder / 'out'}" in last
    AutoModelForCausalLM.from_pretrained(folder / "out")


@pytest.mark.parametrize("finished", [False, True], ids=["new folder", "with a finished model"])
def test_a_model_that_output_dir_does_not_take_is_kept_elsewhere(finished, saved_run, folder, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM, Trainer

    plain = Trainer._save

    def save(self, output_dir=None, state_dict=None):
        if Path(output_dir or self.args.output_dir).is_relative_to(folder / "out"):
            os.makedirs(output_dir, exist_ok=True)
            (Path(output_dir) / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return plain(self, output_dir, state_dict)

    resume = ()
    if finished:
        shutil.copytree(saved_run, folder / "out")
        resume = ("--resume_from_checkpoint", "true", "--max_steps", "6")
    monkeypatch.setattr(Trainer, "_save", save)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    code, _, err = command(capsys, "train", write_recipe(folder, save_strategy=None), *resume)
    last = err.strip().splitlines()[-1]
    assert code == 1 and "No space left on device" in last and str(folder / "out") in last
    kept = re.search(r"The model of step \d is saved in (\S+), without its optimizer", last)
    AutoModelForCausalLM.from_pretrained(kept[1])
    assert steps_of(folder / "out") == ([2, 4] if finished else [])
    if finished:
        AutoModelForCausalLM.from_pretrained(folder / "out")
    else:
        assert not (folder / "out" / "model.safetensors").exists()


def test_a_run_stopped_while_it_loads_names_no_earlier_checkpoint(saved_run, folder, capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    shutil.copytree(saved_run, folder / "out")
    monkeypatch.setattr("liger_trainer.command.rows.sources.load_rows", interrupt)
    path = write_recipe(folder, **SAVING, resume_from_checkpoint=True)
    code, _, err = command(capsys, "train", path)
    assert code == 130
    assert status_lines(err) == [status_of_a_run(folder)[0], "interrupted. Training had not begun."]
    assert steps_of(folder / "out") == [2, 4], "nor is it deleted"


def stopped(process, number):
    """Return the output of a process that a signal ends. Python may drop a signal in a finalizer, so it is resent."""
    for _ in range(10):
        process.send_signal(number)
        try:
            return process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    raise AssertionError(f"the run goes on: {process.communicate()[1]}")


def test_a_stopped_run_says_how_to_go_on(folder, capsys):
    recipe = write_recipe(folder, max_steps=100000, lr_scheduler_type="constant", **SAVING)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "liger_trainer", "train", str(recipe)],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it for background jobs
    )
    deadline = time.time() + 120
    while not (folder / "out" / "checkpoint-6").exists() and time.time() < deadline:
        time.sleep(0.05)
    _, err = stopped(process, signal.SIGINT)
    assert process.returncode == 130, err
    (line,) = (line for line in err.splitlines() if line.startswith("liger-trainer: interrupted. "))
    saved = re.search(r"checkpoint-(\d+)", line)
    # Python reports and then forgets a Ctrl-C that arrives while tqdm frees a bar, so it is pressed again.
    told = re.sub(r"Exception ignored in: <function tqdm\.__del__.*\nTraceback", "", err)
    assert saved and int(saved[1]) >= 4 and "Traceback" not in told, err
    assert (folder / "out" / saved[0] / "trainer_state.json").is_file()
    assert line.endswith("To go on, add --resume_from_checkpoint true to the command.")
    state = json.loads((folder / "out" / saved[0] / "trainer_state.json").read_text())
    more = ["--max_steps", str(state["global_step"] + 1)]
    code, out, err = command(capsys, "train", recipe, "--resume_from_checkpoint", "true", *more)
    assert code == 0 and f"resumed at step {state['global_step']}" in out, err


def test_a_closed_pipe_ends_the_command_quietly():
    """`liger-trainer recipes | head -1` prints no traceback and exits like a process that a closed pipe ended."""
    command = [sys.executable, "-m", "liger_trainer", "recipes"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141
