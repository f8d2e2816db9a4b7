"""`liger-trainer medusa-eval` and `medusa-export`: the work after training Medusa heads."""

import os
from pathlib import Path
from typing import Any

from liger_trainer.command.rows.files import FILE_BUILDERS, broken_json, read_rows
from liger_trainer.command.rows.prompt_form import read_prompt_form
from liger_trainer.command.tools.loading import add_command, add_model_options, load_to_answer
from liger_trainer.errors import RecipeError, without_nulls

_MODEL = "a folder, a name on the Hub, or smollm2-135m-instruct"


def add_medusa_commands(commands) -> None:
    """Add the two commands to the subparsers of `liger-trainer`."""
    evaluation = add_command(
        commands,
        "medusa-eval",
        _eval,
        "measure the accuracy and the acceptance length of heads on their model's text",
    )
    evaluation.add_argument("model", metavar="MODEL", help=f"{_MODEL}; after stage 2, the output_dir")
    evaluation.add_argument("heads", metavar="HEADS", help="the output_dir of a Medusa training, or a folder of heads")
    evaluation.add_argument(
        "--prompts", required=True, metavar="FILE",
        help="rows as `train` reads them (.json, .jsonl, .parquet, .csv, a folder or a Hub dataset); each has prompt, "
        "messages, conversations (ShareGPT) or instruction (Alpaca)",
    )  # fmt: skip
    evaluation.add_argument("--max_rows", type=int, help="how many prompts are used, the first ones; if unset, all")
    evaluation.add_argument(
        "--max_new_tokens", type=int, default=128, help="how many tokens an answer may have; default 128"
    )
    evaluation.add_argument(
        "--batch_size", type=int, default=16, help="how many prompts are answered at once; default 16"
    )
    add_model_options(evaluation)

    export = add_command(
        commands, "medusa-export", _export, "write heads for servers (FasterDecoding, TGI, vLLM <= 0.32)"
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="the output_dir of a training, or a checkpoint in it")
    export.add_argument("--output", required=True, help="a new directory")
    export.add_argument(
        "--model",
        help="the model that is served with the heads; if unset, the one in CHECKPOINT, or else the one that the heads "
        "were trained on",
    )
    add_model_options(export)


def _eval(args) -> None:
    from liger_trainer.medusa.evaluate import evaluate
    from liger_trainer.medusa.export import load_heads
    from liger_trainer.medusa.heads import attach_heads
    from liger_trainer.medusa.prompts import encode, end_tokens

    model, tokenizer = load_to_answer(args.model, args)
    form = read_prompt_form(args.heads) or read_prompt_form(args.model)
    chats = bool(tokenizer.chat_template) and form in (None, "chat")
    prompts = prompts_in(args.prompts, chats, args.max_rows)
    heads = attach_heads(model, load_heads(args.heads))
    report = evaluate(
        model,
        heads,
        [encode(tokenizer, prompt) for prompt in prompts],
        end_tokens(model, tokenizer),
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
    )
    print(report)


def prompts_in(name: str, chat: bool, max_rows: int | None) -> list[Any]:
    """Return the prompts of the first `max_rows` rows of a file, a folder or a Hub dataset, read as `train` does."""
    from datasets.exceptions import DatasetGenerationError

    from liger_trainer.medusa.prompts import prompt_of

    path = os.path.expanduser(name)
    is_file = Path(path).suffix in FILE_BUILDERS
    if is_file and not os.path.exists(path):
        raise RecipeError(f"--prompts is {name!r}, and there is no such file. Give the path of a file of rows.")
    try:
        rows = read_rows(path, None, "train")
    except (OSError, ValueError, DatasetGenerationError) as error:  # its cause says what is wrong with a file
        reason = broken_json(path) or " ".join(str(error.__cause__ or error).split())
        if not os.path.exists(path):
            reason = f"{reason.rstrip('.')}. No file or folder has this name."
        raise RecipeError(f"--prompts is {name!r}, which cannot be read: {reason}") from error
    if len(rows) == 0:
        raise RecipeError(f"--prompts is {name!r}, which has no rows.")
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    return [prompt_of(without_nulls(row), chat, index) for index, row in enumerate(rows)]


def _export(args) -> None:
    import torch

    from liger_trainer.command.recipe.model_source import name_for_servers
    from liger_trainer.medusa.export import export_heads, lm_head_of, load_heads, served_model

    heads = load_heads(args.checkpoint)
    base = args.model or served_model(args.checkpoint, heads)
    lm_head = lm_head_of(load_to_answer(base, args)[0]) if heads.config.tied else None
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    served = name_for_servers(base)
    print(f"{export_heads(heads, args.output, served, lm_head, dtype)}: for {served}")
