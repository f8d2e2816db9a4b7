"""Shipped recipes from their first line to the saved, reloaded and (Medusa) exported model: seconds, tokens/s, peak.

    python benchmarks/recipes.py llama3_8b/sft_alpaca_lora llama3_8b/medusa_stage1 --data DIR --folder /dev/shm/recipes
        [--processes 2 --config fsdp2] [-- --max_steps 10]

Each recipe runs as it ships, by `liger-trainer train`, but for its model and its rows: a model of the same shape with
random weights in bf16, which is saved once, and rows from the folder `--data`: alpaca_en_demo.json,
dpo_en_demo.json and kto_en_demo.json. The answers that Medusa recipes train on are those of the Alpaca rows. Then the
commands of the recipe's header that follow run too, and what was saved is loaded by transformers and PEFT, or
MedusaHeads, and has a finite loss. What follows `--` are options of all recipes named.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import launchers
from _measure import DEVICE, Record, table

from liger_trainer.paths import shipped

MODELS = {"llama3_8b": "Llama-3-8B", "llama3_2_3b": "Llama-3.2-3B"}
# The file of rows of a trainer, and the options that its format takes
ROWS = {
    "sft": ("alpaca_en_demo.json", []),
    "dpo": ("dpo_en_demo.json", ["--prompt_template", "sharegpt"]),
    "orpo": ("dpo_en_demo.json", ["--prompt_template", "sharegpt"]),
    "kto": ("kto_en_demo.json", ["--prompt_template", "last_turn"]),
    "grpo": ("questions.jsonl", []),
    "medusa": ("answers.jsonl", []),
}


def command(words, log, processes=1, config="fsdp2"):
    """Run `liger-trainer` with `words`, its output in the file `log`, and return its exit code."""
    start = ["-m", "liger_trainer"]
    if processes > 1:
        launch = ["--config_file", str(shipped("configs") / f"{config}.yaml"), "--num_processes", str(processes)]
        start = ["-m", "accelerate.commands.launch", *launch, *start]
    with open(log, "w") as file:
        return subprocess.run([sys.executable, *start, *words], stdout=file, stderr=subprocess.STDOUT).returncode


def write_rows(data, folder):
    """The rows that no file of `data` has: answers for Medusa heads, questions with a solution for GRPO."""
    rows = json.loads((data / "alpaca_en_demo.json").read_text())
    user = [{"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()} for row in rows]
    answers = [
        {"messages": [question, {"role": "assistant", "content": row["output"]}]}
        for question, row in zip(user, rows, strict=True)
    ]
    questions = [{"prompt": [question], "solution": str(k)} for k, question in enumerate(user)]
    for name, written in ("answers", answers), ("questions", questions):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    # as many as medusa-eval takes here
    (folder / "prompts.json").write_text(json.dumps([{"messages": [question]} for question in user[:4]]))


def words_of(recipe, given, options, model):
    """The options of `liger-trainer train` for a recipe whose keys are `given`."""
    rows, template = ROWS[given.get("trainer", "sft")]
    file = next(path for path in (options.data / rows, options.folder / rows) if path.exists())
    out = options.folder / "outputs" / recipe
    words = ["train", recipe, "--model_name_or_path", str(model), "--dataset_name", str(file), *template]
    if stage1 := given.get("medusa_init_heads_from"):
        words += ["--medusa_init_heads_from", str(options.folder / "outputs/llama3_8b" / stage1.rpartition("8b_")[2])]
    return [*words, "--output_dir", str(out), *options.recipe_options], out


def after(given, out, model, folder):
    """The commands of a recipe's header that follow the training."""
    if given.get("trainer") != "medusa":
        return []
    merged = given.get("use_peft", False)
    evaluated, export = out if merged else model, ["medusa-export", out, "--output", f"{out}_servers"]
    prompts = ["--prompts", folder / "prompts.json", "--max_new_tokens", 32]
    steps = [["medusa-eval", evaluated, out, *prompts]]
    steps += [["merge", out, f"{out}_merged"], [*export, "--model", f"{out}_merged"]] if merged else [export]
    return [[str(word) for word in words] for words in steps]


def reload(out):
    """The loss that the saved model has on a short text, or a norm of the saved heads. Prints it."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from liger_trainer.medusa.heads import MedusaHeads

    out = Path(out)
    if (out / "medusa_heads").is_dir():
        heads = MedusaHeads.from_pretrained(out / "medusa_heads")
        print("reloaded", sum(p.float().norm().item() for p in heads.parameters()))
        if not (out / "adapter_config.json").exists():
            return
    auto = AutoPeftModelForCausalLM if (out / "adapter_config.json").exists() else AutoModelForCausalLM
    model = auto.from_pretrained(out, dtype=torch.bfloat16, device_map=DEVICE)
    rows = AutoTokenizer.from_pretrained(out)("Give three tips for staying healthy.", return_tensors="pt").to(DEVICE)
    with torch.no_grad():
        print("reloaded", model(rows["input_ids"], labels=rows["input_ids"]).loss.item())


def run_python(code, log):
    """Run a line of Python that may use this file as `recipes`; its exit code."""
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    with open(log, "a") as file:
        words = [sys.executable, "-c", f"import recipes; {code}"]
        return subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=env).returncode


def measure(recipe, options):
    """The row of a recipe: what its summary says, and the seconds of all that ran."""
    import yaml

    given = yaml.safe_load((shipped("recipes") / f"{recipe}.yaml").read_text())
    shape = MODELS[recipe.partition("/")[0]]
    model, logs = options.folder / shape, options.folder / "logs" / recipe.replace("/", "-")
    row, start = {"recipe": recipe}, time.time()
    logs.mkdir(parents=True, exist_ok=True)

    def step(name, run, log):
        began, code = time.time(), run()
        row[f"{name}_s"] = round(time.time() - began, 1)
        if code:
            row["note"] = f"{name} ended with {code}"
            print(f"--- {recipe}: {row['note']}\n{Path(log).read_text()[-options.show :]}", flush=True)
        return not code

    if not (model / "tokenizer.json").exists():
        log = logs / "model"
        if not step(
            "model",
            lambda: run_python(f"recipes.write_model({shape!r}, {str(options.data)!r}, {str(model)!r})", log),
            log,
        ):
            return row
    words, out = words_of(recipe, given, options, model)
    log = logs / "train"
    if not step("train", lambda: command(words, log, options.processes, options.config), log):
        return row
    found = dict(re.findall(r"^  (\w+) +(.+)$", log.read_text().rpartition("\nSummary\n")[2], re.MULTILINE))
    row |= {key: found.get(key) for key in ("steps", "rows", "time", "loss", "speed", "memory", "layers", "patched")}
    for words in after(given, out, model, options.folder):
        log = logs / words[0]
        if step(words[0], lambda words=words, log=log: command(words, log), log):
            print(f"--- {recipe}: {' '.join(words)}\n{log.read_text()[-1200:]}", flush=True)
    log = logs / "reload"
    if step("reload", lambda: run_python(f"recipes.reload({str(out)!r})", log), log):
        row["reloaded"] = [float(number) for number in re.findall(r"^reloaded (.+)$", log.read_text(), re.MULTILINE)]
    row["files"] = {
        str(path.relative_to(out)): path.stat().st_size
        for path in sorted(out.rglob("*.safetensors"))
        if "checkpoint-" not in str(path)
    }
    row["seconds"] = round(time.time() - start, 1)
    return row


def write_model(name, data, folder):
    launchers.write_model(name, Path(data) / "alpaca_en_demo.json", Path(folder))


COLUMNS = {
    "recipe": ("recipe", ""), "steps": ("steps", ""), "time": ("trained", ""), "speed": ("speed", ""),
    "memory": ("peak", ""), "loss": ("loss", ""), "reloaded": ("reloaded", ""), "seconds": ("s in all", ""),
    "note": ("", ""),
}  # fmt: skip


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="names of shipped recipes")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the rows")
    parser.add_argument("--folder", type=Path, required=True, help="for models, rows and outputs")
    parser.add_argument("--processes", type=int, default=1, help="more than one: under accelerate launch")
    parser.add_argument("--config", default="fsdp2", help="of accelerate, for several processes")
    parser.add_argument("--show", type=int, default=4000, help="characters of the output of a command that fails")
    parser.add_argument("--json", help="file of the record; without it a run on a GPU names one in benchmarks/results")
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:end])
    options.recipe_options = argv[end + 1 :]
    return options


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = parsed(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_rows(options.data, options.folder)
    record, rows = Record("recipes", f"{options.processes}-gpus", options.json, argv=argv), []
    for recipe in options.recipes:
        rows.append(measure(recipe, options))
        print(json.dumps(rows[-1]), flush=True)
        record.write({"rows": rows})
    table(rows, COLUMNS)
    record.say_where()


if __name__ == "__main__":
    main()
