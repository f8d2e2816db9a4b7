"""A recipe as `liger-trainer train` runs it, under several launchers: useful tokens/s, peak memory, losses.

    python benchmarks/launchers.py llama3_8b/sft_alpaca --model Llama-3-8B --data alpaca_en_demo.json
        [--runs torchrun:2 accelerate:2 accelerate:1] [--config fsdp2] [--rows 4] [--steps 8] [--save]
    python benchmarks/launchers.py llama3_8b/medusa_stage1 --model Llama-3.2-1B --data alpaca_en_demo.json
        --runs accelerate:1 torchrun:2 -- --prompt_template alpaca
    python benchmarks/launchers.py llama3_8b/sft_alpaca --model SmolLM2-135M --data alpaca_en_demo.json
        --runs torchrun:2 killed:2

The model has a published model's shape and random weights, which are saved once and loaded by every run. Its tokenizer
is trained on the texts of `--data`. Both stay in `--folder`, if that is given.

A run is LAUNCHER:PROCESSES. With several processes the recipe is sharded as `--config` says: torchrun gets it as
`--accelerate_config`, and `accelerate launch` as `--config_file`. With one process it is not sharded. A step has
`--rows` rows in every run, shared by the processes, so that all runs see the same rows and have the same losses.
`killed` is torchrun with a restart: after two thirds of the steps SIGKILL ends the last process, and a checkpoint is
saved after every third. Its losses cover all steps, some of them from the second attempt.

tokens/s are without padding, as TRL counts them, and per process. The clock leaves out steps before `--skip`, loading
and saving. A run is flagged if its losses differ from the first run's by more than 1 %. Arguments after `--` are
options of the recipe.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _launched import SETTINGS
from _measure import DEVICE, Record, arguments, table
from _models import MODELS
from _processes import reason_in, release

from recipes import write_model

LAUNCHERS = ("torchrun", "accelerate", "killed")
ENTRY = Path(__file__).with_name("_launched.py")
CONFIGS = Path(__file__).parents[1] / "configs"


def words_of(run, options, folder):
    """The command line of a run."""
    launcher, processes = run
    recipe = ["train", options.recipe, "--model_name_or_path", folder / "model", "--dataset_name", options.data]
    recipe += ["--output_dir", folder / "out", "--max_steps", options.steps]
    recipe += ["--per_device_train_batch_size", options.rows // processes, "--gradient_accumulation_steps", 1]
    recipe += ["--logging_steps", 1, "--warmup_steps", 0]
    recipe += ["--use_cpu", "true"] if DEVICE == "cpu" else []
    saves = launcher == "killed"
    recipe += ["--save_strategy", *(["steps", "--save_steps", options.steps // 3] if saves else ["no"])]
    module = ["torch.distributed.run", "--nproc_per_node", processes, "--max-restarts", int(launcher == "killed")]
    module += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    config = options.config if processes > 1 else "single_gpu"
    if launcher == "accelerate":
        path = config if os.path.isfile(config) else CONFIGS / f"{config}.yaml"
        module = ["accelerate.commands.launch", "--config_file", path, "--num_processes", processes]
        module += ["--main_process_port", "0"] if processes > 1 else []
    elif processes > 1:
        recipe += ["--accelerate_config", config]
    return [sys.executable, "-m", *map(str, [*module, ENTRY, *recipe, *options.recipe_options])]


def measure(run, options, folder):
    """The row of one run, or a row with a note that says why it failed."""
    launcher, processes = run
    folder.joinpath("row.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "out", ignore_errors=True)  # left from the run before
    settings = {"file": str(folder / "row.json"), "skip": options.skip, "save": options.save, "began": time.time()}
    if launcher == "killed":
        settings["kill"] = [processes - 1, 2 * options.steps // 3]
    name = f"{launcher}:{processes}"
    env = os.environ | {SETTINGS: json.dumps(settings), "HF_HUB_OFFLINE": "1"}
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # restarts meet no dead processes
    if DEVICE == "cpu":
        env |= {"OMP_NUM_THREADS": "1"}
    elif processes == 1:  # otherwise TRL spreads the model over all GPUs, and they work one at a time
        env |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            words_of(run, options, folder), stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            code = child.wait(options.timeout)
        except subprocess.TimeoutExpired:
            code = -9
        if code:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            log.seek(0)
            text = log.read()
            print(text[-6000:])
            lines = text.strip().splitlines() or ["?"]
            of_ours = [line for line in lines if line.startswith("liger-trainer: error")]
            note = f"more than {options.timeout:.0f} s" if code == -9 else reason_in(of_ours or lines)
            return {"run": name, "note": note}
    row = {"run": name} | json.loads((folder / "row.json").read_text())
    row["total_s"] = time.time() - settings["began"]
    row["tokens_per_s"] = row.pop("tokens_of_all_per_s") / processes
    if launcher == "killed" and not row["resumed"]:
        row["note"] = "NOT RESUMED"
    return row


def flag(rows):
    """Add to every row how far its losses are from the first row's, as the largest share of a loss.

    Add a note if it exceeds 1 %.
    """
    first = next((row["losses"] for row in rows if "losses" in row), None)
    for row in rows:
        if "losses" not in row:
            continue
        if len(row["losses"]) != len(first):
            row["note"] = f"WRONG: {len(row['losses'])} losses, the first run has {len(first)}"
            continue
        row["apart"] = max(abs(got - want) / abs(want) for got, want in zip(row["losses"], first, strict=True))
        if not row["apart"] <= 0.01:
            row["note"] = "WRONG LOSS"


COLUMNS = {
    "run": ("launcher", ""),
    "tokens_per_s": ("tokens/s of one process", ".0f"),
    "gib": ("peak GiB", ".1f"),
    "first_step_s": ("s to the first step", ".0f"),
    "save_s": ("s to save", ".0f"),
    "total_s": ("s in all", ".0f"),
    "resumed": ("resumed at", ""),
    "apart": ("losses apart", ".1e"),
    "ends": ("loss", ""),
    "note": ("", ""),
}


def parsed_run(text):
    launcher, _, processes = text.partition(":")
    if launcher not in LAUNCHERS or not processes.isdecimal() or not int(processes):
        raise argparse.ArgumentTypeError(f"{text!r}; expected LAUNCHER:PROCESSES, of {', '.join(LAUNCHERS)}")
    return launcher, int(processes)


def parsed(argv):
    parser = arguments(__doc__)
    parser.add_argument("recipe", help="a YAML file or the name of a shipped one")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--data", required=True, help="the file for dataset_name")
    default = ["torchrun:2", "accelerate:2", "accelerate:1"]
    parser.add_argument("--runs", nargs="+", type=parsed_run, default=[parsed_run(text) for text in default])
    parser.add_argument("--config", default="fsdp2", help="of accelerate, for several processes: a name or a file")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step, of all processes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--save", action="store_true", help="save the trained model as well, which takes its time")
    parser.add_argument("--folder", type=Path, help="for the model; without it a temporary one")
    parser.add_argument("--prepare", action="store_true", help="write the model into --folder, and run nothing")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a run is given up")
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:end])
    options.recipe_options = argv[end + 1 :]
    for name, processes in options.runs:
        if options.rows % processes:
            parser.error(f"--rows is {options.rows}, which the {processes} processes of {name} cannot share")
        if name == "killed" and processes == 1:
            parser.error("killed:1 has no process that is left to notice; give it 2 or more")
        if name == "killed" and options.steps < 3:
            parser.error(f"--steps is {options.steps}; a killed run needs at least 3")
    if not 0 < options.skip < options.steps:
        parser.error(f"--skip is {options.skip}; expected 1 to {options.steps - 1}, less than --steps")
    return options


def main(argv=None):
    options = parsed(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "model" / "config.json").exists():
            write_model(options.model, options.data, folder / "model")
            release()
        if options.prepare:
            return
        case = f"{Path(options.recipe).stem}-{options.model.lower()}-{Path(options.config).stem}-{options.rows}-rows"
        record = Record("launchers", case, options.json, options.model == "tiny", argv)
        rows = []
        for run in options.runs:
            rows.append(measure(run, options, folder))
            flag(rows)
            record.write({"options": {k: str(v) for k, v in vars(options).items()}, "rows": rows})
    print(f"{options.recipe}, {options.model}, {options.rows} rows a step, {options.config} with several processes")
    shown = []
    for row in rows:
        ends = None
        if "losses" in row:
            ends = [round(row["losses"][0], 4), round(row["losses"][-1], 4)]
        shown.append(row | {"ends": ends})
    table(shown, COLUMNS)
    record.say_where()


if __name__ == "__main__":
    main()
