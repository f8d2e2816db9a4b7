"""Loads models and adapters, for chat, evaluate, merge and the commands for speculative heads."""

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from liger_trainer.command.processes import importing, print_loading
from liger_trainer.command.recipe.model_source import dequantize_options, find_model
from liger_trainer.errors import RecipeError
from liger_trainer.paths import find_beside

_LIBRARIES = ("torch", "transformers.modeling_utils", "transformers.processing_utils")
"""The libraries that every command here needs."""


def add_command(commands, name: str, run, description: str) -> argparse.ArgumentParser:
    """Add a command that runs `run(args)` and shows errors of libraries in one line."""
    parser = commands.add_parser(name, help=description, allow_abbrev=False)
    parser.set_defaults(run=lambda args: _run(run, args))
    return parser


def add_model_options(parser) -> None:
    """Add the options that `load_for_inference` reads."""
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="the dtype of the model; auto, the default, is the dtype that it is saved in",
    )
    parser.add_argument("--gguf_file", help="a GGUF file in the folder of the model")
    parser.add_argument("--trust_remote_code", action="store_true", help="run model code that comes with the model")


def _run(command, args) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `liger-trainer train` does, before torch loads
    print_loading()
    with importing():
        for module in _LIBRARIES:
            importlib.import_module(module)
    try:
        command(args)
    except (ValueError, OSError) as error:  # libraries raise these for bad input; a bug elsewhere keeps its traceback
        raise RecipeError(str(error)) from error
    return 0


def load_for_inference(name: str, args, gets_adapter: bool = False, shows_images: bool = False, **options):
    """Return the model, in eval mode and on the GPU if there is one, and its tokenizer. Errors are about MODEL.

    With `shows_images`, an image model keeps its vision tower, and its processor is returned instead of the tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GgufConfig

    from liger_trainer.fitting.meta_model import auto_class_of

    source = find_model(name, args.gguf_file, key="MODEL", trust_remote_code=args.trust_remote_code, **options)
    config = source.load(AutoConfig) if gets_adapter or shows_images else None  # an adapter's folder has none
    init: dict[str, Any] = {"dtype": args.dtype}
    if source.is_gguf:  # auto would mean the dtype of the file's quantized blocks
        init = {"dtype": "float32" if args.dtype == "auto" else args.dtype}
        init["quantization_config"] = GgufConfig(dequantize=True)
    elif gets_adapter:
        init |= dequantize_options(config)
    sees = shows_images and getattr(config, "vision_config", None) is not None
    model = source.load(auto_class_of(config) if sees else AutoModelForCausalLM, **init)
    reader = source.load(AutoProcessor if sees else AutoTokenizer)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), reader


def is_adapter(folder: str) -> bool:
    """Return whether `folder` holds a PEFT adapter instead of a whole model."""
    return os.path.isfile(os.path.join(folder, "adapter_config.json"))


def load_adapter(model, adapter: str):
    """Load the adapter in the folder `adapter` onto its base `model`, and return the PEFT model."""
    from peft import PeftModel
    from safetensors.torch import load_file

    path = Path(adapter, "adapter_model.safetensors")
    saved = load_file(path) if path.is_file() else {}
    embeddings = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    for name, tensor in saved.items():
        if name.endswith(f"{embeddings}.weight") and len(tensor) != model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tensor))  # the adapter was trained with added tokens
    return PeftModel.from_pretrained(model, adapter)


def tokenizer_of(adapter: str, trust_remote_code: bool = False):
    """Return the tokenizer or image processor that was saved with an adapter, or None."""
    from transformers import AutoProcessor, AutoTokenizer

    if not os.path.isfile(os.path.join(adapter, "tokenizer_config.json")):
        return None
    sees = any(os.path.isfile(os.path.join(adapter, f"{name}_config.json")) for name in ("processor", "preprocessor"))
    return (AutoProcessor if sees else AutoTokenizer).from_pretrained(adapter, trust_remote_code=trust_remote_code)


def find_base(name: str | None, adapter: str) -> str:
    """Return the base that an adapter names. A relative path is resolved in the working directory, then next to it."""
    if not name:
        raise RecipeError(f"{adapter} does not name its base. Say where the base is with --model.")
    folder = Path(adapter).absolute()  # the output_dir of a training, or a checkpoint in it
    parent = folder.parents[1] if folder.name.startswith("checkpoint-") else folder.parent
    return str(find_beside(name, parent) or name)
