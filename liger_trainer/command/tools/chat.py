"""`liger-trainer chat MODEL`: a conversation with a trained model, in a terminal.

`transformers chat` talks to a server that has loaded a whole model. This command also loads an adapter on its base,
can show the answers of both, and reads GGUF files.
"""

import contextlib
import os
import sys
from typing import Any

from liger_trainer.command.processes import Heartbeat, print_status
from liger_trainer.command.rows.prompt_form import IN_WORDS, read_prompt_form, read_system_prompt
from liger_trainer.command.tools.loading import (
    add_command,
    add_model_options,
    find_base,
    is_adapter,
    load_adapter,
    load_for_inference,
    tokenizer_of,
)
from liger_trainer.data.formats import alpaca_row
from liger_trainer.errors import RecipeError, short


def add_chat_command(commands: Any) -> None:
    """Add `chat` to the subparsers of `liger-trainer`."""
    parser = add_command(
        commands, "chat", _chat, "talk to a model or an adapter in a terminal: Ctrl-C ends an answer, Ctrl-D the chat"
    )
    parser.add_argument("model", metavar="MODEL", help="an output_dir, a checkpoint, a folder, or a name on the Hub")
    parser.add_argument("--base", action="store_true", help="also show what the base of an adapter answers")
    parser.add_argument("--model", dest="base_model", help="the base model, if it is not where the adapter says")
    parser.add_argument(
        "--system", metavar="TEXT", help="a system message; default: the one from training, if there was one"
    )
    parser.add_argument(
        "--images",
        nargs="+",
        metavar="FILE",
        default=[],
        help="pictures that go with the first line of each conversation, for a model of images",
    )
    parser.add_argument(
        "--prompt_template",
        choices=("chat", "alpaca", "none"),
        help="how your lines reach the model: by its chat template, as the instruction of prompt_template: alpaca, or "
        "as they are; default: as the model was trained or, if that is unknown, by its chat template if it has one",
    )
    parser.add_argument("--max_new_tokens", type=int, default=512, help="how long an answer may be; default 512")
    parser.add_argument("--temperature", type=float, help="0 decodes greedily; by default, as the model's config says")
    add_model_options(parser)


def _chat(args: Any) -> None:
    missing = [name for name in args.images if not os.path.isfile(name)]
    if missing:
        raise RecipeError(f"--images names {missing[0]!r}, but that file does not exist. Correct the path.")
    for option, value in (("--base", args.base), ("--model", args.base_model)):
        if value and not os.path.isdir(args.model):
            raise RecipeError(
                f"{option} is only for adapters, but the folder {args.model!r} does not exist. Correct the path."
            )
        if value and not is_adapter(args.model):
            raise RecipeError(f"{option} is only for adapters, but {args.model!r} is a whole model. Remove it.")
    model, reader = load_model(args)
    template = args.prompt_template or _trained_template(args.model, reader)
    if template == "chat" and not reader.chat_template:
        raise RecipeError(f"The tokenizer of {args.model!r} has no chat template. Pass --prompt_template none.")
    if args.system and template != "chat":
        raise RecipeError(
            f"--system needs a chat template, but lines reach the model by prompt_template {template}. Remove it."
        )
    if args.images and (template != "chat" or not hasattr(reader, "image_processor")):
        raise RecipeError(f"--images needs a model of images with a chat template, unlike {args.model!r}. Remove it.")
    system = _system_prompt(args) if template == "chat" else None
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    history, in_terminal = list(start), sys.stdin.isatty()
    if in_terminal:
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401 - gives input() a history
        print("Ctrl-C ends an answer, Ctrl-D the chat; /new begins a new conversation.", file=sys.stderr)
    while True:
        try:
            line = input("\n> " if in_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            print("\nCtrl-D ends the chat.", file=sys.stderr)
            continue
        if line.strip() in ("", "/new"):
            history = list(start) if line.strip() else history
            continue
        if any("\ud800" <= letter <= "\udfff" for letter in line):  # Python decodes invalid UTF-8 to these
            raise RecipeError(f"The line {line!r} is not UTF-8. Convert the input.")
        images = [{"type": "image", "path": name} for name in args.images if len(history) == len(start)]
        history.append({"role": "user", "content": [*images, {"type": "text", "text": line}] if images else line})
        prompt: Any = history if template == "chat" else line
        if template == "alpaca":
            prompt = alpaca_row({"instruction": line, "output": ""})["prompt"]
        if args.base:
            print("base:")
            with model.disable_adapter():
                _answer(model, reader, prompt, args)
            print("adapter:")
        history.append({"role": "assistant", "content": _answer(model, reader, prompt, args)})


def _system_prompt(args: Any) -> str | None:
    """Return the system prompt from the command line, or the one that the model was trained with, or None."""
    if args.system is not None:
        return args.system
    trained = read_system_prompt(args.model)
    if trained is not None:
        message = f"{args.model} was trained with the system prompt {short(trained)}, which goes first."
        print_status(f"{message} Pass --system for another one.")
    return trained


def _trained_template(model: str, reader: Any) -> str:
    """Return the prompt template that the model was trained with, or "chat" or "none" if that is unknown."""
    usual = "chat" if reader.chat_template else "none"
    form = read_prompt_form(model)
    trained = {"alpaca": "alpaca", "text": "none", "tokens": "none"}.get(form or "chat", usual)
    if trained != usual:
        print_status(
            f"{model} was trained on {IN_WORDS[form or 'chat']}, and your lines reach it in that form. Pass "
            "--prompt_template to ask in another one."
        )
    return trained


def load_model(args: Any) -> tuple[Any, Any]:
    """Load the model (an adapter is loaded on its base), and its tokenizer or image processor.

    `args` has `model`, `base_model` and the options of `add_model_options`.
    """
    print_status(f"loading {args.model}")
    with Heartbeat(lambda time: f"still loading {args.model}, {time}."):
        return _load_model(args)


def _load_model(args: Any) -> tuple[Any, Any]:
    from liger_trainer.mtp.export import is_head_alone

    if is_head_alone(args.model):
        raise RecipeError(
            f"MODEL is {args.model!r}, an MTP head without its model. Give the model: the head does not change its "
            "answers."
        )
    if not is_adapter(args.model):
        return load_for_inference(args.model, args, shows_images=True)
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(args.model)
    base = args.base_model or find_base(config.base_model_name_or_path, args.model)
    model, reader = load_for_inference(base, args, gets_adapter=True, shows_images=True, revision=config.revision)
    model = load_adapter(model, args.model).eval()
    return model, tokenizer_of(args.model, args.trust_remote_code) or reader


def _read(reader: Any, prompt: Any) -> Any:
    """Return the model's inputs for a text, or for messages with pictures: a batch of one row."""
    import torch

    from liger_trainer.data.answers import encode

    if isinstance(prompt, str) or not hasattr(reader, "image_processor"):
        ids = torch.tensor([encode(getattr(reader, "tokenizer", reader), prompt)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    turns = [
        turn | {"content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in prompt
    ]
    return reader.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def _answer(model: Any, reader: Any, prompt: Any, args: Any) -> str:
    """Print an answer while it is generated, until Ctrl-C, and return it."""
    from jinja2 import TemplateError
    from transformers import TextStreamer

    from liger_trainer.data.answers import end_tokens

    tokenizer = getattr(reader, "tokenizer", reader)

    class Printed(TextStreamer):
        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            super().on_finalized_text(text, stream_end)

    try:
        inputs = _read(reader, prompt)
    except TemplateError as error:
        raise RecipeError(f"The chat template of {args.model!r} refuses the conversation: {error}.") from error
    except OSError as error:
        if not args.images:
            raise
        raise RecipeError(f"--images names {', '.join(args.images)}: {error}") from error
    inputs = {name: x.to(model.device, model.dtype if x.is_floating_point() else None) for name, x in inputs.items()}
    ends = sorted(end_tokens(model, tokenizer))
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "eos_token_id": ends or None}
    options["pad_token_id"] = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    if args.temperature == 0:
        options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif args.temperature is not None:
        options |= {"do_sample": True, "temperature": args.temperature}
    streamer = Printed(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        model.generate(**inputs, streamer=streamer, **options)
    except KeyboardInterrupt:
        print(" ...", flush=True)
    return streamer.text
