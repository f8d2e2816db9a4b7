"""The lines before the first step are few, with no warnings caused by a recipe or by the command."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
from recipe_fixtures import ROOT, command, write_model, write_recipe, write_rows
from transformers import TrainingArguments

from liger_trainer import LigerSFTTrainer
from liger_trainer.command import processes
from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.command.rows import sources
from liger_trainer.command.run import train
from liger_trainer.errors import RecipeError

HAS_NEW_NAMES = "activation_checkpointing" in {f.name for f in dataclasses.fields(TrainingArguments)}
needs_new_names = pytest.mark.skipif(not HAS_NEW_NAMES, reason="this transformers has the old names only")


def write_pairs(path):
    rows = [{"prompt": f"w{3 + i} w4", "chosen": f"w{6 + i} w8", "rejected": f"w{40 + i} w9"} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("trainer", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "orpo"))])
def test_at_most_ten_lines_before_the_first_step(trainer, tmp_path):
    """Runs in a new process with empty caches, like a first run. Evaluation doubles TRL's preparation of rows."""
    write_model(tmp_path / "model")
    keys = {"disable_tqdm": None, "gradient_checkpointing": True, "eval_fraction": 0.25, "eval_strategy": "epoch"}
    if trainer == "sft":
        write_rows(tmp_path / "rows.jsonl")
    else:
        write_pairs(tmp_path / "rows.jsonl")
        keys |= {"trainer": trainer, "prompt_template": None}
        if trainer == "orpo":
            keys["remove_unused_columns"] = False  # as in the shipped recipe; otherwise TRL tells the user to set it
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name in ("TQDM_DELAY", "TRL_EXPERIMENTAL_SILENCE", "PYTHONWARNINGS"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "liger_trainer", "train", write_recipe(tmp_path, **keys)],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    text = done.stdout.decode()
    assert done.returncode == 0, text
    before, first, _ = text.partition("{'loss'")
    assert first, text
    slow_machine = before.count("liger-trainer: still ")
    assert before.count("\n") - slow_machine <= 10, before  # a redrawn progress bar is one line
    assert "Warning" not in before and "deprecated" not in before, before
    assert "ForCausalLM: rms_norm 5/5" in before, "what was patched is one of them"


def test_no_phase_is_silent(folder, capsys, monkeypatch):
    """Reading the rows, loading the model and the first step say every few seconds that they go on."""
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.05)
    stock_loss = LigerSFTTrainer.compute_loss
    until_second_step = []

    def slowed(function):
        def wait_and_call(*args, **kwargs):
            time.sleep(0.3)
            return function(*args, **kwargs)

        return wait_and_call

    def loss(*args, **kwargs):
        time.sleep(0.3)
        until_second_step.append(capsys.readouterr().err)
        return stock_loss(*args, **kwargs)

    monkeypatch.setattr(sources, "load_rows", slowed(sources.load_rows))
    monkeypatch.setattr(train, "build_trainer", slowed(train.build_trainer))
    monkeypatch.setattr(LigerSFTTrainer, "compute_loss", loss)
    code, _, err = command(capsys, "train", write_recipe(folder, max_steps=3))
    assert code == 0, err
    first, _, third = until_second_step
    for phase in ("reading and checking the rows", "loading the model and preparing the rows", "in the first step"):
        assert f"liger-trainer: still {phase}, 0 s." in first, first
    assert "still" not in third + err, "later steps have the progress bar"


def test_an_error_in_the_first_step_ends_its_lines(folder, capsys, monkeypatch):
    monkeypatch.setattr(processes, "_SILENT_FOR", 0.05)

    def fail(*args, **kwargs):
        time.sleep(0.2)
        raise RuntimeError("no memory")

    monkeypatch.setattr(LigerSFTTrainer, "compute_loss", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        command(capsys, "train", write_recipe(folder, max_steps=2))
    assert "still in the first step" in capsys.readouterr().err
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


@needs_new_names
@pytest.mark.parametrize("filed", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("given", ["gradient_checkpointing", "activation_checkpointing"])
def test_command_line_beats_the_file_under_either_name(filed, given, tmp_path):
    """If an option is given under two names, transformers takes the new one."""
    path = write_recipe(tmp_path, **{"gradient_checkpointing": None, filed: True})
    training = parse_recipe(str(path), [f"--{given}", "false"]).training
    assert training.gradient_checkpointing is training.activation_checkpointing is False


@needs_new_names
def test_two_names_that_disagree(tmp_path, capsys):
    path = write_recipe(tmp_path, gradient_checkpointing=True, activation_checkpointing=False)
    with pytest.raises(RecipeError, match="are two names of one option"):
        parse_recipe(str(path))
    code, _, err = command(capsys, "train", path, "--dry_run")
    assert code == 2 and "Keep one of them" in err
