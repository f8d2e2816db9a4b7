"""The command `liger-trainer`: train recipes, say what fits, verify them, merge adapters, prepare Medusa heads."""

import argparse
import os
import sys
import warnings

from liger_trainer.command.accelerate_file import own_environment
from liger_trainer.command.fit import add_fit_command
from liger_trainer.command.launch import is_main_process, join_processes_without_gpu
from liger_trainer.command.medusa import add_medusa_commands
from liger_trainer.command.merge import add_merge_command
from liger_trainer.command.quiet_exit import QuietExit
from liger_trainer.command.recipe import parse_recipe
from liger_trainer.command.recipe_parser import TRAIN_USAGE
from liger_trainer.command.shipped_files import add_shipped_commands
from liger_trainer.command.verify import add_verify_command
from liger_trainer.errors import RecipeError, RunError


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 0 for success, 2 for a mistake that the user can mend, 1 for a run that could not be saved, 130 or 143
    for a run that was stopped by SIGINT (Ctrl-C) or SIGTERM, and 141 where nobody reads the output any more, as in
    `liger-trainer recipes | head -1`. With every other code but 0, a line on stderr says why.

    Args:
        argv (`list[str]`, *optional*): The words of the command line. Unset: those of this process, which then ends
            without finalising the interpreter if its run was cut short (`QuietExit`).
    """
    quiet_exit = QuietExit()
    if argv is None:
        quiet_exit.register()
    args = _parser().parse_args(argv)
    code = _exit_code(args)
    if code in _CUT_SHORT:
        quiet_exit.code = code
    return code


_CUT_SHORT = (1, 130, 141, 143)


def _exit_code(args: argparse.Namespace) -> int:
    try:
        code = args.run(args)
        sys.stdout.flush()  # here, so that a closed pipe is noticed before Python ends
        return code
    except RecipeError as error:
        return _say(f"error: {error}", 2)
    except KeyboardInterrupt:
        return _say("interrupted.", 130)
    except BrokenPipeError:
        return 141


def _say(line: str, code: int) -> int:
    if is_main_process():
        print(f"liger-trainer: {line}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    from liger_trainer import __version__

    parser = argparse.ArgumentParser(prog="liger-trainer", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a recipe",
        usage=TRAIN_USAGE,
        description="Train a recipe. With --preview, train nothing, and show the recipe's first N rows (one row if N "
        "is left out) as the trainer sees them, with what is learned marked. With --dry_run, only print the recipe "
        "that would run. Any key of a recipe can be given as an option, which beats the file. `liger-trainer train "
        "RECIPE --help` lists all keys.",
        allow_abbrev=False,
    )
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a name that `liger-trainer recipes` lists")
    options = train.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="--key value", help="options, after RECIPE"
    )
    options.required = False  # otherwise argparse would ask for them too where RECIPE is missing
    train.set_defaults(run=_train)

    add_shipped_commands(commands)
    add_fit_command(commands)
    add_verify_command(commands)

    doctor = commands.add_parser("doctor", help="say what would be patched in a model, and why the rest would not be")
    doctor.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hub; only its config is read")
    doctor.add_argument("--gguf_file", help="a GGUF file in the folder MODEL")
    doctor.add_argument("--trust_remote_code", action="store_true", help="run model code that comes with MODEL")
    doctor.set_defaults(run=_doctor)

    add_merge_command(commands)
    add_medusa_commands(commands)
    return parser


def _train(args: argparse.Namespace) -> int:
    with own_environment():
        return _train_as_launched(args)


def _train_as_launched(args: argparse.Namespace) -> int:
    # Without a GPU, OpenMP's threads spin at every barrier, which makes a step several times slower as soon as another
    # process wants a core. Sleeping costs little where the cores are idle. torch reads this when it is loaded, later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _keep_the_log_short()
    join_processes_without_gpu()
    preview_rows, options = _take_preview(args.options)
    dry = [word for word in options if word in ("--dry_run", "--dry-run")]
    recipe = parse_recipe(args.recipe, [word for word in options if word not in dry])
    if dry and preview_rows is not None:
        raise RecipeError("--preview and --dry_run are both given, but each shows something else. Keep one of them.")
    if dry:
        if is_main_process():
            print(f"# {recipe.path}; every other key has its default", recipe.to_yaml(), sep="\n", end="")
        return 0
    from liger_trainer.command.checkpoints import no_empty_folder, what_is_left
    from liger_trainer.command.preemption import SaveOnSigterm, Terminated, sigterm_ends
    from liger_trainer.command.run import run

    if preview_rows is not None:
        from liger_trainer.command.preview import without_a_trace

        with without_a_trace(recipe):
            text = run(recipe, preview_rows)
        if text is not None:
            print(f"\n{text}")
        return 0
    stop = SaveOnSigterm()
    try:
        with sigterm_ends(stop), no_empty_folder(recipe.training.output_dir):
            summary = run(recipe, callbacks=(stop,))
    except RunError as error:
        return _say(f"error: {error}", 1)
    except BrokenPipeError:
        return _say(f"nobody reads the output any more, so the run has ended. {what_is_left(recipe)}", 141)
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        how = "terminated" if terminated else "interrupted"
        return _say(f"{how}. {what_is_left(recipe)}", 143 if terminated else 130)
    if summary is not None:
        print(f"\n{summary}")
    return 0


def _keep_the_log_short() -> None:
    """Leave out lines that a user can do nothing about. What the user has set in the environment is kept."""
    # The libraries draw a dozen progress bars that are full at once, so a bar appears only after this many seconds.
    # tqdm reads this when it is loaded, later.
    os.environ.setdefault("TQDM_DELAY", "2")
    # Newer transformers has a new name for this option and warns of the old one, which TRL uses and all versions know.
    warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning, append=True)


def _take_preview(words: list[str]) -> tuple[int | None, list[str]]:
    """How many rows `--preview [N]` asks for, which is None without that option; and the other options."""
    for i, word in enumerate(words):
        name, _, given = word.partition("=")
        if name != "--preview":
            continue
        rest = words[i + 1 :]
        if not given and rest and not rest[0].startswith("-"):
            given, rest = rest[0], rest[1:]
        if given and not (given.isdecimal() and int(given) > 0):
            raise RecipeError(
                f"--preview is {given!r}; expected the number of rows to show, 1 or more. Without a number, one row is "
                "shown."
            )
        return int(given or 1), words[:i] + rest
    return None, words


def _doctor(args: argparse.Namespace) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from liger_trainer import apply_liger
    from liger_trainer.command.model_source import find_model

    config = find_model(args.model, args.gguf_file, trust_remote_code=args.trust_remote_code).load(AutoConfig)
    with torch.device("meta"):  # the report depends on code and shapes only, so no weights are needed
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    print(apply_liger(model))
    return 0
