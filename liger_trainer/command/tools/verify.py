"""`liger-trainer verify RECIPE`: compares a recipe with the stock trainer, on a small copy of its model."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from liger_trainer.command.options import add_recipe_command
from liger_trainer.command.processes import Heartbeat, importing, print_loading
from liger_trainer.command.recipe.accelerate_file import preserve_environment
from liger_trainer.command.recipe.model_source import find_model
from liger_trainer.command.recipe.parser import load_yaml
from liger_trainer.command.recipe.read import Recipe, find_recipe, parse_recipe
from liger_trainer.errors import RecipeError

_USAGE = "liger-trainer verify RECIPE [--json] [--key value ...]"
_ROWS = 24  # rows to train on
_READ = 96  # rows to choose them from
_NEED_A_PACKAGE = {  # keys that need a package or a GPU, and the values that they get instead
    "load_in_4bit": "false",
    "load_in_8bit": "false",
    "use_vllm": "false",
    "fp8": "false",
    "optim": "adamw_torch",
}
_NOT_VERIFIED = (
    "fp16",
    *_NEED_A_PACKAGE,
    "optim_args",
    "optim_target_modules",
    "torch_compile",
    "tf32",
    "accelerate_config",
    "accelerator_config",
    "parallelism_config",
    "fsdp",
    "deepspeed",
    "auto_find_batch_size",
    "dataloader_drop_last",
    "lora_dropout",
    "reward_funcs",
    "reward_weights",
    "generation_batch_size",
    "steps_per_generation",
    "mask_truncated_completions",
    "chat_template_path",
    "medusa_init_heads_from",
    "neftune_noise_alpha",
    "load_best_model_at_end",
    "eval_packing",
    "eval_predictions",
    "train_mtp",
    "mtp_targets",
)
_NEVER_VERIFIED = (
    "kernels on a GPU",
    "several processes",
    "the model's own weights, tokenizer and chat template",
    "batches, lengths and learning rates of the recipe's size",
    "generation by a server",
    "quantized weights",
)
_OF_LOADING = (
    "gguf_file",
    "revision",
    "dtype",
    "device_map",
    "quantization_config",
    "use_kernels",
    "trust_remote_code",
)


def add_verify_command(commands: Any) -> None:
    """Add `verify` to the subparsers of `liger-trainer`."""
    add_recipe_command(
        commands,
        "verify",
        _verify,
        _USAGE,
        "show that a recipe trains as the stock trainer does, on a small copy of its model; needs no GPU",
        "Train a small copy of a recipe's model for a few steps, with its trainer, adapter, options and "
        "rows, and with the stock trainer, and compare: losses, every logged number, gradients, weights, evaluation, "
        "what trains, packing, padding, batches, bf16, reference, saving, merging, resuming. "
        "Only the config of the model is read, so a folder with a config.json is enough. "
        "With --json, print JSON. The exit code is 1 if a check has failed.",
    )


def _verify(args: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `liger-trainer train` does, before torch loads
    argv = [word for word in args.options if word != "--json"]
    as_json, start = len(argv) < len(args.options), time.perf_counter()
    file_values = load_yaml(find_recipe(args.recipe))
    print_loading()
    with importing():
        from liger_trainer.verify import HEADER, OPTIMIZERS, Check, quiet, verify
    print("building small copies of the model: the first line takes some seconds", file=sys.stderr, flush=True)

    for key, value in _NEED_A_PACKAGE.items():
        if key == "optim" and file_values.get(key) in OPTIMIZERS:
            continue
        if file_values.get(key) and f"--{key}" not in argv:
            argv += [f"--{key}", value]

    import torch

    never_verified = list(_NEVER_VERIFIED)
    if not torch.cuda.is_available():
        never_verified.append("captured steps (cuda_graphs), which need a GPU")
        # transformers would refuse bf16
        argv += ["--use_cpu", "true"]

    with quiet(), preserve_environment():
        recipe = parse_recipe(args.recipe, argv, _USAGE)
        setup = setup_of(recipe)
    left_out = [key for key in _NOT_VERIFIED if file_values.get(key) or recipe.explicit.get(key)]
    if file_values.get("optim", recipe.explicit.get("optim")) in OPTIMIZERS:
        left_out.remove("optim")
    heading = [HEADER]

    with Heartbeat(lambda time: f"still comparing, {time}.") as beat:

        def tell(check: Check) -> None:
            if not as_json:
                print(*heading, check.line, sep="\n", flush=True)
                beat.restart()
            heading.clear()

        report = verify(setup, tell)
    seconds = time.perf_counter() - start
    if as_json:
        heads = {"recipe": str(recipe.path), "seconds": seconds, "left_out": left_out}
        print(json.dumps(heads | {"always_left_out": never_verified} | report.to_dict()))
    else:
        print(f"\n{recipe.entry.trainer}, compared with {report.compared_with}\n{report.swapped}")
        if left_out:
            print(f"left out of this recipe: {', '.join(left_out)}")
        print(f"left out of every recipe: {'; '.join(never_verified)}")
        print(f"{len(report.failed)} of {len(report.checks)} checks failed, {seconds:.0f} s")
    return 1 if report.failed else 0


def setup_of(recipe: Recipe) -> Any:
    """Return the `Setup` of `liger_trainer.verify` for `recipe`."""
    import trl

    import liger_trainer
    from liger_trainer.verify import Setup

    if recipe.entry.trainer == "LigerEagleTrainer":
        raise RecipeError(
            "trainer is 'eagle', but TRL has no trainer of drafters to compare with. Try the recipe with "
            "--max_steps 2, and measure the drafter with liger-trainer eagle-eval."
        )
    if recipe.entry.trainer == "LigerMTPTrainer":
        raise RecipeError(
            "trainer is 'mtp', but TRL has no trainer of MTP heads to compare with. Try the recipe with "
            "--max_steps 2, and measure the head with liger-trainer mtp-eval."
        )
    if recipe.entry.trainer == "LigerRewardTrainer":  # its checks build models with an LM head
        raise RecipeError(
            "trainer is 'reward', but verify cannot build its models. Run `liger-trainer compare`, which trains with "
            "both trainers and shows both losses."
        )
    training, init = recipe.training, dict(recipe.training.model_init_kwargs or {})
    config = _config(recipe.model.model_name_or_path, "model_name_or_path", init, recipe.model.model_revision)
    init = {key: value for key, value in init.items() if key not in _OF_LOADING}
    attention = init.pop("attn_implementation", recipe.model.attn_implementation)
    if "flash" not in str(attention):
        init |= {} if attention is None else {"attn_implementation": attention}
    teacher = getattr(training, "teacher_model_name_or_path", None)
    teacher_init = dict(getattr(training, "teacher_model_init_kwargs", None) or {})
    return Setup(
        trainer=getattr(liger_trainer, recipe.entry.trainer),
        arguments=type(training),
        config=config,
        rows=_rows(recipe),
        options={key: value for key, value in recipe.explicit.items() if hasattr(training, key)},
        peft_config=trl.get_peft_config(recipe.model),
        model_init=init,
        teacher=None if teacher is None else _config(teacher, "teacher_model_name_or_path", teacher_init),
        rewards=len(recipe.args.reward_funcs or ()),
    )


def _config(name: str | None, key: str, init: dict[str, Any], revision: str = "main") -> Any:
    from transformers import AutoConfig

    options = {"revision": init.get("revision", revision), "trust_remote_code": init.get("trust_remote_code", False)}
    try:
        return find_model(name, init.get("gguf_file"), **options).load(AutoConfig)
    except RecipeError as error:
        raise RecipeError(f"{error} A folder with its config.json is enough here: pass --{key} FOLDER.") from error


def _rows(recipe: Recipe) -> list[dict[str, Any]]:
    """Return rows of the recipe, with the columns that its trainer reads; good and bad answers alternate."""
    from liger_trainer.command.rows.columns import columns_of  # here: pyarrow is two thirds of the start of a --help
    from liger_trainer.command.rows.load import load_rows

    needed = columns_of(recipe)
    recipe.args.max_rows = min(recipe.args.max_rows or _READ, _READ)
    recipe.args.eval_fraction = recipe.args.eval_dataset_name = recipe.args.dataset_eval_split = None
    try:
        rows, _ = load_rows(recipe.args, recipe.path.parent, needed, recipe.training.seed)
    except RecipeError as error:
        raise RecipeError(f"{str(error).rstrip('.')}. A few rows are enough here: pass --dataset_name FILE.") from error
    columns = {name for names in needed for name in names} | {"prompt", "labels", "completion_mask", "assistant_masks"}
    selected = rows.select_columns([name for name in rows.column_names if name in columns]).to_list()
    counts: Counter[bool] = Counter()

    def turn(row: dict[str, Any]) -> int:
        counts[bool(row.get("label"))] += 1
        return counts[bool(row.get("label"))]

    return sorted(selected, key=turn)[:_ROWS]
