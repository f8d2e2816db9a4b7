"""`liger-trainer fit RECIPE`: how much GPU memory a training step needs, and what would fit. It needs no GPU."""

import argparse
import re
import sys
from typing import Any

from liger_trainer.command.options import add_recipe_command, parse_positive, parse_switch, take_options
from liger_trainer.command.processes import print_loading
from liger_trainer.command.recipe.accelerate_file import preserve_environment
from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.errors import RecipeError

_USAGE = (
    "liger-trainer fit RECIPE [--gpus N] [--gpu-memory GIB] [--images WxH,...] [--fla true|false] [--key value ...]"
)


def add_fit_command(commands: Any) -> None:
    """Add `fit` to the subparsers of `liger-trainer`."""
    add_recipe_command(
        commands,
        "fit",
        _fit,
        _USAGE,
        "say how much GPU memory a recipe needs, and what would fit; needs no GPU",
        "Say how much GPU memory a step of a recipe needs, which plan activation_checkpointing: auto would choose, and "
        "the longest row and the largest batch that fit. Only the config of the model is read. --gpus is the number of "
        "GPUs (1), --gpu-memory the memory of each in GiB (80), --images the sizes of the images of a row in pixels, "
        "such as 640x480 or 640x480,640x480. --fla says whether flash-linear-attention is installed where the model is "
        "trained (true).",
    )


def _fit(args: argparse.Namespace) -> int:
    own_options, argv = take_options(args.options, "gpus", "gpu_memory", "images", "fla")
    gpus = parse_positive("--gpus", own_options.get("gpus", "1"), int)
    memory = parse_positive("--gpu-memory", own_options.get("gpu_memory", "80"), float)
    images = _sizes(own_options["images"]) if "images" in own_options else []
    fla = parse_switch("--fla", own_options.get("fla", "true"))
    print_loading()
    with preserve_environment():
        # Without use_cpu, transformers rejects bf16 on a machine without a GPU
        recipe = parse_recipe(args.recipe, [*argv, "--use_cpu", "true"], _USAGE)
        _show("reading the config of the model")
        from liger_trainer.command.tools.fit_spec import checkpointing_of, may_capture, size_of, train_spec_of
        from liger_trainer.fitting.fit_report import fit_report
        from liger_trainer.fitting.images import UnknownSizes

        spec = train_spec_of(recipe, gpus, images, fla)
        rows, length = size_of(recipe, spec.images)
        try:
            text = fit_report(spec, rows, length, checkpointing_of(recipe), memory, may_capture(recipe, gpus), _show)
        except UnknownSizes as error:
            raise RecipeError(
                f"liger-trainer fit cannot count the images of {spec.shape.config.model_type}: {error}. Leave out "
                "--images to estimate the rest."
            ) from error
    _show("")
    print(text)
    return 0


def _sizes(text: str) -> list[tuple[int, int]]:
    matches = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size.strip()) for size in text.split(",")]
    if not all(matches):
        raise RecipeError(
            f"--images is {text!r}; expected the width and height of each image of a row in pixels, such as "
            "640x480,1024x768."
        )
    return [(int(size[1]), int(size[2])) for size in matches if size]


def _show(line: str) -> None:
    """Show the progress of the command; on a terminal, always in the same line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
