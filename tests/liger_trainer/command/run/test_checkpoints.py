"""Checkpoints and manifests: which are whole, whose run they belong to, which stay, and other runs in the folder."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from preempted_cli import Hit
from recipe_fixtures import SAVING, command, losses, status_lines, status_of_a_run, steps_of, write_recipe, write_rows
from transformers import Trainer, trainer
from transformers.trainer import CallbackHandler

from liger_trainer.command.run import manifest, output_dir
from liger_trainer.command.run.output_dir import ResumePoint
from liger_trainer.command.run.saving import CheckpointManager


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 10)


def overwrite(path, start, data):
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


def flip(path):
    """Flip 64 bytes in the middle of a file, which its headers do not cover."""
    middle = path.stat().st_size // 2
    overwrite(path, middle, bytes(255 - byte for byte in path.read_bytes()[middle : middle + 64]))


def zero_half(path):
    half = path.stat().st_size // 2
    overwrite(path, half, bytes(path.stat().st_size - half))


DAMAGES = {
    "no state": lambda checkpoint: (checkpoint / "trainer_state.json").unlink(),
    "half a state": lambda checkpoint: truncate(checkpoint / "trainer_state.json"),
    "half the weights": lambda checkpoint: truncate(checkpoint / "model.safetensors"),
    "no weights": lambda checkpoint: (checkpoint / "model.safetensors").unlink(),
    "flipped weights": lambda checkpoint: flip(checkpoint / "model.safetensors"),
    "zeroed weights": lambda checkpoint: zero_half(checkpoint / "model.safetensors"),
    "half an optimizer": lambda checkpoint: truncate(checkpoint / "optimizer.pt"),
    "no optimizer": lambda checkpoint: (checkpoint / "optimizer.pt").unlink(),
    "flipped optimizer": lambda checkpoint: flip(checkpoint / "optimizer.pt"),
    "zeroed optimizer": lambda checkpoint: zero_half(checkpoint / "optimizer.pt"),
    "no scheduler": lambda checkpoint: (checkpoint / "scheduler.pt").unlink(),
    "no random state": lambda checkpoint: (checkpoint / "rng_state.pth").unlink(),
    "zeroed random state": lambda checkpoint: zero_half(checkpoint / "rng_state.pth"),
    "half a manifest": lambda checkpoint: truncate(checkpoint / manifest.NAME),
    "killed": lambda checkpoint: (checkpoint / manifest.NAME).rename(checkpoint / manifest.BEGUN),
    "no file": lambda checkpoint: shutil.rmtree(checkpoint) or checkpoint.mkdir(),
}
ON_REQUEST = ("no scheduler", "zeroed random state")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, id=name, marks=pytest.mark.slow if name in ON_REQUEST else ())
        for name, damage in DAMAGES.items()
    ],
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(damage, saved_run, folder, capsys):
    shutil.copytree(saved_run, folder / "out")
    damage(folder / "out" / "checkpoint-4")
    path = write_recipe(folder, **SAVING)
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", folder / "out" / "checkpoint-4")
    assert code == 2 and "checkpoint-4" in err, "what was asked for by name is not replaced by another"
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "true")
    assert code == 0, err
    assert re.search(r"steps +2, resumed at step 2$", out, re.M)
    assert " for 0.33 epochs of these rows" in out, "of those two steps"
    assert re.search(r"checkpoint-4 .*checkpoint-2", err), "said in a line"
    assert losses(folder / "out") == losses(saved_run), "to the last digit"


def test_no_whole_checkpoint_at_all(saved_run, folder, capsys):
    shutil.copytree(saved_run, folder / "out")
    for step in (2, 4):
        flip(folder / "out" / f"checkpoint-{step}" / "optimizer.pt")
    path = write_recipe(folder, **SAVING)
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", "true")
    assert code == 2 and "checkpoint-2" in err and "checkpoint-4" in err
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", "auto")
    assert code == 2 and "checkpoint-2 is not whole" in err and "set another output_dir" in err, "not by itself"
    for name in ("model.safetensors", "trainer_state.json"):
        (folder / "out" / name).unlink()
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "auto")
    assert code == 0 and "resumed" not in out
    assert re.search("checkpoint-4 is not whole .*checkpoint-2 is not whole .*starts from step 0", err)
    assert losses(folder / "out") == losses(saved_run)


def test_a_checkpoint_without_a_manifest_is_taken_by_its_name_only(saved_run, folder, capsys):
    """The stock trainer and earlier releases save without one."""
    shutil.copytree(saved_run, folder / "out")
    checkpoint = folder / "out" / "checkpoint-4"
    (checkpoint / manifest.NAME).unlink()
    path = write_recipe(folder, **SAVING, max_steps=5)
    for wanted in ("true", "auto"):
        code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", wanted)
        assert code == 2 and f"resume_from_checkpoint: {checkpoint}" in err, "nor is the one before taken"
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", checkpoint)
    assert code == 0 and "resumed at step 4" in out and "nothing could be checked" in err, err
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "true")
    assert code == 0 and "resumed at step 5" in out, "the older one without a manifest is passed over"
    (folder / "out" / "checkpoint-4").rename(folder / "foreign")
    options = ("--resume_from_checkpoint", folder / "foreign", "--output_dir", folder / "other")
    zero_half(folder / "foreign" / "optimizer.pt")
    code, _, err = command(capsys, "train", path, *options)
    assert code == 2 and "cannot be loaded" in err
    (folder / "foreign" / "scheduler.pt").unlink()
    code, _, err = command(capsys, "train", path, *options)
    assert code == 2 and "has no scheduler.pt" in err, "transformers would leave out the optimizer's state too"


def test_a_pickle_that_torch_rejects(saved_run, folder, capsys):
    import torch

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(folder / "sprung"),)

    shutil.copytree(saved_run / "checkpoint-4", folder / "foreign")
    (folder / "foreign" / manifest.NAME).unlink()
    torch.save(Trap(), folder / "foreign" / "optimizer.pt")
    path = write_recipe(folder, **SAVING, max_steps=5)
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", folder / "foreign")
    assert code == 2 and "cannot be loaded" in err and not (folder / "sprung").exists()


def other_base(folder):
    from tiny_models import tiny_model

    tiny_model("llama", seed=1).save_pretrained(folder / "model")


def other_rows(folder):
    write_rows(folder / "rows.jsonl", 13)


REFUSED = {
    "base": ({}, other_base, "model_name_or_path is"),
    "rows": ({}, other_rows, r"dataset_name is rows.jsonl \(13 rows.* was rows.jsonl \(12 rows"),
    "optimizer": ({"optim": "sgd"}, None, "optim is 'sgd' and was 'adamw_torch"),
    "adapter": ({"use_peft": True, "lora_target_modules": ["q_proj"]}, None, "use_peft is True and was False"),
    "trainer": (
        {"trainer": "medusa", "medusa_num_heads": 1},
        None,
        "trainer is 'medusa' and was 'sft'",
    ),
}


@pytest.mark.parametrize("keys, change, said", REFUSED.values(), ids=REFUSED)
def test_another_run_is_not_gone_on_with(keys, change, said, saved_run, folder, capsys):
    shutil.copytree(saved_run, folder / "out")
    if change is not None:
        change(folder)
    path = write_recipe(folder, **SAVING | keys)
    for wanted in ("auto", saved_run / "checkpoint-2"):
        code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", wanted, "--max_steps", "6")
        assert code == 2 and re.search(said, err), err
        shutil.rmtree(folder / "out", ignore_errors=True)


LORA = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_r": 4, "lora_alpha": 8}


def test_another_adapter_is_not_gone_on_with(folder, capsys):
    path = write_recipe(folder, **SAVING, **LORA, max_steps=2)
    assert command(capsys, "train", path)[0] == 0
    for keys in ({"lora_alpha": 16}, {"lora_r": 8}, {"lora_target_modules": ["up_proj"]}, {"use_rslora": True}):
        path = write_recipe(folder, **SAVING | LORA | keys)
        code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", "true")
        assert code == 2 and f"{next(iter(keys))} is" in err, err


def test_a_run_may_go_on_with_other_values(saved_run, folder, capsys):
    shutil.copytree(saved_run, folder / "out")
    keys = {"per_device_train_batch_size": 4, "lr_scheduler_type": "cosine", "seed": 7, "max_steps": 6}
    keys |= {"model_init_kwargs": {"attention_dropout": 0.1}}
    path = write_recipe(folder, **SAVING | keys, logging_steps=2, save_total_limit=3, eval_fraction=None)
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "auto")
    assert code == 0, err
    assert "resumed at step 4" in out, "the new values hold"


def test_resuming_next_to_newer_checkpoints_is_refused(saved_run, folder, capsys):
    shutil.copytree(saved_run, folder / "out")
    path = write_recipe(folder, **SAVING)
    older = ("--resume_from_checkpoint", folder / "out" / "checkpoint-2", "--max_steps", "3")
    code, _, err = command(capsys, "train", path, *older)
    assert code == 2 and "checkpoint-4" in err and "another output_dir" in err, "true would go on from either later"
    assert command(capsys, "train", path, *older, "--output_dir", folder / "other")[0] == 0
    (folder / "out" / "checkpoint-4").rename(folder / "gone")
    assert command(capsys, "train", path, *older)[0] == 0
    newest = folder / "out" / "checkpoint-3"
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", newest, "--max_steps", "5")
    assert code == 0 and re.search(r"steps +2, resumed at step 3$", out, re.M), err


def test_resume_says_what_the_checkpoint_decides(saved_run, folder, capsys):
    path = write_recipe(folder, **SAVING)
    resume = ("--resume_from_checkpoint", saved_run / "checkpoint-2")
    code, _, err = command(capsys, "train", path, *resume, "--learning_rate", "9e-3", "--weight_decay", "0.5")
    assert code == 0, err
    assert losses(folder / "out") == losses(saved_run), "the states decide"
    line = next(line for line in err.splitlines() if "learning_rate" in line)
    assert "learning_rate stays 0.01, not 0.009" in line and "weight_decay stays 0.0, not 0.5" in line
    shutil.rmtree(folder / "out")
    code, _, err = command(capsys, "train", path, *resume)
    assert code == 0 and "stays" not in err


def test_a_reference_of_dpo_is_the_base(folder, capsys):
    (folder / "pairs.jsonl").write_text('{"prompt": "w3 w4 ", "chosen": "w5", "rejected": "w6"}\n' * 4)
    keys = {"trainer": "dpo", "dataset_name": "pairs.jsonl", "prompt_template": None, "max_steps": 2}
    assert command(capsys, "train", write_recipe(folder, **SAVING | keys))[0] == 0
    path = write_recipe(folder, **SAVING | keys, beta=0.5)
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", "true", "--max_steps", "3")
    assert code == 0, err
    other_base(folder)
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", "true", "--max_steps", "4")
    assert code == 2 and "model_name_or_path is" in err


def test_a_restart_does_not_take_the_run_of_other_rows(saved_run, folder, capsys, monkeypatch):
    shutil.copytree(saved_run, folder / "out")
    other_rows(folder)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, _, err = command(capsys, "train", write_recipe(folder, **SAVING))
    assert code == 2 and "dataset_name is rows.jsonl (13 rows" in err


def test_a_later_checkpoint_of_another_run_does_not_end_this_one(saved_run, folder, capsys):
    shutil.copytree(saved_run, folder / "out")
    foreign = folder / "out" / "checkpoint-900"
    shutil.copytree(saved_run / "checkpoint-4", foreign)
    (foreign / manifest.NAME).unlink()
    state = json.loads((foreign / "trainer_state.json").read_text())
    (foreign / "trainer_state.json").write_text(json.dumps(state | {"global_step": 900}))
    path = write_recipe(folder, **SAVING, max_steps=6)
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "auto")
    assert code == 2 and "checkpoint-900" in err and "Summary" not in out
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", folder / "out" / "checkpoint-4")
    assert code == 2 and "checkpoint-900" in err


@pytest.mark.parametrize("clock", [1e9, 4e9], ids=["set forward", "set back"])
def test_old_checkpoints_go_by_their_steps(clock, saved_run, folder, capsys):
    """The clock was wrong while the first ones were saved."""
    shutil.copytree(saved_run, folder / "out")
    for step in (2, 4):
        for path in (folder / "out" / f"checkpoint-{step}", *(folder / "out" / f"checkpoint-{step}").iterdir()):
            os.utime(path, (clock + step, clock + step))
    path = write_recipe(folder, **SAVING, max_steps=8, save_total_limit=2)
    code, _, err = command(capsys, "train", path, "--resume_from_checkpoint", "auto")
    assert code == 0 and steps_of(folder / "out") == [6, 8], err


BEST = {"eval_strategy": "steps", "eval_steps": 2, "eval_fraction": 0.2, "load_best_model_at_end": True}


def evaluate_to(monkeypatch, *values):
    """Make the evaluations after steps 2, 4, ... return these losses."""
    plain = CallbackHandler.on_evaluate

    def on_evaluate(self, args, state, control, metrics):
        metrics["eval_loss"] = values[state.global_step // 2 - 1]
        return plain(self, args, state, control, metrics)

    monkeypatch.setattr(CallbackHandler, "on_evaluate", on_evaluate)


def test_the_best_and_the_newest_checkpoint_stay(folder, capsys, monkeypatch):
    evaluate_to(monkeypatch, 1.0, 3.0, 2.0, 4.0)
    path = write_recipe(folder, **SAVING, **BEST, max_steps=8, save_total_limit=1)
    code, _, err = command(capsys, "train", path)
    assert code == 0 and steps_of(folder / "out") == [2, 8], err
    code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "auto")
    assert code == 0 and "steps    0, resumed at step 8" in out, "a run that is finished"


def test_the_best_model_of_a_folder_that_was_moved(folder, capsys, monkeypatch):
    """Its state names the best checkpoint at its old path. A run that continues elsewhere finds it too."""
    evaluate_to(monkeypatch, 1.0, 3.0, 3.0)
    path = write_recipe(folder, **SAVING, **BEST, learning_rate=1.0)
    assert command(capsys, "train", path)[0] == 0
    best = (folder / "out" / "model.safetensors").read_bytes()
    assert best == (folder / "out" / "checkpoint-2" / "model.safetensors").read_bytes()
    (folder / "out").rename(folder / "moved")
    elsewhere = ("--resume_from_checkpoint", folder / "moved" / "checkpoint-4", "--max_steps", "6")
    for options in (("--resume_from_checkpoint", "auto", "--output_dir", folder / "moved"), elsewhere):
        code, _, err = command(capsys, "train", path, *options)
        assert code == 0, err
    assert (
        best
        == (folder / "moved" / "model.safetensors").read_bytes()
        == (folder / "out" / "model.safetensors").read_bytes()
    )
    flip(folder / "moved" / "checkpoint-2" / "model.safetensors")
    shutil.rmtree(folder / "out")
    code, _, err = command(capsys, "train", path, *elsewhere)
    assert code == 2 and "checkpoint-2 is not whole (model.safetensors has changed" in err, err
    assert not (folder / "out").exists(), "told before training"
    code, out, err = command(capsys, "train", path, *elsewhere, "--load_best_model_at_end", "false")
    assert code == 0 and "resumed at step 4" in out, err


def test_patience_is_counted_on(folder, capsys, monkeypatch):
    """The result equals the uninterrupted run, and a run that stopped early counts as finished."""
    evaluate_to(monkeypatch, 1.0, 2.0, 3.0, 0.5, 0.4, 0.3)
    path = write_recipe(folder, **SAVING, **BEST, max_steps=12, early_stopping_patience=2)
    assert "steps    6 of 12, stopped early" in command(capsys, "train", path)[1]
    model = (folder / "out" / "model.safetensors").read_bytes()
    for done, resumed in ((0, 6), (2, 4)):
        if done:
            shutil.rmtree(folder / "out" / "checkpoint-6")
        code, out, err = command(capsys, "train", path, "--resume_from_checkpoint", "auto")
        assert code == 0 and f"steps    {done}, resumed at step {resumed} of 12, stopped early" in out, err
        assert (folder / "out" / "model.safetensors").read_bytes() == model


def test_weights_without_their_optimizer_are_not_overwritten(folder, capsys):
    """A run that cannot resume from them would start from step 0 and delete them one by one."""
    assert command(capsys, "train", write_recipe(folder, **SAVING, save_only_model=True))[0] == 0
    for name in ("model.safetensors", "trainer_state.json"):
        (folder / "out" / name).unlink()
    code, _, err = command(capsys, "train", write_recipe(folder, **SAVING), "--resume_from_checkpoint", "auto")
    assert code == 2 and "checkpoint-4 was saved without its optimizer" in err


def test_a_crash_while_a_checkpoint_is_deleted(tmp_path, monkeypatch):
    """The remains count as incomplete, and are deleted after the next checkpoint is saved."""
    said = {"recipe": {}, "processes": 1, "run": "a run"}
    names = ["config.json", "model.safetensors", "trainer_state.json"]
    checkpoint, plain = tmp_path / "checkpoint-2", os.unlink
    for stop in range(len(names) + 1):
        checkpoint.mkdir(exist_ok=True)
        for name in names:
            (checkpoint / name).write_text(name)
        manifest.write(checkpoint, names, said)
        left = iter([None] * stop)
        with monkeypatch.context() as patch, pytest.raises(StopIteration):
            patch.setattr(os, "unlink", lambda *args, left=left, **kwargs: next(left) or plain(*args, **kwargs))
            manifest.remove(checkpoint)
        assert (checkpoint / manifest.BEGUN).exists() and not (checkpoint / manifest.NAME).exists()
    (tmp_path / "checkpoint-4").mkdir()
    CheckpointManager({}, ResumePoint(), limit=1)._write(tmp_path / "checkpoint-4", [], said, None)
    assert steps_of(tmp_path) == [4]


def test_a_damaged_later_checkpoint_does_not_push_out_a_new_one(tmp_path):
    """The run resumed from step 2 because the checkpoint of step 6 is damaged. It may keep one."""
    keeper = CheckpointManager({"recipe": {}, "processes": 1}, ResumePoint(run="a run"), limit=1)
    for step in (2, 6, 4):
        checkpoint = tmp_path / f"checkpoint-{step}"
        manifest.begin(checkpoint, {})
        (checkpoint / "model.safetensors").write_text(str(step))
        keeper._write(checkpoint, ["model.safetensors"], {"recipe": {}, "processes": 1, "run": "a run"}, None)
        if step == 6:
            manifest.begin(tmp_path / "checkpoint-2", {})
            manifest.write(tmp_path / "checkpoint-2", [], {"recipe": {}, "processes": 1, "run": "another"})
    assert steps_of(tmp_path) == [2, 4, 6]


def test_a_manifest_is_waited_for_again_after_ctrl_c(tmp_path, monkeypatch):
    """Ctrl-C ends the first wait. The message about the run then names its newest checkpoint."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            output_dir=tmp_path, should_save=True, world_size=1, process_index=0, save_on_each_node=False
        ),
        state=SimpleNamespace(global_step=2, best_model_checkpoint=None),
        accelerator=SimpleNamespace(wait_for_everyone=lambda: None),
    )
    keeper = CheckpointManager({"recipe": {}, "processes": 1}, ResumePoint())
    goes_on = threading.Event()
    write = keeper._write
    monkeypatch.setattr(keeper, "_write", lambda *given: goes_on.wait(60) and write(*given))
    keeper.begin(trainer)
    keeper.finish(trainer)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Future, "result", lambda self: signal.raise_signal(signal.SIGINT))
        keeper.wait(trainer)
    signal.signal(signal.SIGINT, before)
    threading.Timer(0.2, goes_on.set).start()
    keeper.wait(trainer)
    assert manifest.read(tmp_path / "checkpoint-2") is not None


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_sigterm_keeps_its_checkpoint(strategy, folder, capsys, monkeypatch):
    """This holds with load_best_model_at_end and save_total_limit 1, even if that step's evaluation is not the best."""
    keys = BEST | {"save_strategy": strategy, "save_steps": 2 if strategy == "steps" else None, "learning_rate": 1.0}
    recipe = write_recipe(folder, **keys, max_steps=12, save_total_limit=1)
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, Hit])
    monkeypatch.setenv("HIT", "0:9:15")
    code, _, err = command(capsys, "train", recipe)
    assert code == 143 and f"checkpoint is {folder / 'out' / 'checkpoint-10'}" in err, err
    assert 10 in steps_of(folder / "out")
    monkeypatch.undo()
    code, out, err = command(capsys, "train", recipe, "--resume_from_checkpoint", "auto")
    assert code == 0 and "resumed at step 10" in out, err


def test_sigterm_at_the_end_of_an_epoch_evaluates_it(folder, capsys, monkeypatch):
    """An uninterrupted run evaluates there, and both runs must have the same history."""
    keys = {"max_steps": None, "num_train_epochs": 4, "eval_strategy": "epoch", "eval_fraction": 0.2}
    recipe = write_recipe(folder, **keys, learning_rate=1.0)
    assert command(capsys, "train", recipe, "--output_dir", folder / "whole")[0] == 0
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, Hit])
    monkeypatch.setenv("HIT", "0:9:15")
    code, _, err = command(capsys, "train", recipe)
    assert code == 143 and steps_of(folder / "out") == [10], "two epochs of five steps"
    monkeypatch.undo()
    assert command(capsys, "train", recipe, "--resume_from_checkpoint", "auto")[0] == 0
    histories = [
        json.loads((folder / name / "trainer_state.json").read_text())["log_history"] for name in ("out", "whole")
    ]
    kept = [[(log["step"], log.get("loss"), log.get("eval_loss")) for log in history] for history in histories]
    assert kept[0] == kept[1]


LOCKS = (
    "import fcntl, sys, time\n"
    "file = open(sys.argv[1], 'a+')\n"
    "try:\n"
    "    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except OSError:\n"
    "    sys.exit(9)\n"
    "print('held', flush=True)\n"
    "time.sleep(float(sys.argv[2]))\n"
)


def test_two_runs_in_one_folder(folder, capsys, monkeypatch):
    """The second starts while the first is loading and has saved nothing. A killed run does not block the next."""
    path, lock = write_recipe(folder), folder / "out" / "_liger_trainer.lock"
    lock.parent.mkdir()
    lock.write_text("process 4711 on node7")
    command_line = [sys.executable, "-c", LOCKS, lock]
    first = subprocess.Popen([*command_line, "100"], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        for options in ((), ("--resume_from_checkpoint", "auto")):
            code, _, err = command(capsys, "train", path, *options)
            assert code == 2 and "another run is using it (process 4711 on node7)" in err, err
    finally:
        first.kill()
        first.wait()
    ends = []

    def save(self, *args, **kwargs):
        ends.append(subprocess.run([*command_line, "0"]).returncode)
        return plain_save(self, *args, **kwargs)

    plain_save = Trainer.save_state
    monkeypatch.setattr(Trainer, "save_state", save)
    code, out, err = command(capsys, "train", path)
    assert code == 0 and "Summary" in out, err
    assert status_lines(err) == status_of_a_run(folder, steps=4), "nothing about the lock that was left"
    assert ends == [9], "held until the model is saved"
    assert not lock.exists()


def test_a_disk_that_is_full_at_the_start(folder, capsys, monkeypatch):
    """A limit on file sizes stands for the full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lock(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            return plain(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    plain = output_dir._lock
    monkeypatch.setattr(output_dir, "_lock", lock)
    code, _, err = command(capsys, "train", write_recipe(folder))
    assert code == 2 and "cannot be written: File too large" in err


@pytest.mark.parametrize("error", [PermissionError(1, "Operation not permitted"), OSError(116, "Stale file handle")])
def test_any_error_of_a_write_keeps_the_model(error, folder, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM

    def fail(self, output_dir):
        raise error

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", fail)
    code, _, err = command(capsys, "train", write_recipe(folder, **SAVING))
    last = err.strip().splitlines()[-1]
    assert code == 1 and error.strerror in last and f"The model of step 2 is saved in {folder / 'out'}" in last
    AutoModelForCausalLM.from_pretrained(folder / "out")
    assert not steps_of(folder / "out")


def test_reading_rows_is_not_taken_for_saving(folder, capsys, monkeypatch):
    """An I/O error of the data keeps its own traceback, without the advice to make room."""

    def fail(self, *args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Trainer, "training_step", fail)
    with pytest.raises(OSError, match="Input/output error"):
        command(capsys, "train", write_recipe(folder))


def test_a_checkpoint_goes_to_the_hub_with_its_manifest(folder, capsys, monkeypatch):
    """A Hub folder without a manifest could not be resumed. A Hub error is not reported as a full disk."""

    def push(self, checkpoint=None, **kwargs):
        assert not checkpoint or manifest.find_damage(Path(checkpoint), manifest.read(Path(checkpoint))) is None
        raise OSError("the Hub is away")

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    with pytest.raises(OSError, match="the Hub is away"):
        command(capsys, "train", write_recipe(folder, **SAVING, push_to_hub=True, hub_strategy="checkpoint"))
    shutil.rmtree(folder / "out")
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, checkpoint: None)
    monkeypatch.setattr(Trainer, "push_to_hub", push)
    with pytest.raises(OSError, match="the Hub is away"):
        command(capsys, "train", write_recipe(folder, **SAVING, push_to_hub=True))
    assert (folder / "out" / "model.safetensors").exists(), "the model was saved whole"


def test_a_token_is_not_shown(folder, capsys, monkeypatch):
    secret = "hf_" + "a1" * 12
    code, out, err = command(capsys, "train", write_recipe(folder), "--dry_run", "--hub_token", secret)
    assert code == 0 and secret not in out + err and "# hub_token is set (not shown)" in out
    options = ("--hub_token", secret, "--push_to_hub", "false")
    monkeypatch.setattr(Trainer, "training_step", interrupt)
    path = write_recipe(folder, **SAVING, model_init_kwargs={"token": secret})
    code, out, err = command(capsys, "train", path, *options)
    assert code == 130 and secret not in out + err
    assert secret not in "".join(path.read_text() for path in (folder / "out").rglob("*.json"))
    code, _, err = command(capsys, "train", write_recipe(folder), "--hub_tokn", secret)
    assert code == 2 and secret not in err
    code, _, err = command(capsys, "train", write_recipe(folder, hub_tokn=secret))
    assert code == 2 and secret not in err


def interrupt(self, *args, **kwargs):
    if self.state.global_step == 2:
        raise KeyboardInterrupt
    return PLAIN_STEP(self, *args, **kwargs)


PLAIN_STEP = Trainer.training_step


def test_a_linked_checkpoint_is_unlinked(saved_run, folder, capsys):
    """Where it is deleted, saved again or pushed out. What it leads to belongs to another folder, and stays whole."""
    elsewhere, link = folder / "elsewhere", folder / "out" / "checkpoint-4"
    shutil.copytree(saved_run / "checkpoint-4", elsewhere)
    link.parent.mkdir()
    resume = ("--resume_from_checkpoint", "auto", "--save_total_limit", "1", "--max_steps", "5")
    link.symlink_to(elsewhere)
    code, _, err = command(capsys, "train", write_recipe(folder, **SAVING), *resume)
    assert code == 0 and steps_of(folder / "out") == [5], err
    assert not link.is_symlink() and manifest.find_damage(elsewhere, manifest.read(elsewhere)) is None
    shutil.rmtree(link.parent)
    link.parent.mkdir()
    shutil.copytree(saved_run / "checkpoint-2", folder / "out" / "checkpoint-2")
    (elsewhere / "optimizer.pt").unlink()
    link.symlink_to(elsewhere)
    code, _, err = command(capsys, "train", write_recipe(folder, **SAVING), *resume[:2])
    assert code == 0 and not link.is_symlink() and (elsewhere / manifest.NAME).exists(), err


def test_dry_run_leaves_the_process_as_it_was(folder, capsys, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "TQDM_DELAY", "TRL_EXPERIMENTAL_SILENCE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    (folder / "pairs.jsonl").write_text('{"prompt": "w3 ", "chosen": "w4", "rejected": "w5"}')
    keys = {"dataset_name": "pairs.jsonl", "prompt_template": None, "accelerate_config": "single_gpu"}
    path = write_recipe(folder, trainer="orpo", **keys)
    assert command(capsys, "train", path, "--dry_run")[0] == 0
    assert dict(os.environ) == before
