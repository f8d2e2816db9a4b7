"""`liger-trainer medusa-eval`, `eagle-eval`, `mtp-eval` and `export`: the work after training speculative heads."""

import os
import time
from pathlib import Path
from typing import Any

from liger_trainer.command.processes import print_status
from liger_trainer.command.rows.files import FILE_BUILDERS, broken_json, read_rows
from liger_trainer.command.rows.prompt_form import read_prompt_form
from liger_trainer.command.tools.loading import add_command, add_model_options, load_for_inference
from liger_trainer.errors import RecipeError, without_nulls

_MODEL = "a folder, a name on the Hub, or smollm2-135m-instruct"
_SILENT_FOR = 3.0  # seconds, after which a user wonders


def add_head_commands(commands) -> None:
    """Add the commands to the subparsers of `liger-trainer`."""
    medusa = add_command(
        commands,
        "medusa-eval",
        _medusa_eval,
        "measure the accuracy and the acceptance length of Medusa heads on their model's text",
    )
    medusa.add_argument("model", metavar="MODEL", help=f"{_MODEL}; after stage 2, the output_dir")
    medusa.add_argument("heads", metavar="HEADS", help="the output_dir of a Medusa training, or a folder of heads")
    _add_eval_options(medusa)

    eagle = add_command(
        commands,
        "eagle-eval",
        _eagle_eval,
        "measure the accuracy and the acceptance length of an EAGLE-3 drafter on its model's text",
    )
    eagle.add_argument("model", metavar="MODEL", help=_MODEL)
    eagle.add_argument("drafter", metavar="DRAFTER", help="the output_dir of an EAGLE training, or a drafter's folder")
    eagle.add_argument("--steps", type=int, default=7, help="how many tokens are guessed for a pass; default 7")
    _add_eval_options(eagle)

    mtp = add_command(
        commands,
        "mtp-eval",
        _mtp_eval,
        "measure the accuracy and the acceptance length of a model's MTP head on its text",
    )
    mtp.add_argument("model", metavar="MODEL", help="a folder with the head in its files, or a name on the Hub")
    mtp.add_argument(
        "head",
        metavar="HEAD",
        nargs="?",
        help="the output_dir of a recipe with trainer: mtp; its head is measured in place of MODEL's own",
    )
    mtp.add_argument(
        "--steps",
        type=int,
        default=1,
        help="how many tokens are guessed for a pass, as num_speculative_tokens of a server; default 1",
    )
    _add_eval_options(mtp)

    export = add_command(
        commands,
        "export",
        _export,
        "write heads for servers: a drafter of EAGLE-3 or an MTP head (vLLM, SGLang), Medusa heads (TGI, vLLM <= 0.32)",
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="the output_dir of a training, or a checkpoint in it")
    export.add_argument("--output", required=True, help="a new directory")
    export.add_argument(
        "--model",
        help="the model that is served with the heads; if unset, the one in CHECKPOINT, or "
        "else the one that the heads were trained on",
    )
    add_model_options(export)


def _add_eval_options(evaluation) -> None:
    evaluation.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="rows as `train` reads them (.json, .jsonl, .parquet, .csv, a folder or a Hub dataset); each has prompt, "
        "messages, conversations (ShareGPT) or instruction (Alpaca)",
    )
    evaluation.add_argument("--max_rows", type=int, help="how many prompts are used, the first ones; if unset, all")
    evaluation.add_argument(
        "--max_new_tokens", type=int, default=128, help="how many tokens an answer may have; default 128"
    )
    evaluation.add_argument(
        "--batch_size", type=int, default=16, help="how many prompts are answered at once; default 16"
    )
    add_model_options(evaluation)


def _eval_options(args) -> dict[str, Any]:
    """The options of all evaluations of heads."""
    return {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size, "progress": _Progress()}


class _Progress:
    """Prints a line of progress if nothing has been printed for three seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last >= _SILENT_FOR:
            self._last = now
            print_status(line)


def _medusa_eval(args) -> None:
    from liger_trainer.medusa.evaluate import evaluate
    from liger_trainer.medusa.export import load_heads
    from liger_trainer.medusa.heads import attach_heads

    model, prompts, ends = _load_for_eval(args, args.heads)
    heads = attach_heads(model, load_heads(args.heads))
    print(evaluate(model, heads, prompts, ends, **_eval_options(args)))


def _eagle_eval(args) -> None:
    from liger_trainer.eagle.drafter import EagleDrafter
    from liger_trainer.eagle.evaluate import evaluate
    from liger_trainer.eagle.fresh import attach_drafter

    _check_steps(args)
    model, prompts, ends = _load_for_eval(args, args.drafter)
    drafter = attach_drafter(model, EagleDrafter.from_pretrained(args.drafter))
    print(evaluate(model, drafter, prompts, ends, steps=args.steps, **_eval_options(args)))


def _check_steps(args) -> None:
    if args.steps < 1:
        raise RecipeError(f"--steps is {args.steps}; expected 1 or more.")


def _mtp_eval(args) -> None:
    from liger_trainer.base_weights.unloaded import find_checkpoint
    from liger_trainer.mtp.evaluate import evaluate
    from liger_trainer.mtp.export import has_head
    from liger_trainer.mtp.predictor import load_predictor, load_saved_head

    _check_steps(args)
    for name, folder in (("MODEL", args.model), ("HEAD", args.head)):
        if folder is not None and os.path.isfile(os.path.join(folder, "adapter_config.json")):
            raise RecipeError(
                f"{name} is {folder!r}, an adapter. Merge it with its base first (liger-trainer merge), and give the "
                "merged model as MODEL. It has the MTP head that was trained with the adapter."
            )
    if has_head(args.model) and not os.path.isfile(os.path.join(args.model, "config.json")):
        raise RecipeError(
            f"MODEL is {args.model!r}, which has an MTP head without its model. Name the model first: liger-trainer "
            f"mtp-eval MODEL {args.model}."
        )
    model, prompts, ends = _load_for_eval(args, args.head or args.model)
    predictor = load_predictor(model, find_checkpoint(model.name_or_path)).eval()
    if args.head is not None:
        load_saved_head(predictor, args.head)
    print(evaluate(model, predictor, prompts, ends, steps=args.steps, **_eval_options(args)))


def _load_for_eval(args, trained: str) -> tuple[Any, list[list[int]], set[int]]:
    """The model, the tokens of the prompts in the form that `trained` has, and the tokens that end an answer."""
    from liger_trainer.data.answers import encode, end_tokens

    model, tokenizer = load_for_inference(args.model, args)
    form = read_prompt_form(trained) or read_prompt_form(args.model)
    chats = bool(tokenizer.chat_template) and form in (None, "chat")
    prompts = read_prompts(args.prompts, chats, args.max_rows)
    return model, [encode(tokenizer, prompt) for prompt in prompts], end_tokens(model, tokenizer)


def read_prompts(name: str, chat: bool, max_rows: int | None) -> list[Any]:
    """Return the prompts of the first `max_rows` rows of a file, a folder or a Hub dataset, as `train` reads them."""
    from datasets.exceptions import DatasetGenerationError

    from liger_trainer.medusa.prompts import prompt_of

    path = os.path.expanduser(name)
    is_file = Path(path).suffix in FILE_BUILDERS
    if is_file and not os.path.exists(path):
        raise RecipeError(f"--prompts is {name!r}, but that file does not exist. Give the path of a file of rows.")
    try:
        rows = read_rows(path, None, "train")
    except (OSError, ValueError, DatasetGenerationError) as error:  # its cause says what is wrong with a file
        reason = broken_json(path) or " ".join(str(error.__cause__ or error).split())
        if not os.path.exists(path):
            reason = f"{reason.rstrip('.')}. No file or folder has this name."
        raise RecipeError(f"--prompts is {name!r}, which cannot be read: {reason}") from error
    if len(rows) == 0:
        raise RecipeError(f"--prompts is {name!r}, which has no rows. Give a file with rows.")
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    return [prompt_of(without_nulls(row), chat, index) for index, row in enumerate(rows)]


def _export(args) -> None:
    from liger_trainer.eagle.files import has_drafter
    from liger_trainer.medusa.files import has_heads
    from liger_trainer.mtp.export import has_head

    if has_drafter(args.checkpoint):
        _eagle_export(args)
    elif has_heads(args.checkpoint):
        _medusa_export(args)
    elif has_head(args.checkpoint):
        _mtp_export(args)
    else:
        raise RecipeError(
            f"{args.checkpoint} has neither an EAGLE-3 drafter nor Medusa heads nor a separate MTP head. Give the "
            "output_dir of a training of one of them. A model that was trained with train_mtp needs no export: serve "
            "it as it was saved."
        )


def _mtp_export(args) -> None:
    from liger_trainer.mtp.export import base_of, export_head

    if os.path.isfile(os.path.join(args.checkpoint, "adapter_config.json")):
        raise RecipeError(
            f"CHECKPOINT is {args.checkpoint!r}, an adapter and the MTP head for it. Merge both into the model: "
            "liger-trainer merge."
        )
    if args.dtype != "auto":
        raise RecipeError(f"--dtype is {args.dtype}, but an MTP head gets the dtype of its model. Remove --dtype.")
    base = args.model or base_of(args.checkpoint)
    if base is None:
        raise RecipeError(f"{args.checkpoint} does not say what model its MTP head is for. Give it with --model.")
    print(f"{args.output}: {base} with {export_head(args.checkpoint, args.output, base)} tensors of the trained head")


def _eagle_export(args) -> None:
    import torch

    from liger_trainer.command.recipe.model_source import name_for_servers
    from liger_trainer.eagle.export import export_drafter
    from liger_trainer.eagle.files import read_drafter

    base = args.model or read_drafter(args.checkpoint)[0].base_model_name_or_path
    served = name_for_servers(base) if base else None
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    print(f"{args.output}: for {export_drafter(args.checkpoint, args.output, served, dtype)}")


def _medusa_export(args) -> None:
    import torch

    from liger_trainer.command.recipe.model_source import name_for_servers
    from liger_trainer.medusa.export import export_heads, lm_head_of, load_heads, served_model

    heads = load_heads(args.checkpoint)
    base = args.model or served_model(args.checkpoint, heads)
    lm_head = lm_head_of(load_for_inference(base, args)[0]) if heads.config.tied else None
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    served = name_for_servers(base)
    print(f"{export_heads(heads, args.output, served, lm_head, dtype)}: for {served}")
