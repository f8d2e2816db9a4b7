"""A tiny model, rows and a recipe on disk, for tests that run the command like a user."""

import json
import os
import subprocess
from pathlib import Path

import yaml
from checkout import ROOT
from tiny_models import tiny_model, tiny_tokenizer

from liger_trainer.command.main import main

SAVING = {"save_strategy": "steps", "save_steps": 2}


def write_model(folder):
    """Save a two-layer Llama of random weights and its tokenizer with `save_pretrained`."""
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_rows(path, n=12):
    """Alpaca rows in words that the tiny tokenizer knows. Every third row has an input."""
    rows = [
        {
            "instruction": f"w{3 + i} w4 w5",
            "input": f"w{20 + i}" if i % 3 == 0 else "",
            "output": f"w{6 + i} w{40 + i} w8",
        }
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_recipe(folder, **keys):
    """Write a recipe of one-second training to `folder`. `keys` are added to it; None removes a key."""
    values = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": "rows.jsonl",
        "prompt_template": "alpaca",
        "output_dir": str(folder / "out"),
        "max_length": 64,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "learning_rate": 1e-2,
        "bf16": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    } | keys
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}, sort_keys=False))
    return path


def command(capsys, *argv):
    """Run `liger-trainer argv`; return the exit code, stdout and stderr."""
    try:
        code = main([str(word) for word in argv])
    except SystemExit as end:  # argparse exits on its own
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def status_lines(err):
    """The lines that the command itself wrote to stderr, without its name."""
    prefix = "liger-trainer: "
    return [line.removeprefix(prefix) for line in err.splitlines() if line.startswith(prefix)]


def status_of_a_run(folder, steps=4):
    """The `status_lines` of a run of `write_recipe(folder)` that has nothing else to say."""
    return [
        f"reading rows.jsonl and the config of {folder / 'model'}",
        "loading the model",
        f"training {steps} steps. The first one takes longest.",
    ]


def run_elsewhere(*argv, cwd, **env):
    """Run a command in its own process, outside the checkout, with the checkout importable."""
    ours = (ROOT, ROOT / "kernels", ROOT / "tests" / "support")
    paths = os.pathsep.join([*map(str, ours), os.environ.get("PYTHONPATH", "")])
    env = (
        os.environ
        | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        | env
    )
    return subprocess.run([str(word) for word in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def losses(output_dir):
    """The logged loss of each step of a finished run."""
    history = json.loads((Path(output_dir) / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def steps_of(output_dir):
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name.partition("-")[2]) for path in Path(output_dir).glob("checkpoint-*"))
