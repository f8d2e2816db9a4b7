"""Trains the seeded faults with Axolotl, and prints what it reports of each before the first step.

    python tests/support/axolotl_faults.py /path/to/axolotl FOLDER [NAME ...]

`axolotl` is the command of another environment, since Axolotl pins older versions of transformers and TRL. The column
"said by Axolotl" in docs/trainers.md comes from these lines. Everything runs on a CPU, so the faults that need a GPU
are missing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from base_checkpoints import write_base
from seeded_faults import END_OUTSIDE, answers, chats, with_template
from tiny_models import tiny_model, tiny_tokenizer

# Lines that Axolotl prints of a run without a fault too
USUAL = ("Processing datasets during training", "pin_memory", "_pytree.py", "torchao", "bitsandbytes", "gemm_4bit")


def write_model(folder: Path, model: Any = None, tokenizer: Any = None) -> str:
    (tiny_model("llama") if model is None else model).save_pretrained(folder)
    (tiny_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, rows: list[dict]) -> dict[str, Any]:
    """Write rows with an attention mask if they are tokens. Return their entry in a config of Axolotl."""
    if "input_ids" in rows[0]:
        rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path), "ds_type": "json", "type": None}


def other_end_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w130"]})
    return tokenizer


def write_old_tokenizer(folder: Path) -> str:
    write_model(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(folder)


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    """The config of each fault, by the name of its function in seeded_faults.py, and of a run without a fault."""
    model = write_model(folder / "model")
    other_end = write_model(folder / "other_end", tokenizer=other_end_tokenizer())
    template = write_model(folder / "template", tokenizer=with_template(END_OUTSIDE))
    wide = write_model(folder / "wide", tiny_model("llama", hidden_size=512, num_hidden_layers=1))
    hybrid = write_model(folder / "hybrid", tiny_model("qwen3_5_text"))
    write_base(folder / "base", "qwen3_5_text")
    plain = write_rows(folder / "plain.jsonl", answers())
    two_begins = [{"input_ids": [1, 1, *row["input_ids"]], "labels": [-100, -100, *row["labels"]]} for row in answers()]
    masked = [{"input_ids": row["input_ids"], "labels": [-100] * len(row["labels"])} for row in answers()]
    texts = write_rows(folder / "texts.jsonl", [{"text": f"w{i} w4 w5"} for i in range(5, 13)])
    dialogs = write_rows(folder / "chats.jsonl", chats())
    dialogs |= {"type": "chat_template", "field_messages": "messages", "chat_template": "tokenizer_default"}
    adapter = {
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_modules": ["in_proj_a", "q_proj"],
        "lora_modules_to_save": ["lm_head"],
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        "lora_mlp_kernel": False,
    }
    keys: dict[str, dict[str, Any]] = {
        "no_fault": {},
        "end_outside": {"base_model": template, "datasets": [dialogs]},
        "padding_is_end": {
            "datasets": [texts | {"type": "completion", "field": "text"}],
            "special_tokens": {"pad_token": "</s>"},
        },
        "no_end": {"datasets": [write_rows(folder / "no_end.jsonl", answers(end=()))]},
        "other_end": {
            "base_model": other_end,
            "datasets": [write_rows(folder / "other_end.jsonl", answers(end=(130,)))],
        },
        "two_begins": {"datasets": [write_rows(folder / "two_begins.jsonl", two_begins)]},
        "all_masked": {"datasets": [write_rows(folder / "masked.jsonl", masked)]},
        "answers_gone": {
            "datasets": [write_rows(folder / "gone.jsonl", answers(6) + answers(2, prompt=30))],
            "sequence_len": 24,
        },
        "answers_cut": {
            "datasets": [write_rows(folder / "cut.jsonl", answers(6) + answers(2, length=40))],
            "sequence_len": 24,
        },
        "rate_too_high": {"base_model": wide, "learning_rate": 2e-2},
        "rate_too_low": {"learning_rate": 1e-9},
        "long_warmup": {"warmup_steps": 100},
        "prediction_layers": {"base_model": str(folder / "base")},
        "unserved_adapter": {"base_model": hybrid} | adapter,
        "new_tokenizer_class": {"base_model": write_old_tokenizer(folder / "old_tokenizer")},
    }
    defaults = {
        "base_model": model,
        "datasets": [plain],
        "sequence_len": 64,
        "max_steps": 6,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "linear",
        "attn_implementation": "sdpa",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return {
        name: defaults
        | {"output_dir": str(folder / f"{name}_out"), "dataset_prepared_path": str(folder / f"{name}_rows")}
        | own
        for name, own in keys.items()
    }


def said_before_first_step(axolotl: str, path: Path) -> tuple[int, list[str]]:
    """Run a config. Return the exit code, and the lines before the first step that speak of rows, or warn."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    command = [axolotl, "train", str(path), "--launcher", "python"]
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    before = done.stdout.partition("Starting trainer")[0]
    lines = []
    for line in before.splitlines():
        tells = any(word in line for word in ("WARNING", "ERROR", "Error:", "Dropped", "Truncated"))
        if tells and not any(word in line for word in USUAL):
            lines.append(line.strip())
    return done.returncode, lines


def main() -> None:
    axolotl, folder, *names = sys.argv[1:]
    root = Path(folder).absolute()
    root.mkdir(parents=True, exist_ok=True)
    for name, config in configs(root).items():
        if names and name not in names:
            continue
        path = root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        code, lines = said_before_first_step(axolotl, path)
        print(f"{name}: exit code {code}", *(lines or ["nothing"]), sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
