"""`liger-trainer fit RECIPE` says what a training step takes up on a GPU, and what would fit, without a GPU."""

import argparse
import re
import sys
from typing import Any

from liger_trainer.command.options import add_recipe_command, positive, take_options
from liger_trainer.command.processes import say_loading
from liger_trainer.command.recipe.accelerate_file import own_environment
from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.errors import RecipeError

_USAGE = "liger-trainer fit RECIPE [--gpus N] [--gpu-memory GIB] [--images WxH,...] [--key value ...]"


def add_fit_command(commands: Any) -> None:
    """Add `fit` to the subparsers of `liger-trainer`."""
    add_recipe_command(
        commands, "fit", _fit, _USAGE, "say how much GPU memory a recipe needs, and what would fit; needs no GPU",
        "Say how much memory of a GPU a step of a recipe needs, from the config of its model alone, which "
        "plan activation_checkpointing: auto would choose, and the longest row and the largest batch that fit. "
        "--gpus is the number of GPUs (1), --gpu-memory what each of them has, in GiB (80), --images the sizes of the "
        "images of a row in pixels, such as 640x480 or 640x480,640x480.",
    )  # fmt: skip


def _fit(args: argparse.Namespace) -> int:
    given, words = take_options(args.options, "gpus", "gpu_memory", "images")
    gpus = positive("--gpus", given.get("gpus", "1"), int)
    memory = positive("--gpu-memory", given.get("gpu_memory", "80"), float)
    images = _sizes(given["images"]) if "images" in given else []
    say_loading()
    with own_environment():
        # Without this, transformers refuses bf16 where there is no GPU
        recipe = parse_recipe(args.recipe, [*words, "--use_cpu", "true"], _USAGE)
        _show("reading the config of the model")
        from liger_trainer.command.tools.fit_job import checkpointing_of, job_of, may_capture, size_of
        from liger_trainer.fitting.answer import answer
        from liger_trainer.fitting.images import UnknownSizes

        job = job_of(recipe, gpus, images)
        rows, length = size_of(recipe, job.images)
        try:
            text = answer(job, rows, length, checkpointing_of(recipe), memory, may_capture(recipe, gpus), _show)
        except UnknownSizes as error:
            raise RecipeError(
                f"liger-trainer fit cannot count the images of {job.shape.config.model_type}: {error}. Leave out "
                "--images to count the rest."
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
    """Show how far the command is, on a terminal always in the same line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
