"""The command `liger-trainer`: train recipes, say what fits, verify, compare, merge, chat, prepare speculative heads.

Each command imports torch and transformers only when it runs, so that `--help` does not wait for them.
"""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

from liger_trainer.command.options import add_recipe_command, parse_positive, parse_switch, take_options
from liger_trainer.command.processes import is_main_process, print_error, print_loading, print_status
from liger_trainer.command.recipe.accelerate_file import preserve_environment
from liger_trainer.command.recipe.parser import asks_for_topics
from liger_trainer.command.recipe.read import TRAIN_USAGE, Recipe, parse_recipe, read_recipe
from liger_trainer.command.recipe.shipped_files import add_shipped_commands
from liger_trainer.command.run import launch
from liger_trainer.command.tools.chat import add_chat_command
from liger_trainer.command.tools.compare import add_compare_command
from liger_trainer.command.tools.doctor import add_doctor_command
from liger_trainer.command.tools.evaluate import add_evaluate_command
from liger_trainer.command.tools.fit import add_fit_command
from liger_trainer.command.tools.heads import add_head_commands
from liger_trainer.command.tools.merge import add_merge_command
from liger_trainer.command.tools.verify import add_verify_command
from liger_trainer.errors import RecipeError, RunError


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: the run could not be saved. 2: a mistake that the user can correct. 130: SIGINT (Ctrl-C). 143:
    SIGTERM. 141: the reader of the output is gone, as with `liger-trainer recipes | head -1`. Every code but 0 comes
    with a line on stderr that says why.

    Args:
        argv (`list[str]`, *optional*): The command line. Unset: this process's.
    """
    args = _parser().parse_args(argv)
    # Newer transformers has a new name for this option and warns of the old one, which TRL and peft use.
    warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning, append=True)
    try:
        code = args.run(args)
        sys.stdout.flush()  # raises BrokenPipeError here, where it is caught
        return code
    except RecipeError as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print_status("interrupted.")
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # Python flushes stdout once more when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    from liger_trainer import __version__

    parser = argparse.ArgumentParser(prog="liger-trainer", description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_recipe_command(
        commands,
        "train",
        _train,
        TRAIN_USAGE,
        "train a recipe",
        "Train a recipe. With --preview, do not train: show the recipe's first N rows (one row if N is left out) as "
        "the trainer sees them, with the learned tokens marked. With --dry_run, print the recipe that would run, and "
        "check its rows, its chat template and the config of its model. `liger-trainer train RECIPE --help` lists all "
        "keys by topic.",
    )
    add_shipped_commands(commands)
    add_fit_command(commands)
    add_verify_command(commands)
    add_compare_command(commands)

    add_doctor_command(commands)
    add_merge_command(commands)
    add_chat_command(commands)
    add_evaluate_command(commands)
    add_head_commands(commands)
    return parser


@preserve_environment()
def _train(args: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator", UserWarning)
    own_options, argv_rest = take_options(args.options, "dry_run", "preview")
    if not asks_for_topics(argv_rest):
        print_loading()
    preview_rows = parse_positive("--preview", own_options["preview"] or "1", int) if "preview" in own_options else None
    if parse_switch("--dry_run", own_options.get("dry_run", "false")):
        if preview_rows is not None:
            raise RecipeError("--preview and --dry_run are both given. Keep one of them.")
        recipe = parse_recipe(args.recipe, argv_rest)
        if is_main_process():
            print(f"# {recipe.path}; every other key has its default", recipe.to_yaml(), sep="\n", end="", flush=True)
        from liger_trainer.command.rows.sources import find_sources

        with _name_recipe_in_errors(recipe):
            find_sources(recipe)
        return 0
    # torch and tqdm read these when they are imported, further down. By default OpenMP's threads spin at barriers: a
    # CPU step gets several times slower as soon as another process wants a core. The delay hides the progress bars of
    # the dozen short jobs that finish at once.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DELAY", "2")
    launch.check_restarts()
    launch.exit_with_launcher()
    explicit, parse = read_recipe(args.recipe, argv_rest)
    launch.apply_precision(explicit.get("bf16"), explicit.get("fp16"))
    launch.load_on_every_process(explicit.get("fp8"), explicit.get("bf16"), explicit.get("fp16"))
    recipe = parse()
    from liger_trainer.command.rows.preview import in_temporary_folder
    from liger_trainer.command.run.preemption import SaveOnSigterm, Terminated, handle_sigterm
    from liger_trainer.command.run.saving import describe_last_checkpoint
    from liger_trainer.command.run.train import run

    stop = SaveOnSigterm()
    try:
        with _name_recipe_in_errors(recipe), in_temporary_folder(recipe) if preview_rows else handle_sigterm(stop):
            text = run(recipe, preview_rows, stop)
    except RunError as error:
        print_error(str(error))
        return 1
    except KeyboardInterrupt as error:
        how, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        print_status(f"{how}. {describe_last_checkpoint(recipe)}")
        return code
    if text is not None:
        print(f"\n{text}")
    return 0


@contextlib.contextmanager
def _name_recipe_in_errors(recipe: Recipe) -> Iterator[None]:
    """Context manager: prefix the message of a RecipeError with the path of the recipe."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{recipe.path}: {error}") from error
